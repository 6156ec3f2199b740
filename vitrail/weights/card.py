"""`Card`: everything about a set of weights that is not a tensor. Torch-free.

Weight sources differ in LayerNorm epsilon, GELU kind, the way positions are resampled, and preprocessing. The
card stores all of this next to the tensors, so that a loaded model computes what its origin computed. It also stores
the class names, so that classes are known by name wherever the model goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vitrail.config import merge
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError, WeightsError, did_you_mean
from vitrail.model.variants import NAMES, ResNetConfig, ViTConfig, variant

if TYPE_CHECKING:
    from torch import nn

FORMAT = "vitrail-card"
VERSION = 1
KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}


@dataclass(frozen=True)
class Card:
    """Data stored with the weights. Raises WeightsError if the number of class names is not that of the classes."""

    config: ViTConfig | ResNetConfig
    class_names: list[str] = field(default_factory=list)
    """Name of each output, in order; empty if the classes have no names (yet)."""
    preprocess: Preprocess = field(default_factory=Preprocess)
    """How an image becomes this model's input, before the normalisation of `config.mean` and `config.std`."""
    source: str = "vitrail"
    """Where the weights come from."""
    licence: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Measured results of these weights, such as {"validation top1": 0.93}."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the weights: run, step, data fingerprint, versions; under "origin" the naming of a foreign file."""
    reference: dict[str, Any] = field(default_factory=dict)
    """Description of a fixed input and the outputs for it, for `vitrail weights verify`; empty if unknown."""

    def __post_init__(self) -> None:
        if self.class_names and len(self.class_names) != self.config.classes:
            raise WeightsError(
                f"a card with {len(self.class_names)} class names for a model with {self.config.classes} "
                "classes. Give one name for each class, or none."
            )

    @property
    def resize_mode(self) -> str:
        """How positions are resampled to another resolution (`vitrail.model.resize`)."""
        return getattr(self.config, "resize_mode", "official")

    def to_dict(self) -> dict[str, Any]:
        """Return the card as JSON values; numbers that are not finite become null."""
        kind = next(name for name, config in KINDS.items() if isinstance(self.config, config))
        return {"format": FORMAT, "version": VERSION, "kind": kind, **_plain(asdict(self))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Card:
        """Read what `to_dict` wrote. Raises WeightsError naming the wrong entry."""
        values = dict(values) if isinstance(values, Mapping) else {}
        if values.pop("format", None) != FORMAT:
            raise WeightsError(f'this is not a vitrail model card: it lacks "format": "{FORMAT}"')
        if (version := values.pop("version", None)) != VERSION:
            raise WeightsError(f"the model card has version {version}; this vitrail reads version {VERSION}")
        if not isinstance(kind := values.pop("kind", None), str) or kind not in KINDS:
            raise WeightsError(f"the model card is for a {kind!r}; valid kinds: {', '.join(KINDS)}")
        try:
            config = _checked(_build(KINDS[kind], values.pop("config", {}), "config"), "config")
            preprocess = _checked(_build(Preprocess, values.pop("preprocess", {}), "preprocess"), "preprocess")
        except UsageError as error:  # a contradiction between values, in a file rather than in a flag
            raise WeightsError(f"the model card does not describe a model: {error}") from error
        return _build(cls, {**values, "config": config, "preprocess": preprocess}, "the card")


def _build(cls: type, values: Any, where: str) -> Any:
    """Return cls(**values). Raises WeightsError naming an entry that is unknown or of a wrong type."""
    if not isinstance(values, Mapping):
        raise WeightsError(f"{where} of the model card should be a mapping, not {type(values).__name__}")
    valid = [item.name for item in fields(cls)]
    for key in values:
        if key not in valid:
            hint = did_you_mean(key, valid)
            raise WeightsError(f"the model card has an unknown entry {key!r} in {where}.{hint}")
    try:
        return cls(**values)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise WeightsError(f"the model card has a value of the wrong type in {where}: {error}") from error


def _checked(built: Any, where: str) -> Any:
    """Return the dataclass after comparing its values with its annotations. Raises UsageError naming a wrong value."""
    return merge(type(built)(), {item.name: getattr(built, item.name) for item in fields(built)}, where)


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
_FIXED = (*_SIZES, "stem", "stem_units", "block", "branches", "axial", "units")
"""Fields that a name of the papers determines."""
_ELSEWHERE = ("image_size", "channels", "classes", "mean", "std", "resize_mode", "drop_path_shape", "std_conv")
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
    default = ViTConfig()
    other = [
        f"{field.name} {getattr(config, field.name)}"
        for field in fields(config)
        if field.name not in said and getattr(config, field.name) != getattr(default, field.name)
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
