"""Put together everything that a run needs, in one place: for `fit`, the dry run, and the timing of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vitrail.data.loading.loader import Loader
from vitrail.data.roles import Splits
from vitrail.device import fast_float32
from vitrail.model.build import build
from vitrail.model.own_part import own_parts
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import Objective
from vitrail.objective.settings import Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.training.batch_size import image_bytes, micro_batches, refuse_lone_values
from vitrail.training.batches import Sizes, evaluation_loader, training_loader
from vitrail.training.checkpoints.state import TrainingState, defaults, identity
from vitrail.training.decide import Decision, decide
from vitrail.training.facts import Facts
from vitrail.training.given import Given, given_network
from vitrail.training.objective import build_objective, load_teacher
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.optim.tune import Tuned, tune
from vitrail.training.parallel import Parallel, distribute
from vitrail.training.run import Run
from vitrail.training.timetable import Timetable
from vitrail.training.validation.validation import Validation
from vitrail.weights.assemble import HEAD
from vitrail.weights.load import load


@dataclass
class Setup:
    """A run before its first step. A context that ends the threads of its loaders."""

    run: Run
    """With every decision made."""
    splits: Splits
    decision: Decision
    why: dict[str, str]
    """Setting -> value and reason, of all decisions; and what was loaded and frozen, in words."""
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
        self.loader.close()
        self.validation.close()


@fast_float32()
def set_up(
    run: Run, splits: Splits, start: str | None = None, given: Given | None = None, *, measure: bool = False
) -> Setup:
    """Return everything that the first step of `run` needs. Nothing is written.

    start: Place of the first tensors, in place of `run.weights` (see `Facts.start`). measure: Measure the memory for an
    image even where the number of micro-batches is given. Raises UsageError, DataError and WeightsError where the
    settings, the data or the weights cannot work.
    """
    # every decision that the run leaves open
    asked, names, given = run, splits.class_names, given or Given()
    decision = decide(run, Facts.of(run, splits.train, names, start, given.model))

    # the network, its objective, and the micro-batches that fit in memory
    torch.manual_seed(run.seed)
    if given.model is None:
        model, loaded = build_model(decision)
    else:
        model, loaded = given_network(given.model, len(names), decision.preprocess), {}
    tuned, frozen = tune(model, decision.run)
    teacher, taught = load_teacher(decision, splits)
    objective, rest = build_objective(decision, model, len(names), given.losses, splits.train.labels, teacher)
    why = {**decision.why, **loaded, **frozen, **taught, **rest}
    objective.to(decision.device).train()
    run, each = decision.run, None
    if measure or run.accumulate is None:
        each = image_bytes(objective, run, decision.config)
    if run.accumulate is None:
        run = replace(run, accumulate=micro_batches(objective, run, decision.config, each or 0.0))
        why["accumulate"] = f"{run.accumulate}: micro-batches that fit in memory"
    refuse_lone_values(objective, run, decision.config)
    given.refuse_changed(asked, run, why)
    network = distribute(objective, run)
    optimizer = build_optimizer(objective, run.optim)

    # batches, durations in steps, the averaged weights, and the validation
    loader = training_loader(run, splits.train)
    held_out = None if splits.validation is None else evaluation_loader(run, splits.validation)
    timetable = Timetable(run, len(loader))
    average = Averager(model if run.supervised else objective, run.average, start=timetable.average_start)
    about = identity(run, decision.config, names, splits.fingerprint) | objective.identity()
    about |= {"given": given.names} if given.names else {}
    started = getattr(model, "card", None)
    card = replace(decision.card(names), licence=started.licence if started else "")  # weights made from others keep it
    if teacher is not None:
        card = replace(card, provenance={**card.provenance, "teacher_hash": teacher.fingerprint})
    evaluated, swapped = network.for_evaluation(average)
    return Setup(
        run=run,
        splits=splits,
        decision=decision,
        why=why,
        given=given,
        tuned=tuned,
        image_bytes=each,
        objective=objective,
        network=network,
        optimizer=optimizer,
        loader=loader,
        timetable=timetable,
        resize=Sizes(run.progressive, decision.config),
        average=average,
        state=TrainingState(objective, optimizer, average, about, defaults(run, decision.config), base=tuned.base),
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


def build_model(decision: Decision) -> tuple[nn.Module, dict[str, str]]:
    """Return the network of a run, fresh, or with weights and a new zero head (paper, section 3.2).

    The second value says in words what was loaded.
    """
    run = decision.run
    if isinstance(run.objective, Tokenizer):
        assert isinstance(decision.config, ViTConfig)
        return ImageTokenizer(run.objective, decision.config.patch), {}
    if decision.start is None:
        return build(decision.config), {}
    classes = None if run.keep_head else decision.config.classes
    size, channels = decision.config.image_size, decision.config.channels
    loaded = load(decision.start, classes=classes, image_size=size, patch=run.vit.patch, channels=channels)
    named = Path(decision.start)  # as the user wrote it, not the place in the cache or in this package
    told = {"weights": str(replace(loaded.load_report, path=named))}
    if loaded.config == decision.config:
        return loaded, told
    model = build(decision.config)  # the same tensors, other dropout, and perhaps a classifier of the user's own
    theirs = loaded.state_dict()
    if own_parts(loaded.config).get("head") != own_parts(decision.config).get("head"):
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(HEAD)}
        theirs |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD)}
    model.load_state_dict(theirs)
    model.load_report = loaded.load_report
    return model, told
