from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import lines, newest, tiny_run

from vitrail import device
from vitrail.device import command_seconds, core_share
from vitrail.durations import Percent, Steps
from vitrail.training import time_limit
from vitrail.training.checkpoints import checkpoint
from vitrail.training.loop import fit
from vitrail.training.run import Average
from vitrail.training.time_limit import Clock, Ending


@pytest.fixture
def half_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "core_share", lambda: 0.5)


@pytest.mark.usefixtures("half_a_core")
def test_the_end_by_hand() -> None:
    found = Ending(validation=100, test=400, calibrated=True, reported=True, _share=0.5)
    alone = (time_limit.SAVING + time_limit.REPORTING + time_limit.LEAVING) / 0.5
    # 600 images evaluated at a third of a training image's 0.03 s, and 24 pictures
    assert found.seconds(0.03, 100) == pytest.approx(600 * 0.01 + 24 * 0.03 + alone)
    found.evaluation(5.0)  # 0.05 s an image
    assert found.seconds(0.03, 100) == pytest.approx(600 * 0.05 + 24 * 0.03 + alone)
    small = Ending(validation=0, test=0, calibrated=False, reported=False, _share=1.0)
    assert small.seconds(0.03, 100) == pytest.approx(time_limit.SAVING)


def test_the_linear_classifier_takes_its_share_of_the_training() -> None:
    found = Ending(0, 400, calibrated=False, reported=False, floor=3400, _share=0.5)
    without = time_limit.SAVING / 0.5 + 400 * 0.01
    # 600 images, the fewest, take 2.4 s
    for training, floor in ((400, 3400 * time_limit.FLOOR / 0.5), (200, 10.0), (49, 2.45), (47, 0.0), (9, 0.0)):
        assert found.seconds(0.03, training) == pytest.approx(without + floor)


def test_the_share_of_a_core_follows_what_the_steps_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    clock, core = [0.0], [0.0]
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time_limit.time, "thread_time", lambda: core[0])
    found = Ending(100, 0, calibrated=True, reported=True, _share=1.0)
    for _ in range(200):  # a fifth of a core, and a fifth of the time waits for data
        clock[0], core[0] = clock[0] + 1.0, core[0] + 0.16
        found.step(waited=0.2 * clock[0])
    assert found._share == pytest.approx(0.2, rel=0.01)


def test_a_busy_thread_takes_part_of_the_core() -> None:
    alone = core_share(0.05)
    assert 0 < alone <= 1
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    other = threading.Thread(target=spin)  # Python runs one thread at a time
    other.start()
    try:
        shared = core_share(0.05)
    finally:
        stop.set()
        other.join()
    assert shared < 0.8


def test_only_a_command_counts_from_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert command_seconds() == 0  # pytest is no command of vitrail
    for program in ("/usr/bin/vitrail", "/lib/vitrail/__main__.py"):
        monkeypatch.setattr(device.sys, "argv", [program])
        assert 0 < command_seconds() < 3600
    monkeypatch.setattr(device.sys, "argv", ["/lib/pytest/__main__.py"])
    monkeypatch.setenv(device.BEGAN, str(time.time() - 100))  # a process of a command
    assert command_seconds() == pytest.approx(100, abs=1)


@pytest.mark.train
def test_a_run_that_the_time_ends_is_averaged_and_logged_over_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second in which a step takes 0.1 s, of a schedule of 100,000 steps."""
    monkeypatch.setattr(Clock, "elapsed", property(lambda clock: 0.1 * (clock._setup.state.status.step + 1)))
    monkeypatch.setattr(Clock, "for_training", lambda clock: 1.0)
    polyak, seldom = Average(kind="polyak", start=Percent(50)), Steps(10**4)
    run = tiny_run(tmp_path, average=polyak, duration=Steps(10**5), evaluate_every=seldom, time_limit=1.0)
    result = fit(run)
    assert result.ended == "time limit" and result.steps == 10
    assert checkpoint.load(newest(result.folder))["average"]["count"] == 5
    assert [line["step"] for line in lines(result.folder, "train")] == list(range(1, 11))
