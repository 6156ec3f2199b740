"""Decide every setting that a run leaves open, from the data, the weights and the machine.

Each decision is a value in the returned `Run` and a phrase with the reason. So no setting is guessed silently, and
`config.yaml` repeats the run.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from vitrail import world
from vitrail.data.check import LONG, SMALL
from vitrail.data.images import whole
from vitrail.data.images.bands import choose_bands, layouts
from vitrail.data.images.ops import left_out
from vitrail.data.item import IndexedSource
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.labels.sets import LabelSets
from vitrail.data.settings import Bands, Preparation, Preprocess
from vitrail.device import ComputePrecision, available_cores, choose_device, compute_precision, free_memory
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.labels.thresholds import UNCHOSEN
from vitrail.evaluation.metric import Metric
from vitrail.model.build import build
from vitrail.model.own_part import own_parts
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.objective.settings import DINO, BEiT, Distill, MaskedPatch, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.ranges import height_width, size_text
from vitrail.training.batch_size import default_batch
from vitrail.training.objectives.for_labels import for_labels, scale_of
from vitrail.training.optim.tune import check_tune, with_lora_defaults
from vitrail.training.run import Run, check_batch
from vitrail.weights.assemble import HEAD, Overrides, skeleton
from vitrail.weights.card import Card
from vitrail.weights.load import load, read_card
from vitrail.words import without_folders

USUAL_SIDE = 224
"""Side of the input in pixels for images that are not smaller."""
LARGEST_CACHED = 256
"""Longer side in pixels up to which images are cached."""
COMBINABLE = ("dropout", "drop_path", "drop_path_shape", "patch", "head")
"""Fields of `Run.vit` that can be combined with existing weights. They change no tensors, except that another patch
resamples some, and that a classifier of the user's own is new."""


@dataclass(frozen=True)
class Resolved:
    """A run with every decision made, except the number of micro-batches, which needs the model."""

    run: Run
    config: ViTConfig | ResNetConfig
    preprocess: Preprocess
    device: torch.device
    decisions: dict[str, str] = field(default_factory=dict)
    """Setting: value and reason."""
    start: str | None = None
    """The weights to build from: `run.weights`, or their replacement (`checkpoints.resume.starting_weights`)."""
    several: bool = False
    """Whether the network learns to predict several labels for an image."""
    scale: TargetScale | None = None
    """Mean and deviation of the targets, if the network learns to predict numbers."""
    cut: str = ""
    """A warning if the network sees too little of the images."""

    def card(self, class_names: list[str]) -> Card:
        """Return the card of the weights this run makes, of these classes where it learns from labels."""
        provenance = {"recipe": self.run.name, "data": self.run.data.path, "from": self.run.weights}
        provenance |= {"teacher": self.run.teacher} if self.run.teacher is not None else {}
        provenance |= {"tune": self.run.tune} if self.run.tune != "all" else {}
        provenance = without_folders(provenance)  # a card is published; config.yaml has the paths
        names = list(class_names) if self.run.supervised else []
        thresholds = [UNCHOSEN] * self.config.classes if self.several else []
        return Card(self.config, names, self.preprocess, provenance=provenance, thresholds=thresholds, scale=self.scale)

    @property
    def autocast(self) -> bool:
        """Are matrix products in bfloat16 (the weights stay float32)?"""
        return self.run.precision == "bf16"


