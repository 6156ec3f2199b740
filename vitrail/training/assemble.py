"""Put together everything that a run needs, in one place: for `fit`, the dry run, and the timing of a plan.

Network, teacher and objective follow `set_up` in its order. A self-supervised objective owns tensors besides the
network: a decoder, a [mask] embedding, a classifier of colours or codes, or DINO's projection heads and teacher. When a
run starts from weights, these are loaded, too. Published weights may contain some of them. Model folders of vitrail
contain only the network; the checkpoints in a run folder contain everything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitrail import world
from vitrail.config import CLASS, plain
from vitrail.data.cache import cache_folder
from vitrail.data.labels.sets import Labels, class_counts
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.order import places_per_class
from vitrail.data.roles import Splits
from vitrail.data.settings import Bands
from vitrail.device import fast_float32
from vitrail.errors import UsageError
from vitrail.import_path import import_path, is_own
from vitrail.model.build import build
from vitrail.model.own_part import check_arguments, own_parts
from vitrail.model.variants import NetworkConfig, ViTConfig
from vitrail.objective.base import Objective, RunFacts
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.distillation import DistillationObjective, Teacher, TeacherAnswers
from vitrail.objective.mae import MAEObjective
from vitrail.objective.self_supervised import SelfSupervised
from vitrail.objective.settings import ObjectiveSettings, Supervised, Tokenizer
from vitrail.objective.supervised import SupervisedObjective
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.training.batch_size import image_bytes, micro_batches, refuse_lone_values
from vitrail.training.batches import Sizes, evaluation_loader, training_loader
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.state import TrainingState, defaults, identity
from vitrail.training.classes import ClassChange, teacher_columns, with_classes, with_rows
from vitrail.training.decide import Decision, decide
from vitrail.training.facts import Facts
from vitrail.training.feed import Feed
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import LossScale, build_optimizer
from vitrail.training.optim.tune import Tuned, tune
from vitrail.training.parallel import Parallel, distribute
from vitrail.training.python_objects import Losses, PythonObjects, trained_network
from vitrail.training.run import Run
from vitrail.training.timetable import Timetable
from vitrail.training.validation import Validation
from vitrail.weights.archive import open_archive
from vitrail.weights.assemble import HEAD
from vitrail.weights.load import load, local_path, weights_fingerprint
from vitrail.weights.store import is_ours
from vitrail.words import shown

FRESH = "the prediction head starts fresh"
NETWORK = ("model.", "anchor.", "refreshes")
"""Beginnings of the names of an objective's tensors that are the network, also as it was loaded (DINOv2)."""


@dataclass
class Setup:
    """A run before its first step. A context that ends the threads of its loaders."""

    run: Run
    """With every decision made."""
    splits: Splits
    decision: Decision
    change: ClassChange | None
    """What becomes of the classes of the weights; None if others replace them all."""
    why: dict[str, str]
    """Setting -> value and reason, of all decisions; and what was loaded and frozen, in words."""
    objects: PythonObjects
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
    feed: Feed
    """What the steps take of the training batches."""
    average: Averager
    state: TrainingState
    validation: Validation

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.feed.close()
        self.loader.close()
        self.validation.close()


