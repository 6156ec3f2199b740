"""Faults 62 to 64: the parent of processes is killed, too many processes are asked for, two of everything at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import run, start
from families import Family
from scenes import SHORT

from vitrail.transfer.trial import LOG


@pytest.mark.kill
def test_62_when_the_launcher_is_killed_its_processes_save_and_end(photos: Path, tmp_path: Path) -> None:
    flags = ("--nproc", "2", "--checkpoint-every", "100000 steps", "--evaluate-every", "100000 steps")
    with Family("train", photos, *SHORT, "100000 steps", *flags, cwd=tmp_path) as family:
        assert family.until(lambda: "step 10:" in family.said or '"kind": "train"' in metrics(tmp_path))
        assert len(family.members()) == 2
        os.kill(family.launcher.pid, signal.SIGKILL)
        family.gone()
        assert "stopped by SIGTERM" not in family.said  # the note goes to the launcher, which is no more
    saved = [path.name for path in (tmp_path / "runs" / "scratch-small-1" / "checkpoints").glob("step-*[0-9]")]
    assert len(saved) == 1
    resumed = start("train", "--resume", "runs/scratch-small-1", cwd=tmp_path)
    while "resuming" not in resumed.err:
        assert resumed.process.exitcode is None
    os.kill(resumed.pid, signal.SIGINT)
    resumed.wait()
    assert "another process" not in resumed.err


def metrics(cwd: Path) -> str:
    file = cwd / "runs" / "scratch-small-1" / "metrics.jsonl"
    return file.read_text() if file.exists() else ""


@pytest.mark.kill
@pytest.mark.nightly(
    "test_two_processes_train_side_by_side_what_one_trains_alone, whose trials end with their parent, and how that ends"
    " a process is test_62_when_the_launcher_is_killed_its_processes_save_and_end"
)
def test_62_when_a_sweep_is_killed_its_trials_save_and_end(photos: Path, tmp_path: Path) -> None:
    words = ("sweep", photos, *SHORT, "100000 steps", "--lr", "0.1", "0.2", "--parallel", "2", "--seeds", "1")
    with Family(*words, cwd=tmp_path) as family:
        assert family.until(lambda: len(list(tmp_path.glob("runs/sweep/*/run-1/.lock"))) == 2)
        family.send(signal.SIGKILL, [family.launcher.pid])
        family.gone()
    logs = [log.read_text() for log in tmp_path.glob(f"runs/sweep/*/{LOG}")]
    assert len(logs) == 2 and all("Traceback" not in log for log in logs)


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [("train", "--nproc", "1000"), ("sweep", "--lr", "0.1", "--parallel", "1000")],
    ids=" ".join,
)
def test_63_more_processes_than_fit_are_refused_before_one_starts(
    photos: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    verb, *flags = words
    command = run(verb, photos, *SHORT, "4 steps", *flags, cwd=tmp_path)
    flag, count = flags[-2:]
    assert command.process.exitcode == 2 and "Traceback" not in command.err
    assert f"{flag} is {count}, but only " in command.err and f"Give {flag} " in command.err
    assert not list(tmp_path.glob("runs/*/.lock"))
