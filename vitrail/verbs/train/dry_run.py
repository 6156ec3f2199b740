"""`--dry-run`: check everything that can fail before the second step, write nothing, and estimate the cost."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.device import fast_float32
from vitrail.training.run import Run
from vitrail.words import counted, listing

if TYPE_CHECKING:
    from vitrail.costs.devices import Device
    from vitrail.costs.estimate import Cost
    from vitrail.data.roles import Splits
    from vitrail.objective.base import Objective
    from vitrail.training.decide import Decision
    from vitrail.training.timetable import Timetable

log = logging.getLogger("vitrail")
COPIES = 10
"""Size of a run folder as a multiple of the weights: checkpoints with optimiser state, best and last model."""
SAMPLED = 1000
"""Number of steps at which the image size is computed."""


@fast_float32()
def rehearse(
    run: Run, splits: Splits | None = None, asked: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Cost]:
    """Open the data, build the network, train on a few images; return the findings and the cost of the run.

    splits: The data of the run, if they are open already. asked: See `fit`. Raises the same errors as training. Writes
    nothing.
    """
    from vitrail.data.labels.sets import Answers
    from vitrail.training.python_objects import PythonObjects
    from vitrail.transfer.timing import Rehearsal

    splits = splits or PythonObjects().splits(run)
    for line in splits.report.notes:
        log.info("%s", line)
    for line in splits.report.warnings:
        log.warning("%s", line)
    rehearsal = Rehearsal(run, splits, PythonObjects(asked=asked or {}))
    setup = rehearsal.setup
    splits = setup.splits
    tuned, plan, names = setup.tuned, setup.timetable, splits.class_names
    held_out = "no validation images" if splits.validation is None else f"{len(splits.validation):,} to choose by"
    kind = "targets" if run.objective.numbers else "classes"
    learned = f" of {len(names)} {kind if len(names) > 1 else kind[:-1]}" if run.supervised else ""
    if isinstance(splits.train.labels, Answers):
        parts = splits.train.labels.parts
        learned = f" with {counted(len(parts), 'answer')} ({listing(list(parts), quoted=False)})"
    checked = {
        "data": f"{len(splits.train):,} images{learned} to train on, {held_out}",
        "model": f"{setup.run.model if run.weights is None else run.weights}, {tuned.of:,} parameters",
        **setup.why,
        "disk": _disk(Path(run.out), COPIES * 4 * tuned.parameters),
        "length": f"{'as many' if plan.open else f'{plan.total:,}'} steps of {setup.run.batch_size} images, "
        f"{plan.per_epoch:,} to an epoch{', as fit into the time limit' * plan.open}",
    }
    loss, images, seconds = rehearsal.first_batch()
    checked["one batch"] = f"loss {loss:.4f}; {images} image{'s' * (images != 1)} in {seconds:.2f} s"
    cost = _cost(setup.run, setup.decision, plan, images / seconds, setup.objective)
    if tuned.base is not None:  # the memory of a partly frozen network was measured
        cost = replace(cost, trainable=tuned.parameters, activation_bytes=round(setup.image_bytes or 0))
    return checked | {f"cost, {subject}": text for subject, text in cost.lines().items()}, cost


def _disk(out: Path, need: int) -> str:
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    enough = "" if free > need else "; that may not be enough"
    return f"{free / 2**30:.1f} GiB free, the run folder takes about {need / 2**30:.2f} GiB{enough}"


def _cost(run: Run, decision: Decision, plan: Timetable, rate: float, objective: Objective) -> Cost:
    """Return the cost of the whole run on this machine. `rate` is the images/s of this process."""
    from vitrail import world
    from vitrail.costs.estimate import estimate
    from vitrail.objective.beit import BEiTObjective
    from vitrail.training.flops import forward_macs

    assert run.batch_size is not None
    tokenizer = objective.tokenizer.config if isinstance(objective, BEiTObjective) else None

    def each(size: tuple[int, int] | None = None) -> int:
        return forward_macs(run.objective, decision.our_config, size, tokenizer=tokenizer).flops

    reached = each() * rate
    flops = _flops(run, decision, plan, each)
    share = 1.0 if plan.limit is None else plan.limit * world.size() * reached / flops
    share = share if plan.open else min(share, 1.0)
    return estimate(
        run.network if run.weights is None else run.weights,
        decision.our_config,
        images=share * plan.total * run.batch_size,
        flops=share * flops,
        device=_this_device(decision, reached),
        precision=decision.run.decided_precision,
        place="cpu" if decision.device.type == "cpu" else "accelerator",
    )


def _flops(run: Run, decision: Decision, plan: Timetable, each: Callable[[tuple[int, int]], int]) -> float:
    """Return the FLOPs of the whole run; `each` returns those of an image of a size. Images may grow during the run."""
    from collections import Counter

    from vitrail.training.batches import Sizes

    assert run.batch_size is not None
    sizes, count = Sizes(run.progressive, decision.config), min(plan.total, SAMPLED)
    seen = Counter(sizes.size(plan.growth(place * plan.total // count, 0.0)) for place in range(count))
    mean = sum(times * each(size) for size, times in seen.items()) / count
    return mean * plan.total * run.batch_size


def _this_device(decision: Decision, reached: float) -> Device:
    """Return this machine's device, with the rate just reached as its peak. Its price is unknown."""
    from vitrail.costs.devices import Device
    from vitrail.device import free_memory

    memory = free_memory(decision.device)
    why = "the rate of the second step"
    return Device(str(decision.device), "this machine", reached, memory, 1.0, why)
