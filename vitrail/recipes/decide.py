"""From what is asked for and what is known to the run: the recipe, and everything in it that the data decide.

What the recipe leaves open after this is decided by `vitrail.training.decide`, at the start of the run.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vitrail.durations import LONGEST, Epochs, Steps
from vitrail.ranges import height_width
from vitrail.recipes.asked import Asked, require_images, with_weights
from vitrail.recipes.by_data import (
    LABEL_FREE,
    choose_recipe,
    evaluated_in_time,
    fit_image_size,
    fit_warmup,
    has_absolute_warmup,
    in_time,
)
from vitrail.recipes.finetune_by_data import ENLARGED_COST, FINETUNE_BY_DATA, FineTuning, advise
from vitrail.recipes.registry import RECIPES, find_recipe, recipe
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.recipes.known import Known

RUN_NAME = "finetune"
"""Name of a fine-tuning without a recipe."""
UNSET = Epochs(LONGEST)
"""Marks a duration that the user did not set."""


@dataclass(frozen=True)
class Choice:
    """A run, and where its settings come from."""

    run: Run
    origin: str
    """The recipe or the files, and the reason for them, in words."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Setting -> value and reason, of the decisions that nobody asked for."""
    warnings: tuple[str, ...] = ()
    """What may cost much accuracy."""

    def __str__(self) -> str:
        return "\n".join([self.origin, *(f"  {name}: {reason}" for name, reason in self.why.items())])


def decide(asked: Asked, known: Known, *, tunes: bool = False) -> Choice:
    """Return the run that is asked for, in all that depends on its recipe. Nothing that is asked for is changed.

    tunes: Whether pretrained weights are fine-tuned (`vitrail finetune`), or a network is trained from scratch. Raises
    UsageError, DataError and WeightsError.
    """
    asked = _complete(asked, tunes=tunes)
    if _follows_rule(asked, tunes=tunes):
        return _fine_tuning(asked, known)
    if asked.recipe is not None:
        return from_recipe(asked, known)
    if asked.files and not tunes:
        run, why = asked.applied_to(Run())
        return Choice(run, f"configuration {', '.join(asked.files)}", why)
    return _from_scratch(asked, known)


def undecided(asked: Asked, known: Known, *, tunes: bool = False) -> Run:
    """Return the run that is asked for before anything but its recipe is decided, under the name that `decide` gives.

    Raises UsageError, DataError and WeightsError.
    """
    asked = _complete(asked, tunes=tunes)
    if _follows_rule(asked, tunes=tunes):
        base = recipe(FINETUNE_BY_DATA.name)
        base = base if asked.recipe else replace(base, name=RUN_NAME)
    elif asked.recipe is not None:
        base = recipe(asked.recipe)
    elif asked.files and not tunes:
        base = Run()
    else:
        run, _ = asked.applied_to(Run())
        base = recipe(choose_recipe(known.training_set(run), run.objective.kind)[0])
    return asked.applied_to(base)[0]


def _complete(asked: Asked, *, tunes: bool) -> Asked:
    """Return `asked` with weights if it is to fine-tune some. Raises UsageError if it names no images."""
    if tunes:
        return with_weights(asked)
    require_images(asked)
    return asked


def _follows_rule(asked: Asked, *, tunes: bool) -> bool:
    """Return whether the images, the network and the time decide on the settings of a fine-tuning."""
    if not tunes or asked.recipe is not None:
        return tunes and asked.recipe == FINETUNE_BY_DATA.name
    return asked.applied_to(Run())[0].objective.kind not in LABEL_FREE


def from_recipe(asked: Asked, known: Known) -> Choice:
    """Return the run of the named recipe.

    The data are opened only if the recipe's warmup is in steps or epochs, or if its settings depend on the data
    (BiT-HyperRule). Raises UsageError and DataError.
    """
    assert asked.recipe is not None
    base, rule = recipe(asked.recipe), find_recipe(asked.recipe).by_data
    run, why = asked.applied_to(base)
    origin, warning = f"recipe {asked.recipe}", rate_of_another_network(asked.recipe, run)
    if rule is not None or has_absolute_warmup(run):
        data = known.training_set(run)
        if rule is not None:
            run, why = asked.applied_to(replace(rule(data.images, data.side), name=base.name))
            origin += f" for {data.images:,} images of about {data.side} pixels"
        run, change = (run, "") if "schedule.warmup" in asked.places else fit_warmup(run, data)
        origin += f"; {change}" if change else ""
    return Choice(run, origin, why, (warning,) if warning else ())


