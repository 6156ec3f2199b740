"""Decide every setting that a run leaves open, from facts about the data, the weights and the machine.

`decide` is a pure function. Each decision is a value in the returned `Run` and a phrase with the reason. So no setting
is guessed silently, `config.yaml` repeats the run, and deciding a decided run changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from vitrail.costs.count import training_flops
from vitrail.data.check import LONG, SMALL
from vitrail.data.images import whole
from vitrail.data.images.bands import choose_bands
from vitrail.data.images.batched import divided
from vitrail.data.images.device_crop import decodes_on_device
from vitrail.data.images.geometry import Size
from vitrail.data.images.masked import MaskTransform
from vitrail.data.images.ops import colour_changes_left_out, train_transform
from vitrail.data.images.worded import DRAWN
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.labels.sets import Labels
from vitrail.data.settings import Bands, Preprocess
from vitrail.device import autocast_dtype
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.label_scores import UNCHOSEN
from vitrail.evaluation.metric import Metric
from vitrail.import_path import import_path
from vitrail.model.own_part import own_parts
from vitrail.model.variants import Config, ForeignConfig, NetworkConfig, ResNetConfig, ViTConfig, variant
from vitrail.objective.base import Head
from vitrail.objective.settings import DINO, BEiT, DINOv2, Distill, MaskedPatch, Tokenizer
from vitrail.ranges import height_width, size_text
from vitrail.tasks.catalog import task_for
from vitrail.training.batch_size import LARGEST, default_batch
from vitrail.training.facts import Facts
from vitrail.training.optim.tune import check_tune, with_lora_defaults
from vitrail.training.run import COMBINABLE, NOMINAL, Run, check_batch
from vitrail.version import install_extra
from vitrail.weights.answer import CardAnswer
from vitrail.weights.assemble import Overrides, skeleton
from vitrail.weights.card import Card
from vitrail.words import shown, time_span, without_folders

T = TypeVar("T")
Because = tuple[T, Mapping[str, str]]
"""A value, and why it is that: setting -> value and reason in words, for each decision in it."""

USUAL_SIDE = 224
"""Side of the input in pixels for images that are not smaller."""
LARGEST_CACHED = 256
"""Longer side in pixels up to which images are cached."""
GPU_RATE = 150e12
"""FLOP/s that a fast GPU reaches in training without compilation. On a slower one a run is longer."""
COMPILED_FROM = 600.0
"""Seconds of training from which the blocks are compiled: it takes about a minute, and saves about a fifth."""
FEWEST_CORES = 3
"""Smallest number of cores for a training process beside which other processes decode."""
CORE_SECONDS, RANDAUGMENT_SECONDS, COLOUR_SECONDS = 1.25e-3, 0.85e-3, 1.4e-3
"""What an image of ImageNet costs a core: to decode, crop and resize a JPEG file; RandAugment; 3-Augment and colour
jitter (benchmarks/input_pipeline.py)."""
READ_SECONDS = 0.06e-3
"""What it costs to read such a file and to draw its crop, if the device decodes."""
FASTEST_NETWORK = 20_000
"""Images that a fast network trains on in a second: about twice what is expected of S/16 on an H100, because a core may
be half as fast as ours."""


@dataclass(frozen=True)
class Decision:
    """A run with every decision made, except those that need its network (`vitrail.training.assemble`)."""

    run: Run
    config: NetworkConfig
    """That of the network."""
    device: torch.device
    why: Mapping[str, str]
    """Setting -> value and reason."""
    start: str | None = None
    """See `Facts.start`."""
    several: bool = False
    """Whether the network learns to predict several labels for an image."""
    scale: TargetScale | None = None
    """Mean and deviation of the targets, if the network learns to predict numbers."""
    heads: Sequence[Head] = ()
    """The answers, if the network learns several for an image."""
    cut: str = ""
    """A warning if the network sees too little of the images."""

    @property
    def our_config(self) -> Config:
        """The config of a network of vitrail, from which it can be built and its cost computed."""
        assert not isinstance(self.config, ForeignConfig)
        return self.config

    @property
    def preprocess(self) -> Preprocess:
        """How images are prepared, complete."""
        assert isinstance(self.run.preprocess, Preprocess)
        return self.run.preprocess

    def card(self, class_names: list[str]) -> Card:
        """Return the card of the weights this run makes, of these classes where it learns from labels.

        That of a network which is not vitrail's is never written: it says how its outputs are measured.
        """
        start = self.run.weights
        if start is not None and (place := Path(start).expanduser()).exists():
            start = place.absolute().name  # a path looks like a name on the hub
        provenance = {"data": self.run.data.path, "from": start}
        provenance |= {"teacher": self.run.teacher} if self.run.teacher is not None else {}
        provenance |= {"tune": self.run.tune} if self.run.tune != "all" else {}
        provenance = without_folders(provenance)  # a card is published; config.yaml has the paths
        names = list(class_names) if self.run.supervised else []
        thresholds = [UNCHOSEN] * self.config.classes if self.several else []
        config = cast(Config, self.config)  # a card reads only what every kind of config has
        answers = [
            CardAnswer(
                one.name, one.kind, one.outputs, (UNCHOSEN,) * one.outputs * (one.kind == "labels"), scale=one.scale
            )
            for one in self.heads
        ]
        about = {"provenance": provenance, "thresholds": thresholds, "scale": self.scale, "answers": answers}
        return Card(config, names, self.preprocess, **about)

    @property
    def autocast(self) -> bool:
        """Are matrix products in bfloat16 or float16 (the weights stay float32)?"""
        return autocast_dtype(self.run.precision) is not None


def decide(run: Run, facts: Facts) -> Decision:
    """Return `run` with every decision made. Raises UsageError or DataError where the settings cannot work."""
    why: dict[str, str] = {}

    def noted(found: Because[T]) -> T:
        why.update(found[1])
        return found[0]

    _check_objective(run)
    task = task_for(facts.labels)
    run = noted(_adapted(run, facts.labels)) if run.supervised else run
    sizes = facts.sizes
    if odd := sum(min(size) < SMALL or max(size) > LONG * min(size) for size in sizes):
        why["odd sizes"] = (
            f"{odd} of {len(sizes)} images have a side below {SMALL} px, or are more than {LONG} times longer than wide"
        )
    if run.keep_head:
        why["head"] = _kept_head(run, facts)

    # the network, and what it sees of an image
    run = noted(_whole_patches(run, facts.card))
    bands = noted(_bands(run, facts))
    config = _with_bands(noted(_with_pixels(noted(_config(run, facts)), run, facts)), bands, run, facts)
    if bands is not None and isinstance(run.objective, DINO) and run.objective.jitter:
        why["crops"] = "without changes of colour, which are made for the three bands of visible light"
    check_tune(run, config)
    preprocess = noted(_preprocess(run, config.image_size, sizes, facts.card))
    preprocess = replace(preprocess, bands=bands)
    preprocess = whole.with_fill(preprocess, config.mean)
    config, preprocess = _with_native(config, preprocess, run, facts)
    each_way, cut = whole.parts_shown(sizes, preprocess)
    if each_way and (run.preprocess is None or preprocess.resize == "small"):
        why["shown"] = each_way
    if config.segmentation if isinstance(config, ViTConfig) else False:
        MaskTransform(train_transform(run.augment, preprocess))  # raises UsageError
    if lost := colour_changes_left_out(run.augment, preprocess):
        why["augment"] = f"without {lost}, which are made for the three bands of visible light"
    if preprocess.image_size != config.image_size:
        raise UsageError(
            f"preprocess.image_size is {preprocess.image_size} but the model takes {config.image_size} pixels. Set "
            "--image-size, and give --preprocess.image-size the same value."
        )

    # the machine
    if run.device is None:
        why["device"] = f"{facts.device}: the best available"
    if run.shard and facts.processes == 1:
        why["shard"] = "no: there is one process (vitrail train --nproc N, or torchrun, starts several)"
    named = run.network if facts.start is None and facts.model is None else run.model
    run = replace(with_lora_defaults(run), model=named, image_size=config.image_size, preprocess=preprocess)
    if run.precision == "auto":
        having = "has" if facts.precision == "bf16" else "lacks"
        half = ", and has tensor cores for float16" if facts.precision == "fp16" else ""
        why["precision"] = f"{facts.precision}: this {facts.device.type} {having} fast bfloat16{half}"
        run = replace(run, precision=facts.precision)
    run = replace(run, batch_size=noted(_batch_size(run, facts)))
    run = replace(run, compile=noted(_compile(run, config, facts))) if run.compile is None else run
    run = replace(run, cache=noted(_cache(run, facts, bands))) if run.cache == "auto" else run
    if run.cache == "yes" and run.worker_kind == "processes":
        raise UsageError("--cache yes keeps decoded images in one process. Use it with --worker-kind threads")
    if run.cache == "yes" and run.decode_on == "device":
        raise UsageError("--cache yes keeps images that the processors decode: remove --decode-on device")
    run = replace(run, worker_kind=noted(_worker_kind(run, facts))) if run.worker_kind == "auto" else run
    run = replace(run, augment_on=noted(_augment_on(run, facts, preprocess)))
    run = replace(run, workers=noted(_workers(run, facts))) if run.workers is None else run

    several = run.supervised and task.name == "labels"
    scale = task.scale(run, facts.card, facts.labels, facts.class_names)
    if scale is not None:
        each = zip(facts.class_names, scale.mean, scale.deviation, strict=True)
        why["scale"] = "; ".join(f"{name}: mean {mean:.6g}, deviation {spread:.6g}" for name, mean, spread in each)
    heads = task.heads(facts.labels) if run.supervised else []
    return Decision(run, config, facts.device, why, facts.start, several, scale, heads, cut)


def _adapted(run: Run, labels: Labels) -> Because[Run]:
    """Return `run` with a loss and a metric for these labels. Raises UsageError for settings of other labels."""
    task = task_for(labels)
    if run.metric.answer is not None and task.name != "answers":
        raise UsageError(
            f"metric.answer is {run.metric.answer!r}, and these images have one answer each. Leave it out, or name "
            "several columns in data.answers"
        )
    return task.adapt(run, labels)


def _check_objective(run: Run) -> None:
    """Raise UsageError for settings that make sense only with labels, in a run that learns without, or that exclude
    each other."""
    if run.teacher is None and run.distill != Distill() and not run.keeps_classes:
        raise UsageError("distill says what is learned from a teacher, and there is none: name it with --teacher MODEL")
    needs_labels = {
        "augment.mixup": run.augment.mixup,
        "augment.cutmix": run.augment.cutmix,
        "keep_head": run.keep_head,
        "teacher": run.teacher is not None,
        "metric": run.metric != Metric(),
        "tune": run.tune != "all",
    }
    if isinstance(run.objective, Tokenizer):  # its features are not evaluated either
        needs_labels |= {"knn": run.knn is not None, "fewshot": run.fewshot is not None}
    if isinstance(run.objective, Tokenizer) and ("/" not in run.network or run.weights is not None):
        raise UsageError(
            "a tokenizer starts from no weights (--from), and takes its patch from the name of a Vision Transformer, "
            f"such as B/16, not {run.network}"
        )
    if not run.supervised and (wrong := [name for name, asked in needs_labels.items() if asked]):
        kind = run.objective.kind
        raise UsageError(f"objective {kind} has no labels and no classifier: leave out {', '.join(wrong)}")
    if bias := getattr(run.objective, "head_bias", 0.0):
        begins = {"keep_head": run.keep_head, "probe_head": run.probe_head, "classes": run.keeps_classes}
        if other := next((name for name, asked in begins.items() if asked), None):
            raise UsageError(
                f"objective.head_bias {bias:g} and {other} both say how the classifier begins: leave one of them out"
            )
    if isinstance(run.objective, DINOv2) and run.objective.gram_weight and run.weights is None:
        raise UsageError(
            f"objective.gram_weight is {run.objective.gram_weight:g}: similarities of patches stay near those in the "
            "weights that training continues from. Name them: --from vitrail/tiny, or others. To begin from nothing, "
            "set --objective.gram-weight 0"
        )
    if isinstance(run.objective, DINO):
        kind = run.objective.kind
        if run.average.kind != "none":
            raise UsageError(
                f"objective {kind} keeps its teacher, which is an average already: set --average.kind none"
            )
        if run.early_stop is not None:
            raise UsageError(f"objective {kind} has no loss that shows when it stops improving: leave out --early-stop")


def _kept_head(run: Run, facts: Facts) -> str:
    """Return why the classifier can be kept. Raises UsageError if it is for something else, or not to be used."""
    card, new = facts.card, "Without --keep-head the run gets a new classifier"
    if card is None:
        raise UsageError("--keep-head keeps the classifier of the starting weights. Name them with --from WEIGHTS.")
    task = task_for(facts.labels).name
    if card.task != task and not {card.task, task} <= {"classes", "labels"}:
        raise UsageError(f"keep_head: {facts.start} predicts {card.task}, and this run learns {task}. {new}")
    if run.vit.head not in (None, own_parts(card.config).get("head")):
        raise UsageError(
            f"keep_head keeps the classifier of {facts.start}, and vit.head is another one. Leave one of them out"
        )
    theirs, ours = list(card.class_names), facts.class_names
    if card.config.classes != len(ours):
        raise UsageError(
            f"keep_head: the classifier of {facts.start} is for {card.config.classes} classes, and these are "
            f"{len(ours)}. {new}"
        )
    in_place = {name for name, own in zip(theirs, ours, strict=False) if name == own}
    if moved := [name for name in theirs if name in ours and name not in in_place]:
        raise UsageError(
            f"keep_head: the classifier of {facts.start} has classes in another order: {shown(moved[0])} is number "
            f"{theirs.index(moved[0])} there and number {ours.index(moved[0])} here. {new}"
        )
    named = ""
    if theirs != ours:
        named = "; whether its classes have the order of the data cannot be checked"
        other = next(((name, own) for name, own in zip(theirs, ours, strict=False) if name != own), None)
        named += f": the names differ, the first {shown(other[0])} there and {shown(other[1])} here" if other else ""
    return f"that of {facts.start}, for {len(ours)} classes{named}"


def _whole_patches(run: Run, card: Card | None) -> Because[Run]:
    """Return `run` with an image size that the patch of the weights divides.

    The paper fine-tunes at 384 pixels (Table 4), which is not possible for its main network, ViT-H/14: 392.
    """
    if card is None or run.image_size is None:
        return run, {}
    own = card.config.patch if isinstance(card.config, ViTConfig) else 1
    patch = own if run.vit.patch is None else run.vit.patch
    asked = height_width(run.image_size)
    size = (math.ceil(asked[0] / patch) * patch, math.ceil(asked[1] / patch) * patch)
    if size == asked:
        return run, {}
    why = f"{size_text(size)} px, not {size_text(asked)}: the next multiple of the patch, {patch} px"
    preprocess = run.preprocess
    if preprocess is not None and preprocess.image_size == asked:
        preprocess = replace(preprocess, image_size=size)
    return replace(run, image_size=size, preprocess=preprocess), {"image_size": why}


def _bands(run: Run, facts: Facts) -> Because[Bands | None]:
    asked = None if run.preprocess is None else run.preprocess.bands
    weights = None if facts.card is None else facts.card.preprocess.bands
    return choose_bands(run.data, asked, weights, facts.layouts, facts.statistics)


def _config(run: Run, facts: Facts) -> Because[NetworkConfig]:
    """Return the config of the network to train."""
    classes = len(facts.class_names) if run.supervised else 0
    if facts.model is None:
        return network_config(run, facts.card, classes, facts.sizes)
    why = {"model": f"{type(facts.model).__name__}, given in Python"}
    config = getattr(facts.model, "config", None)
    if not isinstance(config, ViTConfig | ResNetConfig):
        size, of_size = (run.image_size, {}) if run.image_size else _side(facts.sizes, 1)
        return ForeignConfig(height_width(size), classes), {**why, **of_size}
    if config.classes != classes:
        raise UsageError(
            f"the model has {config.classes} outputs, and the run needs {classes}. Call model.reset_head({classes})"
        )
    return config, why


def _with_pixels(config: NetworkConfig, run: Run, facts: Facts) -> Because[NetworkConfig]:
    """Return the config with the head for masks, if the labels are masks, else without. Raises UsageError."""
    if not run.supervised or task_for(facts.labels).name != "segmentation":
        if run.vit.segmentation is not None:
            raise UsageError(
                f"vit.segmentation {run.vit.segmentation} is for images with masks: a folder images/ and a folder "
                "masks/. Leave it out"
            )
        if run.vit.queries is not None:
            raise UsageError(f"vit.queries {run.vit.queries} is for images with masks. Leave it out")
        return replace(config, segmentation="") if isinstance(config, ViTConfig) else config, {}
    if not isinstance(config, ViTConfig) or (facts.model is not None and not config.segmentation):
        raise UsageError(
            "masks are learned by a Vision Transformer with a head for pixels, not by a ResNet or another network. "
            "In Python vitrail.create(NAME, classes=N, segmentation='layers') makes one"
        )
    base = facts.card.config if facts.card and isinstance(facts.card.config, ViTConfig) else None
    theirs = base.segmentation if base else ""
    kind = run.vit.segmentation or theirs or config.segmentation or "layers"
    if run.keep_head and kind != theirs:
        raise UsageError(f"keep_head keeps the head {theirs or 'for whole images'}, not {kind}: leave it out")
    if run.vit.head is not None:
        raise UsageError(
            f"vit.head {import_path(type(run.vit.head))} is for the classes of whole images, and masks are learned by "
            f"the head {kind} (vit.segmentation). Leave it out"
        )
    if run.vit.queries and kind != "queries":
        raise UsageError(f"vit.queries is for --vit.segmentation queries, and the head is {kind}: leave it out")
    if run.keep_head and base and run.vit.queries not in (None, base.queries):
        raise UsageError(
            f"keep_head keeps the head of {facts.start}, with {base.queries} queries, and vit.queries is "
            f"{run.vit.queries}. Leave one of them out"
        )
    plain = replace(config, segmentation=kind, native=False, head=None)
    return plain, {"vit.segmentation": f"{kind}: how the class of each patch is told"}


def network_config(run: Run, card: Card | None, classes: int = 0, sizes: Sequence[Size] = ()) -> Because[Config]:
    """Return the config of the network that `run` trains: the named variant, or that of its weights with this `card`.

    Without labels `classes` is 0, and the network has no classifier. sizes: Those of some images.
    """
    overrides = run.vit.changes()
    if card is not None:
        return _pretrained_config(run, card.config, classes, overrides)
    why = {} if run.model is not None else {"model": f"{run.network}: no other is named"}
    patch = getattr(variant(run.network, **overrides), "patch", 32)
    asked, of_size = (run.image_size, {}) if run.image_size else _side(sizes, patch)
    size = height_width(asked)
    config = variant(run.network, **overrides, classes=classes, image_size=size)
    tokens = (size[0] // patch) * (size[1] // patch)
    if isinstance(config, ViTConfig) and tokens < 16:
        of_size = {**of_size, "patch": (
            f"{patch} px, as given: an image has only {tokens} tokens; the network learns more with a smaller "
            "patch (--vit.patch) or a larger --image-size"
        )}  # fmt: skip
    return config, {**why, **of_size}


def _pretrained_config(run: Run, base: Config, classes: int, overrides: dict[str, Any]) -> Because[Config]:
    """Return the config `base` of the weights with what can be changed in it: size, patch, classifier and dropout."""
    theirs = {name for name, value in overrides.items() if value == getattr(base, name, None)}
    if wrong := sorted(set(overrides) - set(COMBINABLE) - theirs):
        raise UsageError(
            f"vit.{wrong[0]} is fixed by the weights in {run.weights}. Only {', '.join(COMBINABLE)} "
            "can be set with weights."
        )
    if lacking := [name for name in overrides if not hasattr(base, name)]:
        raise UsageError(f"{run.weights} is a ResNet, which has no setting vit.{lacking[0]}: leave it out")
    why = {"model": f"{base.__class__.__name__} of {run.weights}"}
    size = height_width(run.image_size) if run.image_size else base.image_size
    if run.image_size is None:
        why["image_size"] = f"{size[0]} x {size[1]} px: that of the weights"
    patch = overrides.pop("patch", None)
    network = skeleton(Overrides(image_size=size, patch=patch).apply(base))
    if not run.keep_head and not run.keeps_classes:
        network.reset_head(classes)
    overrides |= {"classes": classes} if run.keeps_classes else {}
    return replace(network.config, **overrides), why


def _with_native(
    config: NetworkConfig, preprocess: Preprocess, run: Run, facts: Facts
) -> tuple[NetworkConfig, Preprocess]:
    """Return the config and the preprocessing, which agree whether images are strips (`vitrail.strip`).

    Raises UsageError for what needs images of one shape.
    """
    if preprocess.resize != "native":
        return (replace(config, native=False) if isinstance(config, ViTConfig) else config), preprocess
    if not isinstance(config, ViTConfig) or (facts.model is not None and not config.native):
        raise UsageError(
            "--preprocess.resize native needs a Vision Transformer of vitrail that takes strips of patches; in Python "
            "vitrail.create(NAME, native=True) makes one"
        )
    one_shape = {
        f"--objective.kind {run.objective.kind}": not run.supervised,
        "--teacher": run.teacher is not None,
        f"--augment.mixup {run.augment.mixup:g}": run.augment.mixup,
        f"--augment.cutmix {run.augment.cutmix:g}": run.augment.cutmix,
        f"--progressive.start {run.progressive.start:g}": run.progressive.start != 1,
        f"--preprocess.patch {preprocess.patch}, not the network's {config.patch},": preprocess.patch
        not in (None, config.patch),
    }
    if wrong := [setting for setting, asked in one_shape.items() if asked]:
        setting, without = wrong[0], ""
        if setting == "--teacher" and run.keeps_classes and run.teacher == run.weights:  # nobody gave it
            setting = f"--classes {run.classes[0]}, which has the weights as a teacher of what no training image shows,"
            without = ". --distill.weight 0 switches this teacher off"
        if run.preprocess is None or run.preprocess.resize is None:  # it is that of the weights, which nobody asked for
            raise UsageError(
                f"{setting} needs images of one shape, and {run.weights} keeps the shapes of images. Give them "
                f"one with --preprocess.resize squash{without}"
            )
        raise UsageError(
            f"{setting} does not go with --preprocess.resize native, where each image has its own shape{without}"
        )
    preprocess = replace(preprocess, patch=config.patch)
    _ = preprocess.size  # raises UsageError for patches of which there is no strip
    return replace(config, native=True), preprocess


def _check_target(objective: object) -> None:
    """Raise UsageError for an objective that is not defined for other bands than RGB with 8 bits."""
    valid = "Valid for other bands are objective mae, dino, dinov2, and masked-patch with objective.target pixels"
    if isinstance(objective, BEiT | Tokenizer):
        raise UsageError(f"objective {objective.kind} needs visual tokens of RGB with 8 bits. {valid}")
    if isinstance(objective, MaskedPatch) and objective.target != "pixels":
        raise UsageError(
            f"objective.target {objective.target} is a mean of red, green and blue in 3 bits each, and these images "
            f"have other bands. {valid}"
        )


def _with_bands(config: NetworkConfig, bands: Bands | None, run: Run, facts: Facts) -> NetworkConfig:
    """Return the config of a network that reads `bands`. Raises UsageError if the objective or the model cannot."""
    if bands is None:
        return config
    _check_target(run.objective)
    ours = facts.model is not None and not isinstance(config, ForeignConfig)
    if ours and config.channels != bands.channels:
        raise UsageError(
            f"the model has {config.channels} channels, and the images have {bands.channels} bands. Load it with "
            f"vitrail.load(weights, channels={bands.channels})"
        )
    mean, std = (tuple(value / bands.white for value in values) for values in (bands.mean, bands.std))
    return replace(config, channels=bands.channels, mean=mean, std=std)


def _side(sizes: Sequence[Size], patch: int) -> Because[int]:
    """Return the side of the square input: that of the images if they are small, else 224; whole patches."""
    shorter = int(statistics.median(min(size) for size in sizes)) if sizes else USUAL_SIDE
    side = patch * (max(USUAL_SIDE // patch, 1) if shorter >= USUAL_SIDE else -(-shorter // patch))
    why = f"{side} px: the images' shorter side is {shorter} px (median), the patch {patch} px"
    return side, {"image_size": why}


def _preprocess(run: Run, image_size: Size, sizes: Sequence[Size], card: Card | None) -> Because[Preprocess]:
    """Return how images are prepared in evaluation: as given, and by default as `whole.choose_preprocess` says.

    card: That of the weights. If their classes are kept, so is the preparation of their images; and images of any shape
    stay so.
    """
    theirs = None if card is None else card.preprocess
    given = run.preprocess
    kept, why = None, ""
    if theirs is not None and run.keeps_classes:
        kept, why = replace(theirs, image_size=image_size), "that of the weights, whose classes are kept"
    elif theirs is not None and theirs.resize == "native":
        kept, why = (
            Preprocess(image_size, resize="native"),
            "the weights are of a network that keeps the shapes of images",
        )
    if kept is not None and (given is None or given.resize is None):
        return (kept if given is None else given.completed(kept)), {"preprocess": f"{kept.resize}: {why}"}
    if given is None:
        found, why = whole.choose_preprocess(image_size, sizes)
        return found, {"preprocess": why}
    found, why = whole.choose_preprocess(given.image_size or image_size, sizes)
    return given.completed(found), {"preprocess": why} if given.resize is None else {}


def _batch_size(run: Run, facts: Facts) -> Because[int]:
    """Return the number of images per optimiser step over all processes."""
    images, processes, batch, why = facts.images, facts.processes, run.batch_size, ""
    if images < processes:
        raise DataError(f"{images} training images are too few for {processes} processes")
    if batch is None:
        gpus = processes if facts.device.type == "cuda" else 1
        batch = max(default_batch(images, gpus) // processes, 1) * processes
        why = f"{batch}: for {images} training images" + f" and {gpus} GPUs" * (batch > LARGEST)
    check_batch(batch, processes)
    if batch > images:
        batch = images // processes * processes
        why = f"{batch}, not {run.batch_size}: there are only {images} training images"
    if run.accumulate is not None and run.accumulate > batch // processes:
        raise UsageError(
            f"accumulate is {run.accumulate}, but a process has {batch // processes} images per optimiser step. "
            "Use at most as many micro-batches, or a larger --batch-size."
        )
    return batch, {"batch_size": why} if why else {}


def _compile(run: Run, config: NetworkConfig, facts: Facts) -> Because[bool]:
    """Return whether to compile the blocks: on a GPU, if the run is long and no part of the network is the user's."""
    if facts.device.type != "cuda":
        return False, {}
    if not isinstance(config, ViTConfig) or own_parts(config):
        return False, {"compile": "no: only the blocks of a Vision Transformer of vitrail are known to compile whole"}
    assert run.batch_size
    per_epoch = facts.images // run.batch_size
    steps = (run.duration or NOMINAL).steps(per_epoch=per_epoch, batch_size=run.batch_size)
    seconds = steps * run.batch_size * training_flops(config) / facts.processes / GPU_RATE
    if run.time_limit is not None:
        seconds = 60 * run.time_limit if run.duration is None else min(seconds, 60 * run.time_limit)
    answer = seconds >= COMPILED_FROM
    length = f"at least {time_span(seconds)} of training, and compiling pays from {COMPILED_FROM / 60:g} min on"
    return answer, {"compile": f"{'yes' if answer else 'no'}: {length}"}


