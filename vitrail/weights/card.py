"""`Card`: everything about a set of weights that is not a tensor. Torch-free.

Weight sources differ in LayerNorm epsilon, GELU kind, the way positions are resampled, and preprocessing. The
card stores all of this next to the tensors, so that a loaded model computes what its origin computed. It also stores
the class names, so that classes are known by name wherever the model goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_origin

from vitrail.config import field_types, merge, plain
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.labels.sets import BETWEEN
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError, WeightsError, did_you_mean
from vitrail.model.variants import NAMES, ORIGIN_FIELDS, ResNetConfig, ViTConfig, flat, variant
from vitrail.weights.answer import CardAnswer, Confidences
from vitrail.weights.confidence import Confidence
from vitrail.words import shown

if TYPE_CHECKING:
    from torch import nn

    from vitrail.data.images.ops import ModelInput

FORMAT = "vitrail-card"
VERSION = 1
ORIGIN = "origin"
"""Entry of a card's provenance: the naming of the foreign file that the weights were read from."""
PARENTS = "parents"
"""Entry of a card's provenance: a list of the weights that these were made from by hand, such as by averaging."""
USUAL_THRESHOLD = 0.5
"""Probability from which a label is predicted if no threshold was chosen on validation images."""
KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}


@dataclass(frozen=True)
class Card:
    """Data stored with the weights.

    Raises WeightsError if the number of class names is not that of the classes, and UsageError if images of
    `preprocess.image_size` have too many tokens.
    """

    config: ViTConfig | ResNetConfig
    class_names: list[str] = field(default_factory=list)
    """Name of each output, in order; empty if the classes have no names (yet)."""
    preprocess: Preprocess = None  # type: ignore[assignment]  # depends on the config
    """How an image becomes this model's input, before the normalisation of `config.mean` and `config.std` (default:
    `Preprocess` with the image size of `config`)."""
    source: str = "vitrail"
    """Where the weights come from."""
    licence: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Measured results of these weights, such as {"validation top1": 0.93}."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the weights: run, step, data fingerprint, versions; under "origin" the naming of a foreign file. Of
    weights that were changed by hand: under "parents" the weights they were made from."""
    reference: dict[str, Any] = field(default_factory=dict)
    """Description of a fixed input and the outputs for it, for `vitrail weights verify`; empty if unknown."""
    thresholds: list[float] = field(default_factory=list)
    """For a network that predicts several labels, or none: the probability (sigmoid) from which each class is
    predicted. Empty for a network that predicts one class (softmax), and never empty for one with a single output,
    unless it predicts a number."""
    confidence: Confidence | None = None
    """Temperature of the probabilities, and how often they are wrong on validation images; None if it was never
    measured: the temperature is then 1."""
    scale: TargetScale | None = None
    """For a network that predicts numbers: mean and deviation of each target, by which its outputs are multiples. None
    for a network that predicts classes."""
    answers: list[CardAnswer] = field(default_factory=list)
    """For a network that gives several answers for an image: each of them, in the order of their outputs. Thresholds,
    confidence and scale are then in these."""

    def __post_init__(self) -> None:
        if self.class_names and len(self.class_names) != self.config.classes:
            raise WeightsError(
                f"a card with {len(self.class_names)} class names for a model with {self.config.classes} "
                "classes. Give one name for each class, or none."
            )
        if self.answers and sum(answer.outputs for answer in self.answers) != self.config.classes:
            raise WeightsError(
                f"a card whose answers have {[answer.outputs for answer in self.answers]} outputs for a model with "
                f"{self.config.classes} outputs. Their sum must be that"
            )
        if self.config.classes == 1 and self.scale is None and not self.thresholds and not self.answers:
            # the softmax of one output is 1 for every image; its sigmoid says how probable the class is
            object.__setattr__(self, "thresholds", [USUAL_THRESHOLD])
        if self.thresholds and len(self.thresholds) != self.config.classes:
            raise WeightsError(
                f"a card with {len(self.thresholds)} thresholds for a model with {self.config.classes} classes. Give "
                "one for each class, or none for a model that predicts one class"
            )
        if self.scale is not None and len(self.scale.mean) != self.config.classes:
            raise WeightsError(
                f"a card with the scale of {len(self.scale.mean)} targets for a model with {self.config.classes} "
                "outputs. Give one mean and one deviation for each output"
            )
        if self.preprocess is None:
            object.__setattr__(self, "preprocess", Preprocess(image_size=self.config.image_size))
        bands = self.preprocess.bands
        if bands is not None:
            bands.require_consistent()
            if bands.channels != self.config.channels:
                raise WeightsError(
                    f"a card with statistics of {bands.channels} bands for a model of {self.config.channels} channels. "
                    "Give one mean, std, low and high for each channel"
                )
        if isinstance(self.config, ViTConfig):
            self.config.check_tokens(self.preprocess.image_size)

    @property
    def task(self) -> Literal["classes", "labels", "numbers", "segmentation", "answers"]:
        """What the network predicts for an image (`vitrail.tasks`): one class, several labels, numbers, a mask, or
        several answers of the first three kinds."""
        if isinstance(self.config, ViTConfig) and self.config.segmentation:
            return "segmentation"
        if self.answers:
            return "answers"
        return "numbers" if self.scale is not None else "labels" if self.thresholds else "classes"

    @property
    def several(self) -> bool:
        """Whether the network predicts several labels for an image, or none."""
        return bool(self.thresholds)

    @property
    def temperature(self) -> float:
        """By what logits are divided before they become probabilities."""
        return 1.0 if self.confidence is None else self.confidence.temperature

    def of_answers(self) -> dict[str, tuple[slice, Card]]:
        """Return for each of `answers`: its name -> its outputs, and the card of a network with this answer alone."""
        found, end = {}, 0
        for answer in self.answers:
            outputs, end = slice(end, end + answer.outputs), end + answer.outputs
            names = [name.removeprefix(f"{answer.name}{BETWEEN}") for name in self.class_names[outputs]]
            about: dict[str, Any] = {"thresholds": list(answer.thresholds), "confidence": answer.confidence}
            config = replace(self.config, classes=answer.outputs)
            about |= {"config": config, "class_names": names, "scale": answer.scale, "answers": []}
            found[answer.name] = outputs, replace(self, **about)
        return found

    def with_answers(self, cards: Mapping[str, Card]) -> Card:
        """Return the card with the thresholds and the confidence of each answer from its own card."""
        each = [(answer, cards.get(answer.name)) for answer in self.answers]
        answers = [
            answer if own is None else replace(answer, thresholds=tuple(own.thresholds), confidence=own.confidence)
            for answer, own in each
        ]
        return replace(self, answers=answers)

    def unchosen(self) -> Card:
        """Return the card without thresholds of labels, which are then chosen on the images that are measured."""
        return replace(self, thresholds=[], answers=[replace(answer, thresholds=()) for answer in self.answers])

    def unmeasured(self) -> Card:
        """Return the card without what was measured on these weights: metrics, temperature, thresholds, provenance.

        A network that predicts several labels gets the usual threshold for each. The provenance becomes a parent
        (`PARENTS`), unless parents are named already; the naming of a foreign file stays.
        """
        kept = {name: self.provenance[name] for name in (ORIGIN, PARENTS) if name in self.provenance}
        if own := {name: value for name, value in self.provenance.items() if name not in kept}:
            kept.setdefault(PARENTS, [own])
        thresholds = [USUAL_THRESHOLD] * len(self.thresholds)
        card = self.with_answers({name: one.unmeasured() for name, (_, one) in self.of_answers().items()})
        return replace(card, metrics={}, provenance=kept, thresholds=thresholds, confidence=None, reference={})

    def with_new_outputs(self, **changes: Any) -> Card:
        """Return the card `unmeasured`, with `changes`, for a new classifier: nothing says what its outputs are."""
        unknown: dict[str, Any] = {"class_names": [], "thresholds": [], "scale": None, "answers": []}
        return replace(self.unmeasured(), **unknown, **changes)

    def resampled(self) -> Card:
        """Return the card for images of another size: `unmeasured`, but for the temperature and the thresholds."""
        card = self.unmeasured().with_answers({name: one for name, (_, one) in self.of_answers().items()})
        return replace(card, thresholds=self.thresholds, confidence=self.confidence)

    def with_confidence(self, confidence: Confidence | Confidences | None) -> Card:
        """Return the card with another confidence, or without one; thresholds stay those of equal logits.

        Of several answers each has its own.
        """
        if self.answers or isinstance(confidence, Confidences):
            found = confidence if isinstance(confidence, Confidences) else {}
            each = {name: one.with_confidence(found.get(name)) for name, (_, one) in self.of_answers().items()}
            return self.with_answers(each)
        changed = replace(self, confidence=confidence)
        scale = self.temperature / changed.temperature
        return replace(changed, thresholds=[_scaled(value, scale) for value in self.thresholds])

    @property
    def input_type(self) -> Literal["uint8", "float32"]:
        """Type of the images that the network is called with: 8-bit RGB, or normalised bands."""
        return "uint8" if self.preprocess.bands is None else "float32"

    @property
    def resize_mode(self) -> str:
        """How positions are resampled to another resolution (`vitrail.model.resize`)."""
        return self.config.origin.resize_mode if isinstance(self.config, ViTConfig) else "official"

    def transform(self) -> ModelInput:
        """Return the callable that turns an image of Pillow's into this model's input, float32 [3, height, width].

        It is what `predict` does, normalisation included, for `ImageFolder(transform=...)` and the like. Raises
        UsageError for a model of other than 3 channels.
        """
        from vitrail.data.images.ops import ModelInput
        from vitrail.model.stem import Normalise

        if self.config.channels != 3 or self.preprocess.bands is not None:
            own = "" if self.preprocess.bands is None else ", with their own depth and statistics"
            raise UsageError(
                f"an image of Pillow's becomes RGB, 3 channels, and this model has {self.config.channels}{own}: make "
                "its input tensors yourself"
            )
        return ModelInput(self.preprocess, Normalise(self.config.mean, self.config.std))

    def to_dict(self) -> dict[str, Any]:
        """Return the card as JSON values; numbers that are not finite become null."""
        kind = next(name for name, config in KINDS.items() if isinstance(self.config, config))
        values = _plain(plain(self))
        values["config"] |= values["config"].pop("origin", {})  # as earlier versions write and read it
        if not self.several:
            del values["thresholds"]  # so that earlier versions read the card
        if not values["config"].get("segmentation"):
            values["config"].pop("segmentation", None)
        if values["config"].get("segmentation") != "queries":
            values["config"].pop("queries", None)
            values["config"].pop("query_blocks", None)
        if self.confidence is None:
            del values["confidence"]
        if self.scale is None:
            del values["scale"]
        if not self.answers:
            del values["answers"]
        if self.preprocess.bands is None:
            del values["preprocess"]["bands"]
        return {"format": FORMAT, "version": VERSION, "kind": kind, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Card:
        """Read what `to_dict` wrote. Raises WeightsError naming the wrong entry."""
        values = dict(values) if isinstance(values, Mapping) else {}
        if values.pop("format", None) != FORMAT:
            raise WeightsError(f'this is not a vitrail model card: it lacks "format": "{FORMAT}"')
        if (version := values.pop("version", None)) != VERSION:
            raise WeightsError(f"the model card has version {shown(version)}; this vitrail reads version {VERSION}")
        if not isinstance(kind := values.pop("kind", None), str) or kind not in KINDS:
            raise WeightsError(f"the model card is for a {shown(kind)}; valid kinds: {', '.join(KINDS)}")
        try:
            config = _config(KINDS[kind](), values.pop("config", {}))
            preprocess = merge(Preprocess(), values.pop("preprocess", {}), "preprocess")
            found = values.pop("confidence", None)
            confidence = None if found is None else merge(Confidence(), found, "confidence")
            of = values.pop("scale", None)
            scale = None if of is None else merge(TargetScale(), of, "scale")
            each = values.pop("answers", [])
            if not isinstance(each, list):
                raise UsageError(f"answers: expected a list of objects, got {shown(each)}")
            answers = [merge(CardAnswer(), one, f"answers.{number}") for number, one in enumerate(each)]
            about: dict[str, Any] = {"confidence": confidence, "scale": scale, "answers": answers}
            return cls(config, preprocess=preprocess, **about, **_checked(values))
        except UsageError as error:  # in a file rather than in a flag
            raise WeightsError(f"the model card does not describe a model: {error}") from error


def _config(default: ViTConfig | ResNetConfig, values: Any) -> ViTConfig | ResNetConfig:
    """Return the config of a card, whose entries of `Origin` stand beside the others. Raises UsageError."""
    if isinstance(default, ResNetConfig) or not isinstance(values, Mapping):
        return merge(default, values, "config")
    own = {name: value for name, value in values.items() if name in ORIGIN_FIELDS}
    config = merge(default, {name: value for name, value in values.items() if name not in own}, "config")
    return replace(config, origin=merge(config.origin, own, "config"))


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return the other entries of a card after checking names and types. Raises UsageError naming a wrong one."""
    hints = field_types(Card)
    for name, value in values.items():
        if name not in hints:
            raise UsageError(f"unknown entry {shown(name)}.{did_you_mean(name, hints)} Valid: {', '.join(hints)}")
        kind = get_origin(hints[name]) or hints[name]
        if not isinstance(value, kind):
            raise UsageError(f"{name}: expected {_JSON.get(kind, kind.__name__)}, got {shown(value)}")
    for number, name in enumerate(values.get("class_names", [])):
        if not isinstance(name, str):
            raise UsageError(f"class_names: expected text for class {number}, got {shown(name)}")
    for number, value in enumerate(values.get("thresholds", [])):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise UsageError(f"thresholds: expected a number from 0 to 1 for class {number}, got {shown(value)}")
    return values


