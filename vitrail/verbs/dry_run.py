"""`--dry-run`: everything that can go wrong before the second step, tried without leaving a trace; and the cost."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.train.run import Run

if TYPE_CHECKING:
    from vitrail.cost.devices import Device
    from vitrail.cost.estimate import Cost
    from vitrail.train.plan import Plan
    from vitrail.train.resolve import Resolved

COPIES = 10
"""A run folder holds about so many times the weights: checkpoints with optimiser state, best and last model."""
SAMPLED = 1000
"""Steps at which the size of the images is looked at."""


def check(run: Run) -> tuple[dict[str, str], Cost]:
    """Open the data, build the network, train on one batch; return what came of it, and what the run will cost.

    Raises what training itself would raise. Writes nothing.
    """
    import torch

    from vitrail.data.source import open_data
    from vitrail.model.attention import fast_math
    from vitrail.objective.supervised import SupervisedObjective
    from vitrail.train.batch_size import image_bytes
    from vitrail.train.batches import endless, training_loader
    from vitrail.train.parallel import prepare
    from vitrail.train.plan import Plan
    from vitrail.train.resolve import build_model, resolve
    from vitrail.train.step import backward, seed_step
    from vitrail.train.tune import tune

    splits = open_data(run.data, seed=run.seed)
    names = splits.class_names
    resolved = resolve(run, splits.train, names)
    fast_math()
    torch.manual_seed(run.seed)
    model = build_model(resolved)
    tuned = tune(model, run, resolved.decisions)
    objective = SupervisedObjective(model, run.objective, run.augment, len(names), run.seed)
    objective.to(resolved.device).train()
    run = resolved.with_micro_batches(objective)
    each = None if tuned.base is None else image_bytes(objective, run, resolved.config)
    prepare(model, run)
    held_out = "no validation images" if splits.validation is None else f"{len(splits.validation):,} to choose by"
    checked = {
        "data": f"{len(splits.train):,} images of {len(names)} classes to train on, {held_out}",
        "model": f"{run.model if run.weights is None else run.weights}, {tuned.of:,} parameters",
        **resolved.decisions,
        "disk": _disk(Path(run.out), COPIES * 4 * tuned.parameters),
    }
    with closing(training_loader(run, splits.train)) as loader:
        plan = Plan.of(run, len(loader))
        checked["length"] = f"{plan.total:,} steps of {run.batch_size} images, {len(loader):,} to an epoch"
        batch = next(endless(loader, 0))
        seed_step(run.seed, 0, 0)
        began = time.perf_counter()
        outcome = backward(objective, batch, step=0, parts=run.accumulate or 1, autocast=resolved.autocast)
        seconds = time.perf_counter() - began
    checked["one batch"] = f"loss {outcome.loss:.4f}, {seconds:.2f} s (the first is the slowest)"
    cost = _cost(run, resolved, plan, seconds)
    if each is not None:  # of a network that is frozen in part no formula knows what it takes: it was measured
        cost = replace(cost, learning=tuned.parameters, activation_bytes=round(each))
    return checked | {f"cost, {subject}": text for subject, text in cost.lines().items()}, cost


def _disk(out: Path, need: int) -> str:
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    enough = "" if free > need else "; that may not be enough"
    return f"{free / 2**30:.1f} GiB free, the run folder takes about {need / 2**30:.2f} GiB{enough}"


def _cost(run: Run, resolved: Resolved, plan: Plan, seconds: float) -> Cost:
    """The cost of the whole run on this machine, going by the `seconds` that this process's first batch took."""
    from vitrail import world
    from vitrail.cost.estimate import estimate
    from vitrail.cost.flops import training_flops
    from vitrail.cost.kept import Arithmetic

    assert run.batch_size is not None
    arithmetic = Arithmetic("bf16" if resolved.autocast else "float32", cpu=resolved.device.type == "cpu")
    reached = training_flops(resolved.config) * run.batch_size / world.size() / seconds
    flops = _flops(run, resolved, plan)
    share = 1.0 if plan.limit is None else min(plan.limit * world.size() * reached / flops, 1.0)
    return estimate(
        run.model if run.weights is None else run.weights,
        resolved.config,
        images=share * plan.total * run.batch_size,
        flops=share * flops,
        device=_this_device(resolved, reached),
        arithmetic=arithmetic,
    )


def _flops(run: Run, resolved: Resolved, plan: Plan) -> float:
    """Of the whole run; images may grow on the way."""
    from collections import Counter

    from vitrail.cost.flops import training_flops
    from vitrail.train.progressive import Sizes

    assert run.batch_size is not None
    sizes, count = Sizes(run.progressive, resolved.config), min(plan.total, SAMPLED)
    seen = Counter(sizes.size(plan.growth(place * plan.total // count, 0.0)) for place in range(count))
    mean = sum(times * training_flops(resolved.config, size) for size, times in seen.items()) / count
    return mean * plan.total * run.batch_size


def _this_device(resolved: Resolved, reached: float) -> Device:
    """This machine's device as if the rate that was just reached were its peak; nobody knows what it costs."""
    from vitrail.cost.devices import Device
    from vitrail.train.batch_size import free_memory

    memory = free_memory(resolved.device)
    why = "what the first batch reached; it is the slowest"
    return Device(str(resolved.device), "this machine", reached, memory, 1.0, why)
