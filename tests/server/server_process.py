"""`vitrail serve` as a process of its own, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str


@contextmanager
def serving(*models: Path, flags: tuple[str, ...] = ()) -> Iterator[Running]:
    """A server on a free port, ready to answer; killed at the end if it is still there."""
    command = [sys.executable, "-m", "vitrail", "serve", *map(str, models), "--port", "0", "--device", "cpu", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Running(process, _ready(process))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def _ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
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
