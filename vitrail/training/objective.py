"""Building the objective of a run from its settings, with or without labels."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from torch import nn

from vitrail.data.cache import cache_folder
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Labels, LabelSets, class_counts
from vitrail.data.loading.order import places_per_class
from vitrail.data.roles import Splits
from vitrail.data.settings import Bands
from vitrail.errors import UsageError
from vitrail.import_path import import_path, is_own
from vitrail.model.own_part import check_arguments
from vitrail.objective.base import Objective, RunFacts
from vitrail.objective.distillation import Answers, DistillationObjective, Teacher
from vitrail.objective.self_supervised import SelfSupervised
from vitrail.objective.settings import ObjectiveSettings, Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.checkpoints.objective_weights import load_objective_weights
from vitrail.training.decide import Decision
from vitrail.training.python_objects import Losses
from vitrail.weights.load import load, weights_fingerprint
from vitrail.words import shown


def build_objective(
    decision: Decision,
    model: nn.Module,
    classes: int,
    losses: Losses | None = None,
    labels: Labels | None = None,
    teacher: Teacher | None = None,
) -> tuple[Objective, dict[str, str]]:
    """Return the objective of a run. It owns `model`, which `build_model` returned.

    classes: Number of classes of the data. losses: A function in place of the loss of the settings. labels: Those of
    the training images, for settings that need the number of images of each class. teacher: See `load_teacher`. If the
    starting weights contain parts of the objective besides the network, these are loaded, too, and the second value
    says so. Raises UsageError if settings contradict each other or the model, and what `load_objective_weights` raises.
    """
    run = decision.run
    if isinstance(labels, LabelSets | Numbers):
        counts = class_counts(labels, classes)
    else:
        counts = np.empty(0) if labels is None else places_per_class(labels, classes, run.data.sampler)
    task = RunFacts(run.seed, classes, run.augment, decision.preprocess, tuple(counts.tolist()), decision.scale)
    if teacher is None:
        objective = _built(run.objective, model, task)
    elif isinstance(run.objective, Supervised):
        objective = DistillationObjective(model, run.objective, task, run.distill, teacher)
    else:
        raise UsageError(f"a teacher needs objective.kind supervised, not {run.objective.kind}: leave out teacher")
    needed = Objective if run.supervised else SelfSupervised
    if not isinstance(objective, needed):
        raise UsageError(
            f"{type(run.objective).__name__}.build returned {shown(objective)}; it must return a {needed.__name__} "
            f"({needed.__module__}), because labels is {run.supervised}"
        )
    if losses is not None and isinstance(objective, SupervisedObjective):
        objective.losses = losses
    if decision.start != run.weights:  # the run is resumed, and its checkpoint contains everything
        return objective, {}
    return objective, load_objective_weights(run, objective)


def _built(settings: ObjectiveSettings, model: nn.Module, task: RunFacts) -> Objective:
    """Return what settings build. Raises UsageError for an objective of the user's own that lacks a method."""
    if not is_own(type(settings)):
        return settings.build(model, task)
    where = f"{import_path(type(settings))}.build"
    check_arguments(settings.build, ("model", "task"), where)
    try:
        return settings.build(model, task)
    except TypeError as error:
        if "abstract" not in str(error):
            raise
        raise UsageError(f"{where}: {error}. Its base class says what the method returns") from error


def load_teacher(decision: Decision, splits: Splits) -> tuple[Teacher | None, dict[str, str]]:
    """Return the teacher of a run, on its device, and how it teaches, in words; None without one.

    Raises UsageError for a teacher that cannot teach these classes or see these images, and what `load` raises.
    """
    run, source = decision.run, decision.run.teacher
    if source is None:
        return None, {}
    network = load(source)
    card, config, columns = network.card, network.config, None
    assert card is not None  # it comes with every file
    if config.channels != decision.config.channels:
        raise UsageError(
            f"the teacher {source} takes images of {config.channels} channels, and these have "
            f"{decision.config.channels}: give another teacher"
        )
    if _normalisation(card.preprocess.bands) != _normalisation(decision.preprocess.bands):
        raise UsageError(
            f"the teacher {source} reads other bands or normalises them by other statistics than this run. Give a "
            "teacher with the same preprocess.bands"
        )
    if run.distill.kind != "features":
        if decision.several or card.several:
            raise UsageError(
                f"distill.kind {run.distill.kind} needs one label for each image, in the data and in the teacher "
                f"{source}. With several labels use distill.kind features"
            )
        columns = _columns(source, list(card.class_names), config.classes, splits.class_names)
    size = " x ".join(map(str, config.image_size))
    checked = "" if card.class_names or run.distill.kind == "features" else "; the order of its classes is not known"
    teacher = Teacher(network.eval().requires_grad_(False).to(decision.device), weights_fingerprint(source), columns)
    how = f"{source}: {run.distill.kind}, weight {run.distill.weight:g}, {size} px{checked}"
    if not run.augment.random and run.progressive.start == 1:
        answers = _answers(decision, teacher, splits)
        teacher = replace(teacher, answers=answers)
        how += f"; without augmentation its outputs are kept in {answers.path}"
    return teacher, {"teacher": how}


def _answers(decision: Decision, teacher: Teacher, splits: Splits) -> Answers:
    """Return the kept outputs of a teacher for the training images as this run's network sees them."""
    run, network = decision.run, teacher.network.config
    of_features = run.distill.kind == "features"
    about = [teacher.fingerprint, of_features, teacher.columns, splits.fingerprint, len(splits.train)]
    key = repr([1, *about, decision.config.image_size, run.precision])
    path = cache_folder() / "teachers" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.rows"
    return Answers(path, network.features if of_features else len(splits.class_names))


def _normalisation(bands: Bands | None) -> tuple[object, ...]:
    """Return what a network's pixels depend on, besides its own mean and std for 8-bit RGB."""
    return () if bands is None else (bands.bits, bands.mean, bands.std)


def _columns(source: str, theirs: list[str], outputs: int, ours: list[str]) -> list[int] | None:
    """Return `Teacher.columns`. Raises UsageError, with the first classes that differ, for other classes."""
    other = "Give a teacher for the classes of the data, or learn its features: distill.kind features"
    if not theirs and outputs != len(ours):
        raise UsageError(f"the teacher {source} has {outputs} classes, and the data have {len(ours)}. {other}")
    if not theirs or theirs == ours:
        return None
    here, there = set(ours), set(theirs)
    if here != there:
        only = [f"{shown(name)} is only in the teacher" for name in theirs if name not in here][:1]
        only += [f"{shown(name)} is only in the data" for name in ours if name not in there][:1]
        raise UsageError(
            f"the teacher {source} has {len(theirs)} classes, and the data have {len(ours)} others: {', '.join(only)}. "
            f"{other}"
        )
    return [theirs.index(name) for name in ours]