def resolve(
    run: Run, train: IndexedSource, class_names: list[str], start: str | None = None, model: nn.Module | None = None
) -> Resolved:
    """Decide everything but `accumulate`. Raises UsageError or DataError where the settings cannot work.

    start: `Resolved.start`; None for `run.weights`. model: The network to train, if there is one already.
    """
    decisions: dict[str, str] = {}
    start = start or run.weights
    _check_objective(run)
    run = for_labels(run, train.labels, decisions) if run.supervised else run
    weights = None if start is None else read_card(start).preprocess.bands
    found = layouts(train, run.data.channels or (None if weights is None else weights.channels))
    sizes = [(one.height, one.width) for one in found]
    if odd := sum(min(size) < SMALL or max(size) > LONG * min(size) for size in sizes):
        decisions["odd sizes"] = (
            f"{odd} of {len(sizes)} images have a side below {SMALL} px, or are more than {LONG} times longer than wide"
        )
    device = choose_device(run.device)
    if run.keep_head:
        decisions["head"] = _kept_head(start, class_names)
    if start is not None:
        run = _whole_patches(run, start, decisions)
    asked = None if run.preprocess is None else run.preprocess.bands
    bands = choose_bands(run.data, asked, weights, found, train, decisions)
    classes = len(class_names) if run.supervised else 0
    if model is None:
        config = model_config(run, start, classes, sizes, decisions)
    else:
        config = given_config(model, run, classes, sizes, decisions)
    config = _with_bands(config, bands, run, model)
    if bands is not None and isinstance(run.objective, DINO) and run.objective.jitter:
        decisions["crops"] = "without changes of colour, which are made for the three bands of visible light"
    check_tune(run, config)
    run = with_lora_defaults(run)
    preprocess = replace(_preprocess(run.preprocess, config.image_size, sizes, decisions), bands=bands)
    preprocess = whole.with_fill(preprocess, config.mean)
    each_way, cut = whole.parts_shown(sizes, preprocess)
    if each_way and (run.preprocess is None or preprocess.resize == "small"):
        decisions["shown"] = each_way
    if lost := left_out(run.augment, preprocess):
        decisions["augment"] = f"without {lost}, which are made for the three bands of visible light"
    if preprocess.image_size != config.image_size:
        raise UsageError(
            f"preprocess.image_size is {preprocess.image_size} but the model takes {config.image_size} pixels. Set "
            "--image-size, and give --preprocess.image-size the same value."
        )
    if run.device is None:
        decisions["device"] = f"{device}: the best available"
    if run.shard and world.size() == 1:
        decisions["shard"] = "no: there is one process (vitrail train --nproc N, or torchrun, starts several)"
    run = replace(
        run,
        model=run.network if start is None and model is None else run.model,
        image_size=config.image_size,
        preprocess=preprocess,
        precision=_precision(device, decisions) if run.precision == "auto" else run.precision,
        batch_size=_batch_size(run, len(train), decisions),
        workers=_workers(device, decisions) if run.workers is None else run.workers,
        cache=_cache(train, sizes, bands, decisions) if run.cache == "auto" else run.cache,
    )
    several = run.supervised and isinstance(train.labels, LabelSets)
    scale = scale_of(run, start, train.labels, class_names, decisions)
    return Resolved(run, config, preprocess, device, decisions, start, several, scale, cut)


