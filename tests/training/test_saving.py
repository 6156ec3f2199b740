"""Checkpoints written while training goes on: the same bits, one at a time, and durable before anybody says so."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vitrail import world
from vitrail.data.settings import Augment, Data
from vitrail.durations import Steps
from vitrail.errors import CheckpointError, TrainingError
from vitrail.training import loop
from vitrail.training import step as stepping
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.state import Checkpoints, RunStatus
from vitrail.training.run import Average, Model, Run


def tiny(out: Path) -> Run:
    return Run(
        out=str(out),
        data=Data("digits", subset=80),
        vit=Model(width=16, depth=1, heads=2, mlp_dim=32, patch=4),
        image_size=8,
        augment=Augment(crop="pad", pad=1),
        average=Average("ema", decay=0.9),
        duration=Steps(8),
        evaluate_every=Steps(8),
        checkpoint_every=Steps(2),
        batch_size=8,
        accumulate=1,
        precision="float32",
        workers=0,
        device="cpu",
        keep=4,
    )


def files(folder: Path) -> dict[str, bytes]:
    """Everything in the checkpoints but how long training took, by name."""
    names = ("model.safetensors", "state.safetensors")
    return {f"{at.name}/{name}": (at / name).read_bytes() for at in folder.iterdir() for name in names}


@pytest.mark.train
def test_training_goes_on_meanwhile_and_the_bits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of step 2 is held until step 3 has begun, which it never would if training waited for it."""
    begun, events = threading.Event(), list[str]()
    save, seed_step = checkpoint.save, stepping.seed_step

    def held(folder: Path, step: int, state: Any, **options: Any) -> Path:
        events.append(f"save {step}")
        if step == 2:
            assert begun.wait(60)
        path = save(folder, step, state, **options)
        events.append(f"saved {step}")
        return path

    def at_step(seed: int, step: int, rank: int) -> None:
        if step == 3:
            begun.set()
        seed_step(seed, step, rank)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", held)
        patch.setattr(stepping, "seed_step", at_step)
        meanwhile = loop.fit(tiny(tmp_path / "meanwhile")).folder
    assert events == [f"{what} {step}" for step in (2, 4, 6, 8) for what in ("save", "saved")]  # one at a time
    monkeypatch.setattr("vitrail.training.checkpoints.state.ROOM", float("inf"))  # no memory for copies
    before = loop.fit(tiny(tmp_path / "before")).folder
    assert files(meanwhile / "checkpoints") == files(before / "checkpoints")


def state_of(step: int) -> Any:
    contents = {"model": {"weight": torch.full((3, 5), float(step))}}
    status, objective = RunStatus(step=step), torch.nn.Identity()
    return SimpleNamespace(status=status, objective=objective, sharded=False, state_dict=lambda: contents)


def checkpoints_in(folder: Path, said: list[str] | None = None) -> Checkpoints:
    place: Any = SimpleNamespace(checkpoints=folder, path=folder)
    return Checkpoints(place, 2, (said if said is not None else []).append)


def test_what_is_copied_does_not_change_with_what_it_was_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, save = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given, **options: going.wait(60) and save(*given, **options))
    state = state_of(1)
    with checkpoints_in(tmp_path) as checkpoints:
        checkpoints.save(state, wait=False)
        state.state_dict()["model"]["weight"].zero_()  # training goes on
        assert checkpoints.saved is None and not list(tmp_path.iterdir())
        going.set()
        checkpoints.wait()
        assert checkpoints.saved == 1
    assert torch.equal(checkpoint.load(tmp_path / "step-000001")["model"]["weight"], torch.ones(3, 5))


def test_failures_are_counted_when_they_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(checkpoint, "save", fail)
    said: list[str] = []
    checkpoints = checkpoints_in(tmp_path, said)
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), wait=False)
    assert said == [f"warning: no checkpoint at step {step}: no room" for step in (1, 2)]
    with pytest.raises(TrainingError, match="last 3 checkpoints"):
        checkpoints.wait()
    assert checkpoints.saved is None


def test_a_moment_that_failed_is_tried_again_and_one_that_is_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = checkpoint.save, list[int]()

    def once(folder: Path, step: int, state: Any, **options: Any) -> Path:
        calls.append(step)
        if len(calls) == 1:
            raise CheckpointError("no room")
        return save(folder, step, state, **options)

    monkeypatch.setattr(checkpoint, "save", once)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(state_of(1), wait=False)
    for _ in range(2):
        checkpoints.save(state_of(1))
    assert calls == [1, 1] and checkpoints.saved == 1


def test_an_error_waits_for_the_disk_and_a_second_ctrl_c_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.save
    for error, durable in ((ValueError, True), (KeyboardInterrupt, False)):
        leaving = threading.Event()
        monkeypatch.setattr(
            checkpoint,
            "save",
            lambda *given, at=leaving, wait=not durable, **options: (
                at.wait(60) if wait else 0,
                save(*given, **options),
            ),
        )
        folder = tmp_path / error.__name__
        with pytest.raises(error), checkpoints_in(folder) as checkpoints:
            checkpoints.save(state_of(1), wait=False)
            raise error
        assert (checkpoint.newest(folder) == 1) == durable
        leaving.set()
        checkpoints.wait()


@pytest.mark.processes
def test_killed_while_the_thread_writes_the_one_before_is_newest(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        checkpoints = checkpoints_in(tmp_path)
        checkpoints.save(state_of(1), wait=False)
        checkpoints.wait()
        checkpoint.write_durably.__globals__["os"].fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(state_of(2), wait=False)
        checkpoints.wait()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert sorted(path.name.partition(".")[0] for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    assert checkpoint.latest_valid(tmp_path) == tmp_path / "step-000001"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("failed", "The main process failed while writing"),
        (None, r"The main process did not respond for 0.2 s \(--timeout\) while"),
    ],
)
def test_who_waits_for_the_main_process_hears_that_it_failed_or_died(
    monkeypatch: pytest.MonkeyPatch, told: str | None, message: str
) -> None:
    monkeypatch.setattr(world, "rank", lambda: 1)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    if told:
        store.set("alone/0", told)
    with pytest.raises(TrainingError, match=message), world.Pulse(store, 0.2), world.main_alone("writing"):
        pass
