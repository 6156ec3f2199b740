"""Commands that start processes, each in a new session, and all their processes, found by a mark in the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from forked import ROOT

PATIENCE = 120.0
"""Seconds after which something that does not happen fails the test."""
MARK = "VITRAIL_TEST_FAMILY"


class Family:
    """`vitrail WORDS` and every process that it starts, directly or not. A context that leaves no process."""

    def __init__(self, *words: str | Path, cwd: Path) -> None:
        self.mark, self.cwd = uuid.uuid4().hex, cwd
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(cwd / "said", "ab") as said:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "vitrail", *map(str, words)],
                **dict(cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said),
                start_new_session=True,
            )

    def __enter__(self) -> Family:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes():
            process.kill()
        self.launcher.wait()

    @property
    def said(self) -> str:
        """What its processes have written."""
        return (self.cwd / "said").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return those that run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def members(self) -> list[psutil.Process]:
        """Return the processes that the launcher has started, in the order of their numbers."""
        children = [process for process in self.processes() if process.pid != self.launcher.pid]
        return sorted(children, key=lambda process: process.pid)

    def until(self, happened: Callable[[], object], *, running: bool = True) -> bool:
        """Wait until something has happened. Return False if the command ended before, or where it should be `running`
        no more, fail after `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if running and self.launcher.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)
        return True

    def gone(self) -> None:
        """Wait until no process is left."""
        self.until(lambda: self.launcher.poll() is not None and not self.processes(), running=False)

    def send(self, number: signal.Signals, victims: list[int]) -> None:
        """Send a signal to these of its processes that still run."""
        for pid in victims:
            if psutil.pid_exists(pid):
                os.kill(pid, number)
