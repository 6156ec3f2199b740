"""`--dry-run`: everything that can go wrong before the second step, tried without leaving a trace."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from pathlib import Path

from vitrail.train.run import Run

COPIES = 10
"""A run folder holds about so many times the weights: checkpoints with optimiser state, best and last model."""


def check(run: Run) -> dict[str, str]:
    """Open the data, build the network, train on one batch; return what was tried and what came of it.

    Raises what training itself would raise. Writes nothing.
    """
    import torch

    from vitrail.data.source import open_data
    from vitrail.model.attention import fast_math
    from vitrail.objective.supervised import SupervisedObjective
    from vitrail.train.batches import endless, training_loader
    from vitrail.train.parallel import prepare
    from vitrail.train.plan import Plan
    from vitrail.train.resolve import build_model, resolve
    from vitrail.train.step import backward, seed_step

    splits = open_data(run.data, seed=run.seed)
    names = splits.class_names
    resolved = resolve(run, splits.train, names)
    fast_math()
    torch.manual_seed(run.seed)
    objective = SupervisedObjective(build_model(resolved), run.objective, run.augment, len(names), run.seed)
    objective.to(resolved.device).train()
    run = resolved.with_micro_batches(objective)
    prepare(objective.model, run)
    held_out = "no validation images" if splits.validation is None else f"{len(splits.validation):,} to choose by"
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    checked = {
        "data": f"{len(splits.train):,} images of {len(names)} classes to train on, {held_out}",
        "model": f"{run.model if run.weights is None else run.weights}, {parameters:,} parameters",
        **resolved.decisions,
        "disk": _disk(Path(run.out), COPIES * 4 * parameters),
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
    return checked


def _disk(out: Path, need: int) -> str:
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    enough = "" if free > need else "; that may not be enough"
    return f"{free / 2**30:.1f} GiB free, the run folder takes about {need / 2**30:.2f} GiB{enough}"
