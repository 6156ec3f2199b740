"""A step waits for nothing: how often it reads from the device and talks to other processes, counted while it runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked import in_two_processes
from safetensors.torch import load_file
from tiny_runs import SHORT, lines, tiny_run
from torch import Tensor, nn

from vitrail import world
from vitrail.durations import Steps
from vitrail.training import loop
from vitrail.training import step as stepping
from vitrail.training.processes import in_process_group
from vitrail.training.run import Optim, Run, Schedule
from vitrail.world import leave

READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__")
"""Methods of a tensor that return when the device has computed its values."""
COLLECTIVES = ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier", "gather", "reduce")
FINITE = Counter(__bool__=2)
"""A CPU asks before it moves the average. An accelerator decides that itself (`test_nothing_waits`)."""
STEPS = 6


@contextmanager
def counted() -> Iterator[list[Counter[str]]]:
    """Yield a list that gets, for each training step but the first and the last, the calls of the methods above."""
    found: list[Counter[str]] = []
    now: Counter[str] = Counter()
    call = stepping.TrainingStep.__call__

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[0] if arguments else None
            if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool:
                now[name] += 1  # integers are indices of images, which stay on the CPU
            return original(*arguments, **options)

        return method

    def step(self: stepping.TrainingStep, *arguments: Any, **options: Any) -> None:
        now.clear()
        call(self, *arguments, **options)
        found.append(Counter(now))

    patches = [patch.object(stepping.TrainingStep, "__call__", step)]
    patches += [patch.object(Tensor, name, counting(name, getattr(Tensor, name))) for name in READS]
    patches += [patch.object(dist, name, counting(name, getattr(dist, name))) for name in COLLECTIVES]
    for each in patches:
        each.start()
    try:
        yield found
    finally:
        for each in patches:
            each.stop()


def short(out: Path, name: str, late: bool) -> Run:
    """Six steps between which nothing happens, with everything that is decided in a step."""
    still = {"evaluate_every": Steps(100), "checkpoint_every": Steps(100), "schedule": Schedule(warmup=Steps(1))}
    return tiny_run(out, name=f"{name}-{late}", duration=Steps(STEPS), optim=Optim(name, lr=3e-3), **still)  # type: ignore[arg-type]


def is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read numbers a step late, as on an accelerator."""
    create = stepping.TrainingStep.__init__

    def init(self: stepping.TrainingStep, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        self.late = True

    monkeypatch.setattr(stepping.TrainingStep, "__init__", init)


@pytest.mark.train
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("optimiser", ["adamw", "sgd", "lamb", "muon"])
def test_a_step_reads_its_numbers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimiser: str, late: bool
) -> None:
    if late:
        is_late(monkeypatch)
    with counted() as calls:
        loop.fit(short(tmp_path, optimiser, late))
    assert len(calls) == STEPS
    assert calls[0] - FINITE == (Counter() if late else Counter(tolist=1))  # late: of the first nothing is known yet
    assert calls[1:] == [Counter(tolist=1) + FINITE] * (STEPS - 1)


@pytest.mark.train
def test_numbers_that_are_read_late_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log, the averages and skipped updates are those of a run that reads at once; so are the weights."""
    original = stepping.backward

    def poisoned(objective: Any, batch: Any, *, step: int, **options: Any) -> Any:
        outcome = original(objective, batch, step=step, **options)
        if step in (1, 2):
            next(objective.parameters()).grad.fill_(float("nan"))
        return outcome

    plan = {**SHORT, "evaluate_every": Steps(4), "checkpoint_every": Steps(4)}
    monkeypatch.setattr(stepping, "backward", poisoned)
    now = loop.fit(tiny_run(tmp_path, name="now", **plan)).folder
    is_late(monkeypatch)
    order: list[tuple[str, int]] = []
    seen = stepping.TrainingStep.settle

    def settle(self: stepping.TrainingStep) -> None:
        if self._pending is not None:
            order.append(("read", self._pending.step))
        seen(self)

    def computed(*arguments: Any, step: int, **options: Any) -> Any:
        order.append(("computed", step))
        return poisoned(*arguments, step=step, **options)

    monkeypatch.setattr(stepping.TrainingStep, "settle", settle)
    monkeypatch.setattr(stepping, "backward", computed)
    late = loop.fit(tiny_run(tmp_path, name="late", **plan)).folder
    assert order[:4] == [("computed", 0), ("computed", 1), ("read", 0), ("computed", 2)]
    for kind in ("train", "skipped", "validation"):
        ours, theirs = lines(late, kind), lines(now, kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for mine, its in zip(ours, theirs, strict=True):
            assert {k: mine[k] for k in mine if k in ("loss", "lr", "top1", "nll", "images")} == {
                k: its[k] for k in its if k in ("loss", "lr", "top1", "nll", "images")
            }
    for part in ("best", "last"):
        first, second = (load_file(folder / "model" / part / "model.safetensors") for folder in (late, now))
        assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def together(out: Path) -> None:
    """Write what a process of two counted, and how DDP was started."""
    started, starting = list[bool](), nn.parallel.DistributedDataParallel

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(options["find_unused_parameters"])
        return starting(*arguments, **options)

    with in_process_group(), patch.object(nn.parallel, "DistributedDataParallel", start):
        for name, run in {"whole": short(out, "adamw", False), "sharded": short(out, "sgd", False)}.items():
            with counted() as calls:
                loop.fit(replace(run, shard=name == "sharded"))
            (out / f"{name}-{world.rank()}.json").write_text(json.dumps(calls))
        (out / f"ddp-{world.rank()}.json").write_text(json.dumps(started))
    leave(0)


@pytest.mark.processes
def test_a_step_talks_to_other_processes_once(tmp_path: Path) -> None:
    """Apart from the sums of gradients, which DDP and FSDP2 send by other calls. If weights are sharded, the gradient
    norm is a sum. In the first two steps gradients are summed one by one, with a flag for lack of memory."""
    assert in_two_processes(together, tmp_path, seconds=120) == [0, 0]
    assert [json.loads((tmp_path / f"ddp-{rank}.json").read_text()) for rank in range(2)] == [[False]] * 2
    for name, rank in product(("whole", "sharded"), range(2)):
        calls = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
        count = 2 if name == "sharded" else 1
        assert len(calls) == STEPS and calls[2:] == [{"all_reduce": count, "tolist": 1, **FINITE}] * (STEPS - 2)
