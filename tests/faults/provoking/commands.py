"""The real command line, each time in a process of its own.

The processes are `forked`. `before` is what a test does inside the new process ahead of the command: it lowers a
limit, breaks a function, or has the process kill itself at a chosen moment.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import server

from vitrail import cli
from vitrail.training import floor
from vitrail.verbs.train import train

REPORTED = train.reported
"""Whether it has another place here says whether a command's training is to write a page: see tests/conftest.py."""
PATIENCE = 120.0
"""Seconds after which a command counts as hung, and the test fails."""


@dataclass
class Command:
    """A command that has been started."""

    process: Any
    folder: Path
    argv: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Number of its process."""
        return int(self.process.pid)

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return (self.folder / "out").read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return (self.folder / "err").read_text(encoding="utf-8", errors="replace")

    def wait(self, patience: float = PATIENCE) -> int:
        """Return the exit code once it has ended, minus the signal where one killed it."""
        self.process.join(patience)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"vitrail {' '.join(self.argv)} hung after {patience:g} s:\n{self.err}")
        return int(self.process.exitcode)


def start(
    *argv: str | Path,
    cwd: Path,
    before: Callable[..., None] | None = None,
    given: Sequence[Any] = (),
    env: Mapping[str, str | None] | None = None,
) -> Command:
    """Begin `vitrail ARGV` in `cwd`, after `before(*given)`; None in `env` removes a variable."""
    folder = Path(tempfile.mkdtemp(prefix="command-"))
    for name in ("out", "err"):
        (folder / name).touch()
    words = [str(word) for word in argv]
    process = server().Process(
        target=_child,
        args=(words, str(cwd), str(folder), before, tuple(given), dict(env or {}), train.reported is REPORTED),
    )
    process.start()
    command = Command(process, folder, words)
    weakref.finalize(command, shutil.rmtree, folder, ignore_errors=True)
    return command


def run(*argv: str | Path, cwd: Path, **options: Any) -> Command:
    """Run `vitrail ARGV` to its end; `command.process.exitcode` is the exit code."""
    command = start(*argv, cwd=cwd, **options)
    command.wait()
    return command


def _child(
    argv: list[str],
    cwd: str,
    folder: str,
    before: Callable[..., None] | None,
    given: tuple[Any, ...],
    env: dict[str, str | None],
    page: bool,
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would be deaf to Ctrl-C
    os.chdir(cwd)
    for name, value in env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if before is not None:
        before(*given)
    if not page:
        train.reported = lambda result: result
        floor._affordable = lambda *_: 0
    code = cli.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
