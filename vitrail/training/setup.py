"""Everything that a run needs, put together in one place: for `fit`, for the dry run, and for the timing of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vitrail.data.loading.loader import Loader
from vitrail.data.sources.open import Splits
from vitrail.errors import UsageError
from vitrail.objective.base import Objective
from vitrail.training.batch_size import cut, image_bytes
from vitrail.training.batches import evaluation_loader, training_loader
from vitrail.training.checkpoints.state import TrainingState, identity
from vitrail.training.objectives import build_objective
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.optim.progressive import Sizes
from vitrail.training.optim.tune import Tuned, tune
from vitrail.training.plan import Plan
from vitrail.training.processes.parallel import Parallel, distribute
from vitrail.training.resolve import Resolved, build_model, resolve
from vitrail.training.run import Run
from vitrail.training.validation.validation import Validation


@dataclass
class Setup:
    """A run before its first step. A context that ends the threads of its loaders."""

    run: Run
    """With every decision made."""
    splits: Splits
    resolved: Resolved
    tuned: Tuned
    image_bytes: float | None
    """Memory that a step takes for each image in the network; None if it was not measured."""
    objective: Objective
    network: Parallel
    """The objective as the processes of the run compute it."""
    optimizer: torch.optim.Optimizer
    loader: Loader
    """Training batches of this process."""
    plan: Plan
    sized: Sizes
    """Progressive resizing."""
    average: Averager
    state: TrainingState
    validation: Validation

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.loader.close()
        self.validation.close()


def set_up(run: Run, splits: Splits, start: str | None = None, *, measure: bool = False) -> Setup:
    """Return everything that the first step of `run` needs. Nothing is written.

    start: Place of the first tensors, in place of `run.weights` (see `Resolved.start`). measure: Measure the memory for
    an image even where the number of micro-batches is given. Raises UsageError, DataError and WeightsError where the
    settings, the data or the weights cannot work.
    """
    # every decision that the run leaves open
    names = splits.class_names
    resolved = resolve(run, splits.train, names, start)

    # the network, its objective, and the micro-batches that fit in memory
    torch.manual_seed(run.seed)
    model = build_model(resolved)
    tuned = tune(model, run, resolved.decisions)
    objective = build_objective(resolved, model, len(names))
    objective.to(resolved.device).train()
    run, each = resolved.run, None
    if measure or run.accumulate is None:
        each = image_bytes(objective, run, resolved.config)
    if run.accumulate is None:
        run = replace(run, accumulate=cut(objective, run, resolved.config, each or 0.0))
        resolved.decisions["accumulate"] = f"{run.accumulate}: micro-batches that fit in memory"
    elif run.accumulate < 1:
        raise UsageError(f"accumulate is {run.accumulate}; it must be at least 1")
    network = distribute(objective, run)
    optimizer = build_optimizer(objective, run.optim)

    # batches, durations in steps, the averaged weights, and the validation
    loader = training_loader(run, splits.train)
    held_out = None if splits.validation is None else evaluation_loader(run, splits.validation)
    plan = Plan.of(run, len(loader))
    average = Averager(model if run.supervised else objective, run.average, start=plan.average_start)
    about = identity(run, resolved.config, names, splits.fingerprint) | objective.identity()
    card = resolved.card(names)
    seen, swapped = network.seen(average)
    return Setup(
        run=run,
        splits=splits,
        resolved=resolved,
        tuned=tuned,
        image_bytes=each,
        objective=objective,
        network=network,
        optimizer=optimizer,
        loader=loader,
        plan=plan,
        sized=Sizes(run.progressive, resolved.config),
        average=average,
        state=TrainingState(objective, optimizer, average, about, base=tuned.base),
        validation=Validation(seen.kept, swapped, held_out, card, run, tuned.base, splits.train, seen),
    )