@fast_float32()
def set_up(
    run: Run, splits: Splits, start: str | None = None, objects: PythonObjects | None = None, *, measure: bool = False
) -> Setup:
    """Return everything that the first step of `run` needs. Nothing is written.

    start: Place of the first tensors, in place of `run.weights` (see `Facts.start`). measure: Measure the memory for an
    image even where the number of micro-batches is given. Raises UsageError, DataError and WeightsError where the
    settings, the data or the weights cannot work.
    """
    # every decision that the run leaves open
    asked, objects = run, objects or PythonObjects()
    run, splits, change = with_classes(run, splits)
    names = splits.class_names
    decision = decide(run, Facts.of(run, splits.train, names, start, objects.model))

    # the network, its objective, and the micro-batches that fit in memory
    torch.manual_seed(run.seed)
    if objects.model is None:
        model, loaded = build_model(decision, change)
    else:
        model, loaded = trained_network(objects.model, len(names), decision.preprocess), {}
    tuned, frozen = tune(model, decision.run)
    teacher, taught = load_teacher(decision, splits)
    objective, rest = build_objective(decision, model, len(names), objects.losses, splits.train.labels, teacher)
    why = {**decision.why, **loaded, **frozen, **taught, **rest}
    objective.to(decision.device).train()
    run, each = decision.run, None
    if measure or run.accumulate is None:
        each = image_bytes(objective, run, decision.config)
    if run.accumulate is None:
        run = replace(run, accumulate=micro_batches(objective, run, decision.config, each or 0.0))
        why["accumulate"] = f"{run.accumulate}: micro-batches that fit in memory"
    refuse_lone_values(objective, run, decision.config)
    objects.refuse_changed(asked, run, why)
    network = distribute(objective, run)
    optimizer = build_optimizer(objective, run.optim)

    # batches, durations in steps, the averaged weights, and the validation
    loader = training_loader(run, splits.train)
    held_out = None if splits.validation is None else evaluation_loader(run, splits.validation)
    timetable, resize = Timetable(run, len(loader)), Sizes(run.progressive, decision.config, decision.device)
    average = Averager(model if run.supervised else objective, run.average, start=timetable.average_start)
    about = identity(run, decision.config, names, splits.fingerprint) | objective.identity()
    about |= {"given": objects.names} if objects.names else {}
    started = getattr(model, "card", None)
    card = replace(decision.card(names), licence=started.licence if started else "")  # weights made from others keep it
    if teacher is not None:
        card = replace(card, provenance={**card.provenance, "teacher_hash": teacher.fingerprint})
    state = TrainingState(objective, optimizer, average, about, defaults(run, decision.config), base=tuned.base)
    if run.precision == "fp16":
        assert run.batch_size is not None
        state.scale = LossScale(decision.device, run.batch_size if world.active() else 1)
    measured, swapped = network.for_evaluation(average)
    validation = Validation(
        measured.evaluated,
        swapped,
        held_out,
        card,
        run,
        tuned.base,
        splits.train,
        measured,
        objects.on_evaluate,
        change,
    )
    return Setup(
        run=run,
        splits=splits,
        decision=decision,
        change=change,
        why=why,
        objects=objects,
        tuned=tuned,
        image_bytes=each,
        objective=objective,
        network=network,
        optimizer=optimizer,
        loader=loader,
        timetable=timetable,
        resize=resize,
        feed=Feed(objective, loader, resize, timetable),
        average=average,
        state=state,
        validation=validation,
    )


def build_model(decision: Decision, change: ClassChange | None = None) -> tuple[nn.Module, dict[str, str]]:
    """Return the network of a run, fresh, or with weights and a new head.

    The head is zero (paper, section 3.2), unless `Run.vit.init` says whose code draws it. change: What becomes of the
    classes of the weights, whose head then stays. The second value says in words what was loaded.
    """
    run = decision.run
    if isinstance(run.objective, Tokenizer):
        assert isinstance(decision.config, ViTConfig)
        return ImageTokenizer(run.objective, decision.config.patch), {}
    if decision.start is None:
        return build(decision.our_config), {}
    classes = None if run.keep_head or change is not None else decision.config.classes
    size, channels = decision.config.image_size, decision.config.channels
    loaded = load(decision.start, classes=classes, image_size=size, patch=run.vit.patch, channels=channels)
    named = Path(decision.start)  # as the user wrote it, not the place in the cache or in this package
    told = {"weights": str(replace(loaded.load_report, path=named))}
    if change is not None:
        with_rows(loaded, change.rows)
        told["classes"] = change.told
    drawn = run.vit.init is not None and classes is not None
    if loaded.config == decision.config and not drawn:
        return loaded, told
    was, now = (_head_kind(each) for each in (loaded.config, decision.config))
    model = build(decision.our_config)  # the same tensors, other dropout, and perhaps a classifier of the user's own
    theirs = loaded.state_dict()
    if was != now or drawn:
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(HEAD)}
        theirs |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD)}
    model.load_state_dict(theirs)
    model.card, model.load_report = loaded.card, loaded.load_report
    return model, told


def _head_kind(config: NetworkConfig) -> object:
    """Return what the tensors of a classifier depend on besides sizes."""
    return own_parts(config).get("head"), getattr(config, "segmentation", ""), getattr(config, "queries", 0)


def load_teacher(decision: Decision, splits: Splits) -> tuple[Teacher | None, dict[str, str]]:
    """Return the teacher of a run, on its device, and how it teaches, in words; None without one.

    Raises UsageError for a teacher that cannot teach this objective or these classes or see these images, and what
    `load` raises.
    """
    run, source = decision.run, decision.run.teacher
    if source is None:
        return None, {}
    if not isinstance(run.objective, Supervised):
        raise UsageError(f"a teacher needs objective.kind supervised, not {run.objective.kind}: leave out teacher")
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
        if decision.several or card.task != "classes":
            theirs = "" if card.task == "classes" else f", which predicts {card.task}"
            raise UsageError(
                f"distill.kind {run.distill.kind} needs one label for each image, in the data and in the teacher "
                f"{source}{theirs}. Otherwise use distill.kind features"
            )
        if run.keeps_classes:
            columns = teacher_columns(run, list(card.class_names), splits.class_names)
        else:
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


