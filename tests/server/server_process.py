"""`vitrail serve` as a process of its own, which is forked."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked import Forked

ROOT = Path(__file__).resolve().parents[2]


class ServerProcess(Forked):
    """`vitrail serve` with its output in two pipes, used as a `subprocess.Popen` is."""

    def __init__(self, words: list[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="server-"))
        pipes = [self._folder / name for name in ("out", "err")]
        for pipe in pipes:
            os.mkfifo(pipe)
        super().__init__(_serve, words, [str(pipe) for pipe in pipes], env=os.environ)
        self.stdout, self.stderr = (os.fdopen(os.open(pipe, os.O_RDONLY), encoding="utf-8") for pipe in pipes)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what it still writes, once it has ended. Raises TimeoutExpired."""
        with ThreadPoolExecutor() as readers:
            rest = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self.wait(timeout)
            out, err = (each.result() for each in rest)
        return out, err

    def close(self) -> None:
        """End it, if it is still there."""
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()
        shutil.rmtree(self._folder)


def _serve(words: list[str], pipes: list[str]) -> None:
    for descriptor, pipe in enumerate(pipes, 1):
        os.dup2(os.open(pipe, os.O_WRONLY), descriptor)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), encoding="utf-8", write_through=descriptor == 2)
        for descriptor in (1, 2)
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    from vitrail import cli

    code = cli.main(words)
    sys.stdout.flush()
    os._exit(code)


@dataclass
class Running:
    process: ServerProcess
    url: str


@contextmanager
def serving(*models: Path, flags: tuple[str, ...] = ()) -> Iterator[Running]:
    """A server on a free port, ready to answer; killed at the end if it is still there."""
    process = ServerProcess(["serve", *map(str, models), "--port", "0", "--device", "cpu", *flags])
    try:
        yield Running(process, _ready(process))
    finally:
        process.close()


def _ready(process: ServerProcess) -> str:
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"http://[0-9.]+:[0-9]+", line):
            break
    else:
        raise AssertionError(f"it did not start: {''.join(said)}")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{found[0]}/readyz", timeout=5):
                return found[0]
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise AssertionError("it did not get ready")
