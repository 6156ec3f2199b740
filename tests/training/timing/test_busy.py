"""A time limit beside programs that keep all cores busy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitrail.device import available_cores

LIMIT = 60.0


@pytest.fixture
def busy() -> Iterator[None]:
    """A program on each core, which ends by itself."""
    spin = f"import time; end = time.time() + {2 * LIMIT}\nwhile time.time() < end: pass"
    programs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(available_cores())]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.kill
@pytest.mark.usefixtures("busy")
def test_a_command_ends_with_its_time_limit_beside_busy_programs(tmp_path: Path) -> None:
    command = ["train", "digits", "--time-limit", f"{LIMIT}s", "--out", str(tmp_path), "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", *command], capture_output=True, text=True, timeout=4 * LIMIT
    )
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    if "left for training: the start took" in done.stderr:
        pytest.skip(f"even the start and the end of a command take most of {LIMIT:g} s on this machine at the moment")
    # the goal is 5 %; the tests that run beside this one come and go, which no prediction can know
    assert 0.5 * LIMIT < took < 1.5 * LIMIT
    result = json.loads(done.stdout)
    assert result["ended"] == "time limit" and result["steps"] > 20  # and not a recipe's number of epochs
