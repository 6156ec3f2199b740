"""SIGHUP before the server runs. This module imports little, so that the signal is handled from the start."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class HangUps:
    """Context in which SIGHUP, which ends a process, is only remembered: models that are read now are read again later.

    If the terminal from which the server was started has gone, SIGHUP is handled as before.
    """

    def __init__(self) -> None:
        self.waiting, self.in_terminal = False, False
        self._before: Any = None

    def __enter__(self) -> HangUps:
        if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGHUP) or signal.SIG_DFL
            # nohup ignores the signal: the server survives its terminal
            self.in_terminal = self._before != signal.SIG_IGN and _has_terminal()
            signal.signal(signal.SIGHUP, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        if sys.platform != "win32" and self._before is not None:
            signal.signal(signal.SIGHUP, self._before)

    @property
    def of_terminal(self) -> bool:
        """Whether the terminal has gone, so that a signal says just this."""
        return self.in_terminal and not _has_terminal()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.of_terminal and callable(self._before):
            self._before(number, frame)
        self.waiting = True


def _has_terminal() -> bool:
    """Return whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True
