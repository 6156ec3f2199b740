"""The words and the ranges of the fields of `ViTConfig` and `ResNetConfig`. Torch-free."""

from __future__ import annotations

from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.errors import UsageError, did_you_mean
from vitrail.ranges import (
    DEEPEST,
    Channels,
    Depth,
    DropPath,
    Heads,
    Hidden,
    Range,
    Registers,
    Settings,
    Side,
    Width,
    limits,
    union_members,
)
from vitrail.words import shown

Stem = Literal["linear", "linear+norm", "linear+gelu", "linear+norm+gelu", "levit", "early", "hmlp", "resnet"]
PositionKind = Literal["none", "1d", "2d", "relative", "sincos", "relative_bias"]
PositionPlace = Literal["input", "every", "shared"]
Sines = Literal["moco", "mae"]
Pool = Literal["cls", "gap", "map", "probe", "cls+gap"]
Norm = Literal["layer", "rms"]
QKNormKind = Literal["none", "head", "width"]
ResizeMode = Literal["official", "timm", "hf", "deit", "torchvision", "naflex"]
Gelu = Literal["erf", "tanh", "quick"]
Init = Literal["paper", "deit", "beit", "mae"]
StdConv = Literal["hybrid", "bit", "timm"]
MEANT = {"mean": "gap", "avg": "gap", "token": "cls", "gelu_tanh": "tanh", "rope": "", "silu": "", "relu": ""}
"""Words of other libraries -> ours; "" where the nearest word would be another thing."""
MOST_TOKENS = 65_536
"""Maximum number of tokens in the grid of an image."""
MOST_STAGES = 8
"""Maximum number of stages of a ResNet; the width doubles from one to the next."""


def _ends(hint: Any) -> tuple[float, float]:
    """Return the smallest and the largest number of the one range that a type states."""
    (limit,) = (limit for limit in limits(hint) if isinstance(limit, Range))
    return limit.least, limit.most


RANGES: dict[str, tuple[float, float]] = {
    "width": _ends(Width),
    "depth": _ends(Depth),
    "heads": _ends(Heads),
    "mlp_dim": _ends(Hidden),
    "patch": _ends(Side),
    "image_size": _ends(Side),
    "stem_units": _ends(Depth),
    "stem_width": _ends(Width),
    "branches": _ends(Depth),
    "registers": _ends(Registers),
    "queries": (1, 10_000),
    "query_blocks": _ends(Depth),
    "pre_logits": _ends(Hidden),
    "pool_heads": _ends(Heads),
    "pool_mlp_dim": _ends(Hidden),
    "drop_path": _ends(DropPath),
    "channels": _ends(Channels),
    "classes": (0, 16_777_216),
    "units": (0, DEEPEST),
    "dropout": (0.0, 1.0),  # 1 and the negative values below occur in other libraries' files, but are not settings
    "layer_scale": (-1e6, 1e6),
    "norm_eps": (0.0, 1.0),
    "group_norm_eps": (0.0, 1.0),
    "mean": (-1e6, 1e6),
    "std": (1e-6, 1e6),
}
"""Field of a config -> its smallest and its largest value. Whole numbers stand for fields of whole numbers."""


def check_ranges(config: Any) -> None:
    """Raise UsageError for a number outside of `RANGES`, and for a value that the type of a field does not list.

    Fields are checked whose types are Literal, bool, None and classes of settings. The error names the nearest valid
    value. A tuple is checked number by number. None is valid where it is the default.
    """
    kind: Any = type(config)
    for name, (valid, classes) in _choices(kind).items():
        value = getattr(config, name)
        if (isinstance(value, (str, bool, NoneType)) and value in valid) or isinstance(value, classes):
            continue
        words = [word for word in valid if isinstance(word, str)]
        near = did_you_mean(MEANT.get(str(value), str(value)), words)
        own = [f"your own {each.__name__}" for each in classes]
        raise UsageError(f"{name} is {shown(value)}; valid: {', '.join([*map(repr, valid), *own])}.{near}")
    for name, (low, high) in RANGES.items():
        value = getattr(config, name, None)
        if value is None and getattr(kind, name, None) is None:
            continue
        number_kind: Any = Integral if isinstance(low, int) else Real
        form = "," if number_kind is Integral else "g"
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, number_kind) or isinstance(number, bool) or not low <= number <= high:
                raise UsageError(f"{name} is {shown(number)}; valid: {low:{form}} to {high:{form}}")


@cache
def _choices(kind: Any) -> dict[str, tuple[tuple[Any, ...], tuple[type, ...]]]:
    """Return the valid values and the valid classes of each field whose type lists them."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        allowed = union_members(hint)
        listed = [_LISTED.get(one, get_args(one)) for one in allowed if get_origin(one) is Literal or one in _LISTED]
        classes = tuple(one for one in allowed if isinstance(one, type) and issubclass(one, Settings))
        if listed and len(listed) + len(classes) == len(allowed):
            found[name] = tuple(value for values in listed for value in values), classes
    return found


_LISTED: dict[Any, tuple[Any, ...]] = {bool: (True, False), NoneType: (None,)}