def _from_scratch(asked: Asked, known: Known) -> Choice:
    """Return the run for training from scratch, or without labels: the objective and the images decide on the recipe.

    A time limit decides on the size of the images and the batch.
    """
    run, _ = asked.applied_to(Run())
    data = known.training_set(run)
    name, because = choose_recipe(data, run.objective.kind)
    base, tunes, warnings = recipe(name), run.weights is not None and run.supervised, tuple[str, ...]()
    if run.weights is None:
        base = fit_image_size(base, data)
    elif tunes:
        base = replace(base, image_size=None)  # the size of the weights
    run, why = asked.applied_to(base)
    if tunes:
        warnings += (
            f"recipe {name} is for training from scratch: its rates undo much of what {run.weights} has learned. To "
            f"fine-tune it: {shlex.join(['vitrail', 'finetune', run.data.path, '--from', str(run.weights)])}",
        )
    if (seen := known.seen_in_time(run)) is not None:
        sized_here = {"image_size"} if "preprocess.image_size" in asked.places else set()
        full = run.image_size
        run, changes = in_time(run, data.images, seen, asked.places.keys() | sized_here)
        before, after = (math.prod(height_width(size or 1)) for size in (full, run.image_size))
        run, fewer = _evaluated(asked, known, run, round(seen * before / after))
        if "image_size" in changes:
            warnings += (f"warning: image_size: {changes.pop('image_size')}",)
        why = {**why, **changes, **fewer}
    return Choice(run, f"recipe {name}, because of {because}", why, warnings)


def _fine_tuning(asked: Asked, known: Known) -> Choice:
    """Return the run for fine-tuning without a recipe: the images, the network and the time decide."""
    import numpy as np

    from vitrail.data.labels.sets import class_counts
    from vitrail.tasks.catalog import task_for

    base = replace(recipe(FINETUNE_BY_DATA.name), duration=UNSET, batch_size=None)
    wanted, _ = asked.applied_to(base)
    if not (network := known.network(wanted)).blocks:
        wanted, _ = asked.applied_to(replace(base, optim=replace(base.optim, layer_decay=None)))
    splits, data = known.splits_of(wanted), known.training_set(wanted)
    kind = task_for(splits.train.labels).name
    one_class = kind == "classes"
    single = one_class and wanted.supervised and not wanted.objective.numbers
    framed = known.framing(wanted) if single and wanted.preprocess is None and not wanted.keeps_classes else None
    timed = known.seen_in_time(wanted if framed is None else replace(wanted, preprocess=framed[0]))
    seen = min((count for count in (timed, _given_length(wanted, data.images)) if count is not None), default=None)
    drawn = wanted.vit.init is not None or bool(getattr(wanted.objective, "head_bias", 0.0))
    new = not (wanted.keep_head or wanted.keeps_classes or drawn or network.own_head)
    maps = new and kind == "segmentation" and wanted.supervised and not network.queries
    counts = class_counts(splits.train.labels, len(splits.class_names))  # with --classes add, some have no image
    length = wanted.duration
    steps = max(int(length.value), 1) if isinstance(length, Steps) and wanted.batch_size is None else None
    classes = int(np.count_nonzero(counts)) if one_class else len(counts)
    task = FineTuning(data, classes, network, seen, timed, single and new, maps, steps)
    advice = advise(task)
    advised, reasons = advice.run, dict(advice.why)
    if framed is not None:
        advised, reasons = replace(advised, preprocess=framed[0]), {**reasons, "preprocess": framed[1]}
    run, why = asked.applied_to(advised if asked.recipe else replace(advised, name=RUN_NAME))
    kind = "targets" if run.objective.numbers else "classes"
    origin = f"recipe {FINETUNE_BY_DATA.name} for {data.images:,} images of {task.classes} {kind}, "
    origin += f"of about {data.side} pixels"
    if run.duration is None and timed is not None:
        passes = timed / data.images / (ENLARGED_COST if run.image_size == advised.image_size is not None else 1)
        why |= {"duration": f"that of the time limit, about {passes:.2g} passes over the images"}
    if timed is not None:
        run, fewer = _evaluated(asked, known, run, min(timed, seen or timed))
        why |= fewer
    kept = {name: reason for name, reason in reasons.items() if getattr(run, name) == getattr(advised, name)}
    return Choice(run, origin, {**why, **kept})


def _evaluated(asked: Asked, known: Known, run: Run, seen: int) -> tuple[Run, dict[str, str]]:
    """Return `run` with as many evaluations as its time limit allows, and the change in words."""
    validation = known.splits_of(run).validation
    run, why = evaluated_in_time(run, seen, 0 if validation is None else len(validation), asked.places)
    return run, {"evaluate_every": why} if why else {}


def _given_length(run: Run, images: int) -> int | None:
    """Return the number of images in the length that the user gave; None if there is none, or steps without a batch."""
    if run.duration in (UNSET, None) or (isinstance(run.duration, Steps) and run.batch_size is None):
        return None
    batch = run.batch_size or 1
    return max(run.duration.steps(per_epoch=images / batch, batch_size=batch) * batch, 1)


def rate_of_another_network(name: str, run: Run) -> str:
    """Return a warning if `run` trains another network than the recipe `name` of a paper, at its rate; else ""."""
    theirs = find_recipe(name).run
    if (
        "/" not in name
        or find_recipe(name).verb != "train"
        or run.model == theirs.model
        or run.optim.lr != theirs.optim.lr
    ):
        return ""
    family = name.partition("/")[0]
    other = [
        known.name
        for known in RECIPES.values()
        if known.name.startswith(f"{family}/") and known.verb == "train" and known.run.model == run.model
    ]
    instead = f"Use --recipe {' or '.join(other)}, or" if other else "To change it,"
    return (
        f"The learning rate {run.optim.lr:g} of recipe {name} is for {theirs.model}, but the network is {run.model}. "
        f"{instead} give --lr."
    )
