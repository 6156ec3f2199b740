"""Everything that a run needs, put together in one place: for `fit`, for the dry run, and for the timing of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vitrail.data.loading.loader import Loader
from vitrail.data.roles import Splits
from vitrail.objective.base import Objective
from vitrail.training.batch_size import image_bytes, micro_batches, refuse_lone_values
from vitrail.training.batches import evaluation_loader, training_loader
from vitrail.training.checkpoints.state import TrainingState, defaults, identity
from vitrail.training.given import Given, given_network
from vitrail.training.objectives.build import build_objective, load_teacher
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.optim.progressive import Sizes
from vitrail.training.optim.tune import Tuned, tune
from vitrail.training.processes.distribute import distribute
from vitrail.training.processes.parallel import Parallel
from vitrail.training.processes.threads import concurrent
from vitrail.training.resolve import Resolved, build_model, resolve
from vitrail.training.run import Run
from vitrail.training.timetable import Timetable
from vitrail.training.validation.validation import Validation


@dataclass
class Setup:
    """A run before its first step. A context that ends the threads of its loaders."""

    run: Run
    """With every decision made."""
    splits: Splits
    resolved: Resolved
    given: Given
    """Objects in place of settings."""
    tuned: Tuned
    image_bytes: float | None
    """Memory that a step takes for each image in the network; None if it was not measured."""
    objective: Objective
    network: Parallel
    """The objective as the processes of the run compute it."""
    optimizer: torch.optim.Optimizer
    loader: Loader
    """Training batches of this process."""
    timetable: Timetable
    resize: Sizes
    """Progressive resizing."""
    average: Averager
    state: TrainingState
    validation: Validation

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.network.close()
        self.loader.close()
        self.validation.close()


def set_up(
    run: Run, splits: Splits, start: str | None = None, given: Given | None = None, *, measure: bool = False
) -> Setup:
    """Return everything that the first step of `run` needs. Nothing is written.

    start: Place of the first tensors, in place of `run.weights` (see `Resolved.start`). measure: Measure the memory for
    an image even where the number of micro-batches is given. Raises UsageError, DataError and WeightsError where the
    settings, the data or the weights cannot work.
    """
    # every decision that the run leaves open
    asked = run
    names, given = splits.class_names, given or Given()
    resolved = resolve(run, splits.train, names, start, given.model)

    # the network, its objective, and the micro-batches that fit in memory
    torch.manual_seed(run.seed)
    if given.model is None:
        model = build_model(resolved)
    else:
        model = given_network(given.model, len(names), resolved.preprocess)
    tuned = tune(model, resolved.run, resolved.decisions)
    teacher = load_teacher(resolved, splits)
    objective = build_objective(resolved, model, len(names), given.losses, splits.train.labels, teacher)
    objective.to(resolved.device).train()
    run, each = resolved.run, None
    if measure or run.accumulate is None:
        each = image_bytes(objective, run, resolved.config)
    if run.accumulate is None:
        run = replace(run, accumulate=micro_batches(objective, run, resolved.config, each or 0.0))
        resolved.decisions["accumulate"] = f"{run.accumulate}: micro-batches that fit in memory"
    run = replace(run, concurrent=concurrent(objective, run, given, resolved.decisions))
    refuse_lone_values(objective, run, resolved.config)
    given.refuse_changed(asked, run, resolved.decisions)
    network = distribute(objective, run)
    optimizer = build_optimizer(objective, run.optim)

    # batches, durations in steps, the averaged weights, and the validation
    loader = training_loader(run, splits.train)
    held_out = None if splits.validation is None else evaluation_loader(run, splits.validation)
    timetable = Timetable(run, len(loader))
    average = Averager(model if run.supervised else objective, run.average, start=timetable.average_start)
    about = identity(run, resolved.config, names, splits.fingerprint) | objective.identity()
    about |= {"given": given.names} if given.names else {}
    started = getattr(model, "card", None)
    card = replace(resolved.card(names), licence=started.licence if started else "")  # weights made from others keep it
    if teacher is not None:
        card = replace(card, provenance={**card.provenance, "teacher_hash": teacher.fingerprint})
    evaluated, swapped = network.for_evaluation(average)
    return Setup(
        run=run,
        splits=splits,
        resolved=resolved,
        given=given,
        tuned=tuned,
        image_bytes=each,
        objective=objective,
        network=network,
        optimizer=optimizer,
        loader=loader,
        timetable=timetable,
        resize=Sizes(run.progressive, resolved.config),
        average=average,
        state=TrainingState(objective, optimizer, average, about, defaults(run, resolved.config), base=tuned.base),
        validation=Validation(
            evaluated.evaluated,
            swapped,
            held_out,
            card,
            run,
            tuned.base,
            splits.train,
            evaluated,
            given.on_evaluate,
        ),
    )
