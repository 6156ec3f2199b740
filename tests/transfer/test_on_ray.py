"""Trials as tasks of a Ray that is started here, only where the extra is installed; and of one that is made up."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from test_processes import tiny
from tiny_runs import signal_at

from vitrail.durations import Steps
from vitrail.transfer.grid import Sweep, Trials
from vitrail.transfer.on_ray import OnRay
from vitrail.transfer.sweep import SweepResult, sweep
from vitrail.transfer.trial import here

LEARNING_RATES = {"optim.lr": (0.001, 0.01)}


class MadeUpRay:
    """What OnRay needs of Ray: tasks that run here one after another, of which the first is stopped and runs again."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=LookupError)
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []

    def init(self, **options: Any) -> None:
        self.asked.append(options)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": False}]

    def remote(self, function: Callable[..., None]) -> Any:
        def task(*arguments: Any) -> str:
            if not self.calls:
                with signal_at(7):
                    function(*arguments)
            self.calls.append(arguments[0])
            function(*arguments)
            return arguments[0]

        def options(**asked: Any) -> Any:
            self.asked.append(asked)
            return SimpleNamespace(remote=task)

        return SimpleNamespace(options=options)

    def wait(self, waiting: list[str], **_: Any) -> tuple[list[str], list[str]]:
        return waiting[-1:], waiting[:-1]  # in another order than they began

    def get(self, reference: str) -> None:
        pass

    def shutdown(self) -> None:
        self.calls.append("shutdown")


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


@pytest.mark.train
def test_a_sweep_of_tasks_gives_what_it_gives_here_even_where_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = MadeUpRay()
    monkeypatch.setitem(sys.modules, "ray", made_up)
    plan = Sweep(replace(tiny(tmp_path), duration=Steps(10), checkpoint_every=Steps(5)), LEARNING_RATES, seeds=(0,))
    ours = same_sweep(plan, tmp_path, OnRay(address="auto", parallel=2))
    search, final = [row.trial.folder for row in ours.search], ours.final[0].trial.folder
    assert made_up.calls == [*map(str, search), "shutdown", str(final), "shutdown"]
    assert made_up.asked[0].items() >= {"address": "auto", "log_to_driver": False}.items()
    assert made_up.asked[1] == {"num_cpus": 2, "num_gpus": 0.0}
    assert ["resuming from" in (folder / "log.txt").read_text() for folder in search] == [True, False]
    assert "step 10" in (final / "log.txt").read_text()


def same_sweep(plan: Sweep, folder: Path, on_ray: OnRay) -> SweepResult:
    """Return what a sweep on Ray gives, which is what it gives here."""
    ours, theirs = sweep(Trials.of(plan, folder / "ray"), on_ray), sweep(Trials.of(plan, folder / "here"), here)
    assert [row.outcome.dev for row in ours.search] == [row.outcome.dev for row in theirs.search]
    assert ours.chosen == theirs.chosen and ours.top1 == theirs.top1
    return ours


@pytest.mark.kill
@pytest.mark.nightly("test_a_sweep_of_tasks_gives_what_it_gives_here_even_where_one_is_stopped, with a made-up Ray")
def test_a_sweep_on_ray_gives_what_it_gives_here_even_where_a_trial_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    plan = Sweep(replace(tiny(tmp_path), duration=Steps(30), checkpoint_every=Steps(5)), LEARNING_RATES, seeds=(0,))
    killed, done = list[str](), threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path / "ray", killed, done))
    killer.start()
    try:
        ours = same_sweep(plan, tmp_path, OnRay(parallel=2))
    finally:
        done.set()
        killer.join()
    assert "step 30" in (ours.final[0].trial.folder / "log.txt").read_text()
    (trial,) = killed
    assert "resuming from" in (tmp_path / "ray" / trial / "log.txt").read_text()