def _scaled(probability: float, scale: float) -> float:
    """Return the probability (sigmoid) of a logit that is multiplied by `scale`."""
    if not 0 < probability < 1 or scale == 1:
        return probability
    logit = scale * math.log(probability / (1 - probability))
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


_JSON = {list: "a list of names", dict: "an object", str: "text"}


def _plain(value: Any) -> Any:
    """Return `value` as JSON values: lists for tuples, None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_SIZES = ("width", "depth", "heads", "mlp_dim", "patch")
_FIXED = (*_SIZES, "stem", "stem_units", "stem_width", "block", "branches", "axial", "units")
"""Fields that a name of the papers determines."""
_ELSEWHERE = ("image_size", "channels", "classes", "mean", "std", "resize_mode", "drop_path_shape", "std_conv", "init")
"""Fields that are described separately, or that are not part of the architecture."""


def architecture(config: ViTConfig | ResNetConfig) -> str:
    """Return "ViT B/16 (width 768, depth 12, 12 heads, MLP 3072, patch 16), 224 x 224 pixels, 1000 classes"."""
    name = _name(config)
    height, width = config.image_size
    size = f"{height} x {width} pixels" + (f", {config.classes} classes" if config.classes else ", no classifier")
    if isinstance(config, ResNetConfig):
        stages = "-".join(map(str, config.units))
        return f"{f'ResNet {name}'.strip()} (stages {stages}, width {config.width}), {size}"
    heads = f"{config.heads} heads" if config.heads > 1 else "1 head"
    shape = f"width {config.width}, depth {config.depth}, {heads}, MLP {config.mlp_dim}, patch {config.patch}"
    said = (*_ELSEWHERE, *(_FIXED if name else _SIZES))
    default = flat(ViTConfig())
    other = [
        f"{field} {value}" for field, value in flat(config).items() if field not in said and value != default[field]
    ]
    return ", ".join([f"{f'ViT {name}'.strip()} ({shape})", size, *other])


def parameters(model: nn.Module) -> int:
    """Return the number of a network's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _name(config: ViTConfig | ResNetConfig) -> str:
    """Return the papers' name of a network with these sizes, "" if it has none."""
    for name in NAMES:
        known = variant(name)
        if type(known) is type(config):
            same = {part: getattr(known, part) for part in _FIXED if hasattr(known, part)}
            if all(getattr(config, part) == value for part, value in same.items()):
                return name
    return ""