def model_config(
    run: Run, start: str | None, classes: int, sizes: list[tuple[int, int]], decisions: dict[str, str]
) -> ViTConfig | ResNetConfig:
    """Return the config of the network to train: the named variant, or that of the weights at `start`.

    Without labels `classes` is 0, and the network has no classifier.
    """
    overrides = run.vit.changes()
    if start is not None:
        base = read_card(start).config
        theirs = {name for name, value in overrides.items() if value == getattr(base, name, None)}
        if wrong := sorted(set(overrides) - set(COMBINABLE) - theirs):
            raise UsageError(
                f"vit.{wrong[0]} is fixed by the weights in {run.weights}. Only {', '.join(COMBINABLE)} "
                "can be set with weights."
            )
        decisions["model"] = f"{base.__class__.__name__} of {run.weights}"
        size = height_width(run.image_size) if run.image_size else base.image_size
        if run.image_size is None:
            decisions["image_size"] = f"{size[0]} x {size[1]} px: that of the weights"
        patch = overrides.pop("patch", None)
        network = skeleton(Overrides(image_size=size, patch=patch).apply(base))
        if not run.keep_head:
            network.reset_head(classes)
        return replace(network.config, **overrides)
    if run.model is None:
        decisions["model"] = f"{run.network}: no other is named"
    patch = getattr(variant(run.network, **overrides), "patch", 32)
    size = height_width(run.image_size or _side(sizes, patch, decisions))
    config = variant(run.network, **overrides, classes=classes, image_size=size)
    tokens = (size[0] // patch) * (size[1] // patch)
    if isinstance(config, ViTConfig) and tokens < 16:
        decisions["patch"] = (
            f"{patch} px, as given: an image has only {tokens} tokens; the network learns more with a smaller "
            "patch (--vit.patch) or a larger --image-size"
        )
    return config


def _whole_patches(run: Run, start: str, decisions: dict[str, str]) -> Run:
    """Return `run` with an image size that the patch of the weights divides.

    The paper fine-tunes at 384 pixels (Table 4), which is not possible for its main network, ViT-H/14: 392.
    """
    patch = run.vit.patch
    if patch is None:
        config = read_card(start).config
        patch = config.patch if isinstance(config, ViTConfig) else 1
    if run.image_size is None:
        return run
    asked = height_width(run.image_size)
    size = (math.ceil(asked[0] / patch) * patch, math.ceil(asked[1] / patch) * patch)
    if size == asked:
        return run
    decisions["image_size"] = (
        f"{size_text(size)} px, not {size_text(asked)}: the next multiple of the patch, {patch} px"
    )
    preprocess = run.preprocess
    if preprocess is not None and preprocess.image_size == asked:
        preprocess = replace(preprocess, image_size=size)
    return replace(run, image_size=size, preprocess=preprocess)


def given_config(
    model: nn.Module, run: Run, classes: int, sizes: list[tuple[int, int]], decisions: dict[str, str]
) -> ViTConfig | ResNetConfig:
    """Return the config of a network that exists already; for one that is not ours, a config with its image size."""
    decisions["model"] = f"{type(model).__name__}, given in Python"
    config = getattr(model, "config", None)
    if not isinstance(config, ViTConfig | ResNetConfig):
        return ResNetConfig(classes=classes, image_size=height_width(run.image_size or _side(sizes, 1, decisions)))
    if config.classes != classes:
        raise UsageError(
            f"the model has {config.classes} outputs, and the run needs {classes}. Call model.reset_head({classes})"
        )
    return config


def _check_objective(run: Run) -> None:
    """Raise UsageError for settings that make sense only with labels, in a run that learns without."""
    if run.teacher is None and run.distill != Distill():
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
    if isinstance(run.objective, DINO):
        if run.average.kind != "none":
            raise UsageError("objective dino keeps its teacher, which is an average already: set --average.kind none")
        if run.early_stop is not None:
            raise UsageError("objective dino has no loss that shows when it stops improving: leave out --early-stop")


def _kept_head(start: str | None, class_names: list[str]) -> str:
    """Return the decision to keep the classifier. Raises UsageError if it is for other classes."""
    if start is None:
        raise UsageError("--keep-head keeps the classifier of the starting weights. Name them with --from WEIGHTS.")
    card = read_card(start)
    theirs = list(card.class_names)
    if card.config.classes != len(class_names) or (theirs != class_names and set(theirs) == set(class_names)):
        raise UsageError(
            f"keep_head: the classifier of {start} is for {card.config.classes} classes, and these are "
            f"{len(class_names)}, or the same in another order. Without --keep-head the run gets a new classifier."
        )
    named = "" if theirs == class_names else "; whether its classes have the order of the data cannot be checked"
    return f"that of {start}, for {len(class_names)} classes{named}"


def build_model(resolved: Resolved) -> nn.Module:
    """Return the network of a resolved run: fresh, or with weights and a new zero head (paper, section 3.2)."""
    run = resolved.run
    if isinstance(run.objective, Tokenizer):
        assert isinstance(resolved.config, ViTConfig)
        return ImageTokenizer(run.objective, resolved.config.patch)
    if resolved.start is None:
        return build(resolved.config)
    classes = None if run.keep_head else resolved.config.classes
    size, channels = resolved.config.image_size, resolved.config.channels
    loaded = load(resolved.start, classes=classes, image_size=size, patch=run.vit.patch, channels=channels)
    named = Path(resolved.start)  # as the user wrote it, not the place in the cache or in this package
    resolved.decisions["weights"] = str(replace(loaded.load_report, path=named))
    if loaded.config == resolved.config:
        return loaded
    model = build(resolved.config)  # the same tensors, other dropout, and perhaps a classifier of the user's own
    theirs = loaded.state_dict()
    if own_parts(loaded.config).get("head") != own_parts(resolved.config).get("head"):
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(HEAD)}
        theirs |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD)}
    model.load_state_dict(theirs)
    model.load_report = loaded.load_report
    return model


def image_sizes(source: IndexedSource) -> list[tuple[int, int]]:
    """Return (height, width) of some images spread over the source, from their headers; [] if none opens.

    Raises DataError for a read that hangs.
    """
    return [(one.height, one.width) for one in layouts(source)]


def _check_target(objective: object) -> None:
    """Raise UsageError for an objective that is not defined for other bands than RGB with 8 bits."""
    valid = "Valid for other bands are objective mae, dino, and masked-patch with objective.target pixels"
    if isinstance(objective, BEiT | Tokenizer):
        raise UsageError(f"objective {objective.kind} needs visual tokens of RGB with 8 bits. {valid}")
    if isinstance(objective, MaskedPatch) and objective.target != "pixels":
        raise UsageError(
            f"objective.target {objective.target} is a mean of red, green and blue in 3 bits each, and these images "
            f"have other bands. {valid}"
        )


