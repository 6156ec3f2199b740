"""Child processes of vitrail that end when their parent has ended, however it ended.

The parent holds the writing end of the child's stdin and writes nothing. The kernel closes it with the parent, also
after SIGKILL, and a thread of the child sees this. Linux's PR_SET_PDEATHSIG would not do: it also fires when only the
thread that started the child ends, a parent that dies before the call goes unnoticed, and other systems lack it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that a process has to save and end after its parent has ended."""


ROOT = Path(__file__).resolve().parents[3]
"""Where `vitrail` is imported from."""


def python(module: str) -> list[str]:
    """Return the start of a command that runs a module of vitrail. It needs `python_path`.

    -P: the current folder is not the first in which modules are looked for, so that a file yaml.py in a folder that
    the user has received is not run in place of the library.
    """
    return [sys.executable, "-P", "-m", module]


def python_path() -> str:
    """Return the PYTHONPATH with which a process of Python finds this vitrail."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that calls `end_with_parent`; `options` are those of `subprocess.Popen`."""
    # in a process group of its own: Ctrl-C in a terminal is forwarded and must not arrive twice
    return subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, **options)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start` has started, and what is left of the processes that it has started itself."""
    process.kill()
    with suppress(ProcessLookupError, PermissionError):  # the group is empty, or nothing but an ended process
        os.killpg(process.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Make this process save and end, as after SIGTERM, when its parent has ended; kill it if it does not end."""
    threading.Thread(target=_follow, name="parent", daemon=True).start()


def _follow() -> None:
    """Read stdin until it closes. A thread that reads sys.stdin would hold its lock when the interpreter ends."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.killpg(0, signal.SIGKILL)  # it hangs; its compilers and the like belong to its group