def _answers(decision: Decision, teacher: Teacher, splits: Splits) -> TeacherAnswers:
    """Return the kept outputs of a teacher for the training images as this run's network sees them."""
    run, network = decision.run, teacher.network.config
    of_features = run.distill.kind == "features"
    about = [teacher.fingerprint, of_features, teacher.columns, splits.fingerprint, len(splits.train)]
    key = repr([1, *about, decision.config.image_size, run.precision])
    path = cache_folder() / "teachers" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.rows"
    return TeacherAnswers(path, network.features if of_features else teacher.outputs)


def _normalisation(bands: Bands | None) -> tuple[object, ...]:
    """Return what a network's pixels depend on, besides its own mean and std for 8-bit RGB."""
    return () if bands is None else (bands.bits, bands.mean, bands.std)


def _columns(source: str, theirs: list[str], outputs: int, ours: list[str]) -> list[list[int]] | None:
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
    return [[theirs.index(name)] for name in ours]


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
    if labels is None or isinstance(labels, np.ndarray):
        counts = np.empty(0) if labels is None else places_per_class(labels, classes, run.data.sampler)
    else:
        counts = class_counts(labels, classes)
    task = RunFacts(
        run.seed, classes, run.augment, decision.preprocess, tuple(counts.tolist()), decision.scale, decision.heads
    )
    if teacher is None:
        objective = _built(run.objective, model, task)
    else:
        assert isinstance(run.objective, Supervised)  # see `load_teacher`
        objective = DistillationObjective(model, run.objective, task, run.distill, teacher)
    needed = Objective if run.supervised else SelfSupervised
    if not isinstance(objective, needed):
        raise UsageError(
            f"{type(run.objective).__name__}.build returned {shown(objective)}; it must return a {needed.__name__} "
            f"({needed.__module__}), because labels is {run.supervised}"
        )
    if losses is not None:
        if not isinstance(objective, SupervisedObjective):
            raise UsageError(
                f"objective is a function, {shown(losses)}, which is for classes and sets of labels: objective "
                f"{run.objective.kind}, which these images have, has a loss of its own. Leave it out"
            )
        objective.losses = losses
    if run.keeps_classes and isinstance(objective, SupervisedObjective) and (counts == 0).any():
        objective.compared = torch.from_numpy(np.flatnonzero(counts))
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


def load_objective_weights(run: Run, objective: Objective) -> dict[str, str]:
    """Load the tensors that `objective` owns besides the network from the weights that `run` starts from.

    Returns a decision of the run that says what was loaded; {} if there is nothing to load. Raises WeightsError for a
    published decoder of another shape, CheckpointError for a run folder whose checkpoints are damaged.
    """
    owned = [name for name in objective.state_dict() if not name.startswith(NETWORK)]
    if run.weights is None or not owned:
        return {}
    path = local_path(run.weights)
    if (newest := checkpoint.latest_valid(path / "checkpoints")) is not None:
        return {"pre-training": _from_run(newest, run, objective, owned)}
    load = objective.load_decoder if isinstance(objective, MAEObjective) else None
    load = objective.load_mask if isinstance(objective, BEiTObjective) else load
    if is_ours(path):
        return {"pre-training": f"{FRESH}: a model folder contains only the network, a run folder contains everything"}
    if load is None:
        return {"pre-training": f"{FRESH}: published weights do not contain it"}
    with open_archive(path) as archive:
        tensors = {name: archive[name] for name in archive.names if "decoder" in name or "mask_token" in name}
        return {"pre-training": "; ".join(load(tensors))}


def _kind(settings: dict[str, Any]) -> str:
    """Return the kind of an objective, or the import path of one of the user's own, from its recorded settings."""
    return str(settings.get(CLASS) or settings.get("kind"))


def _from_run(newest: Path, run: Run, objective: Objective, owned: list[str]) -> str:
    """Load the tensors `owned` from a checkpoint, averaged ones if there are any, or none if they do not fit."""
    state = checkpoint.read(newest)
    average = state["average"]
    there = state["model"] | (average["mean"] | average["buffers"] if average["count"] else {})
    known, own = state["identity"], objective.state_dict()
    kind, folder = _kind(plain(run.objective)), newest.parent.parent
    if _kind(known["objective"]) != kind:
        return f"{FRESH}: {folder} was trained with objective {_kind(known['objective'])}, not {kind}"
    for name, value in objective.identity().items():
        if known.get(name) != value:
            return f"{FRESH}: {folder} has another {name}"
    for name in owned:
        if name not in there or there[name].shape != own[name].shape:
            shape = tuple(there[name].shape) if name in there else "missing"
            return f"{FRESH}: {name} is {shape} in {folder}, {tuple(own[name].shape)} here"
    with torch.no_grad():
        for name in owned:
            own[name].copy_(there[name])
    return f"the prediction head continues from {newest} ({len(owned)} tensors)"