def _with_bands(
    config: ViTConfig | ResNetConfig, bands: Bands | None, run: Run, model: nn.Module | None
) -> ViTConfig | ResNetConfig:
    """Return the config of a network that reads `bands`. Raises UsageError if the objective or `model` cannot."""
    if bands is None:
        return config
    _check_target(run.objective)
    own = getattr(model, "config", None)
    if isinstance(own, ViTConfig | ResNetConfig) and own.channels != bands.channels:
        raise UsageError(
            f"the model has {own.channels} channels, and the images have {bands.channels} bands. Load it with "
            f"vitrail.load(weights, channels={bands.channels})"
        )
    mean, std = (tuple(value / bands.white for value in values) for values in (bands.mean, bands.std))
    return replace(config, channels=bands.channels, mean=mean, std=std)


def _side(sizes: list[tuple[int, int]], patch: int, decisions: dict[str, str]) -> int:
    """Return the side of the square input: that of the images if they are small, else 224; whole patches."""
    shorter = int(statistics.median(min(size) for size in sizes)) if sizes else USUAL_SIDE
    side = patch * (max(USUAL_SIDE // patch, 1) if shorter >= USUAL_SIDE else -(-shorter // patch))
    decisions["image_size"] = f"{side} px: the images' shorter side is {shorter} px (median), the patch {patch} px"
    return side


def _preprocess(
    given: Preparation | None, image_size: tuple[int, int], sizes: list[tuple[int, int]], decisions: dict[str, str]
) -> Preprocess:
    """Return how images are prepared in evaluation: as given, and by default as `whole.choose_preprocess` says."""
    if given is None:
        return whole.choose_preprocess(image_size, sizes, decisions)
    said = decisions if given.resize is None else {}
    return given.completed(whole.choose_preprocess(given.image_size or image_size, sizes, said))


def _batch_size(run: Run, images: int, decisions: dict[str, str]) -> int:
    """Return the number of images per optimiser step over all processes."""
    world_size = world.size()
    if images < world_size:
        raise DataError(f"{images} training images are too few for {world_size} processes")
    batch = run.batch_size
    if batch is None:
        batch = max(default_batch(images) // world_size, 1) * world_size
        decisions["batch_size"] = f"{batch}: for {images} training images"
    check_batch(batch, world_size)
    if batch > images:
        batch = images // world_size * world_size
        decisions["batch_size"] = f"{batch}, not {run.batch_size}: there are only {images} training images"
    if run.accumulate is not None and run.accumulate > batch // world_size:
        raise UsageError(
            f"accumulate is {run.accumulate}, but a process has {batch // world_size} images per optimiser step. "
            "Use at most as many micro-batches, or a larger --batch-size."
        )
    return batch


def _precision(device: torch.device, decisions: dict[str, str]) -> ComputePrecision:
    precision = compute_precision(device)
    having = "has" if precision == "bf16" else "lacks"
    decisions["precision"] = f"{precision}: this {device.type} {having} fast bfloat16"
    return precision


def _workers(device: torch.device, decisions: dict[str, str]) -> int:
    """Return the number of threads that decode. Training on a CPU needs most of the cores itself."""
    cores = available_cores()
    workers = min(16, cores) if device.type == "cuda" else max(1, cores // 4)
    decisions["workers"] = f"{workers}: of {cores} cores"
    return workers


def _cache(
    train: IndexedSource, sizes: list[tuple[int, int]], bands: Bands | None, decisions: dict[str, str]
) -> Literal["yes", "no"]:
    """Return whether to cache decoded images: if they are small and take at most a quarter of the free memory."""
    if not sizes:
        return "no"
    pixel = 3 if bands is None else 4 * bands.channels  # bytes
    each = statistics.mean(pixel * height * width for height, width in sizes)
    whole = each * len(train)
    small = max(max(size) for size in sizes) <= LARGEST_CACHED
    fits = whole <= free_memory(torch.device("cpu")) / 4
    answer: Literal["yes", "no"] = "yes" if small and fits else "no"
    decisions["cache"] = f"{answer}: decoded, the training images take about {whole / 2**30:.2f} GiB"
    return answer