def _worker_kind(run: Run, facts: Facts) -> Because[Literal["threads", "processes"]]:
    """Return what decodes images.

    On a CPU threads: the network's long operations leave them the interpreter's lock, and they start at once. A step on
    CUDA is hundreds of short launches, which need the lock that threads hold for 17 to 43 % of their time.
    """
    if facts.device.type != "cuda" or run.workers == 0:
        return "threads", {}
    if run.cache == "yes":
        why = "the decoded images are cached in this process"
    elif run.workers is None and facts.cores < FEWEST_CORES:
        why = f"{facts.cores} cores are too few for processes beside the one that trains"
    else:
        why = facts.obstacle()
    if why:
        return "threads", {"worker_kind": f"threads: {why}"}
    return "processes", {"worker_kind": "processes: threads would hold up the launches of the training thread"}


def _workers(run: Run, facts: Facts) -> Because[int]:
    """Return the number of threads or processes that decode."""
    workers = worker_count(run, facts.device, facts.cores)
    return workers, {"workers": f"{workers}: of {facts.cores} cores"}


def worker_count(run: Run, device: torch.device, cores: int) -> int:
    """Return the number of threads or processes that decode for a process with a number of cores.

    Training on a CPU needs most of the cores itself, and on CUDA one. More threads than 16 wait for the interpreter's
    lock. More processes than the fastest network needs for such images would only take memory.
    """
    if device.type != "cuda":
        return max(1, cores // 4)
    if run.worker_kind != "processes":
        return min(16, cores)
    most = math.ceil(FASTEST_NETWORK * _core_seconds(run))
    return max(1, min(cores - 1, most))


def _core_seconds(run: Run) -> float:
    """Return the time in which a core prepares an image of ImageNet."""
    if run.decode_on == "device":
        return READ_SECONDS
    if run.augment_on == "device":
        return CORE_SECONDS
    asked = run.augment
    colours = COLOUR_SECONDS if asked.three_augment or asked.color_jitter or asked.also else 0.0
    return CORE_SECONDS + colours + (0.0 if run.augment.randaugment is None else RANDAUGMENT_SECONDS)


def _augment_on(run: Run, facts: Facts, preprocess: Preprocess) -> Because[Literal["host", "device"]]:
    """Return what changes colours: the device, if it is CUDA and the cores could not feed half of a fast network."""
    if run.decode_on == "device":
        return _decoding_device(run, preprocess)
    if run.augment_on == "host" or (run.augment_on == "auto" and facts.device.type != "cuda"):
        return "host", {}
    possible = divided(train_transform(run.augment, preprocess), preprocess.size) is not None
    if run.augment_on == "device":
        if not possible:
            raise UsageError(
                "--augment-on device is for RandAugment, 3-Augment, colour jitter and most words of --augment.also on "
                f"RGB images, followed by no {', '.join(DRAWN)} and no operation of your own. Use --augment-on host"
            )
        return "device", {}
    cores = facts.cores - 1 if run.workers is None else run.workers
    if not possible or cores >= FASTEST_NETWORK / 2 * _core_seconds(run):
        return "host", {}
    return "device", {"augment_on": f"device: {cores} cores could not augment as fast as a network may train"}


def _decoding_device(run: Run, preprocess: Preprocess) -> Because[Literal["host", "device"]]:
    """Return "device": what decodes also crops and changes colours. Raises UsageError where it cannot."""
    if run.augment_on == "host":
        raise UsageError("--decode-on device leaves the colours to the device, too: remove --augment-on host")
    if divided(train_transform(run.augment, preprocess), preprocess.size, decodes=True) is None:
        raise UsageError(
            "--decode-on device is for RGB images with --augment.crop inception, resized in another way than by "
            f"'pad', and no operation of your own, nor --augment.also {', '.join(DRAWN)}. Use --decode-on host"
        )
    if not decodes_on_device():
        raise UsageError(f"--decode-on device needs torchcodec: {install_extra('gpu')}")
    return "device", {"augment_on": "device: as it decodes the images"}


def _cache(run: Run, facts: Facts, bands: Bands | None) -> Because[Literal["yes", "no"]]:
    """Return whether to cache decoded images: if they are small and take at most a quarter of the free memory."""
    if run.worker_kind == "processes":
        return "no", {"cache": "no: processes do not share decoded images"}
    if run.decode_on == "device":
        return "no", {"cache": "no: the device decodes the images"}
    if not facts.sizes:
        return "no", {}
    pixel = 3 if bands is None else 4 * bands.channels  # bytes
    total = facts.images * statistics.mean(pixel * height * width for height, width in facts.sizes)
    small = max(max(size) for size in facts.sizes) <= LARGEST_CACHED
    answer: Literal["yes", "no"] = "yes" if small and total <= facts.memory / 4 else "no"
    return answer, {"cache": f"{answer}: decoded, the training images take about {total / 2**30:.2f} GiB"}
