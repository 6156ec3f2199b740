"""Trials as tasks of a Ray that is started here; only where the extra is installed."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_processes import tiny

from vitrail.durations import Steps
from vitrail.transfer.grid import Sweep, Trials
from vitrail.transfer.on_ray import OnRay
from vitrail.transfer.sweep import sweep
from vitrail.transfer.trial import here

pytest.importorskip("ray", reason="the extra [ray] is not installed")


def kill_one(folder: Path, killed: list[str], done: threading.Event) -> None:
    """Kill the process of the first trial that has saved something."""
    while not done.wait(0.01):
        for saved in folder.glob("dev-*/run-*/checkpoints/step-??????"):
            trial = saved.parents[2].name
            for process in psutil.Process().children(recursive=True):
                if trains(process, trial):
                    process.send_signal(signal.SIGKILL)
                    killed.append(trial)
                    return


def trains(process: psutil.Process, trial: str) -> bool:
    """Is it Ray's process that writes the log of the trial?"""
    try:
        named = "_train" in " ".join(process.cmdline())
        return named and any(trial in file.path for file in process.open_files())
    except psutil.Error:  # it has ended
        return False


@pytest.mark.kill
def test_a_sweep_on_ray_gives_what_it_gives_here_even_where_a_trial_is_killed(tmp_path: Path) -> None:
    base = replace(tiny(tmp_path), duration=Steps(30), checkpoint_every=Steps(5))
    plan = Sweep(base, {"optim.lr": (0.001, 0.01)}, seeds=(0,))
    killed, done = list[str](), threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path / "ray", killed, done))
    killer.start()
    try:
        ours = sweep(Trials.of(plan, tmp_path / "ray"), OnRay(parallel=2))
    finally:
        done.set()
        killer.join()
    theirs = sweep(Trials.of(plan, tmp_path / "here"), here)
    assert [row.outcome.dev for row in ours.search] == [row.outcome.dev for row in theirs.search]
    assert ours.chosen == theirs.chosen and ours.top1 == theirs.top1
    assert "step 30" in (ours.final[0].trial.folder / "log.txt").read_text()
    (trial,) = killed
    assert "resuming from" in (tmp_path / "ray" / trial / "log.txt").read_text()
