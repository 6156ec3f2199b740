"""The words and the ranges of the fields of `ViTConfig` and `ResNetConfig`. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from vitrail.ranges import DEEPEST, Channels, Depth, DropPath, Heads, Hidden, Registers, Side, Width, check_values, ends

Stem = Literal["linear", "linear+norm", "linear+gelu", "linear+norm+gelu", "levit", "early", "hmlp", "resnet"]
PositionKind = Literal["none", "1d", "2d", "relative", "sincos", "relative_bias"]
PositionPlace = Literal["input", "every", "shared"]
Sines = Literal["moco", "mae"]
Pool = Literal["cls", "gap", "map", "probe", "cls+gap"]
Norm = Literal["layer", "rms"]
QKNormKind = Literal["none", "head", "width"]
ResizeMode = Literal["official", "timm", "hf", "deit", "torchvision", "naflex"]
Gelu = Literal["erf", "tanh", "quick"]
StdConv = Literal["hybrid", "bit", "timm"]
MEANT = {"mean": "gap", "avg": "gap", "token": "cls", "gelu_tanh": "tanh", "rope": "", "silu": "", "relu": ""}
"""Words of other libraries -> ours; "" where the nearest word would be another thing."""
MOST_TOKENS = 65_536
"""Maximum number of tokens in the grid of an image."""
MOST_STAGES = 8
"""Maximum number of stages of a ResNet; the width doubles from one to the next."""
RANGES: dict[str, tuple[float, float]] = {
    "width": ends(Width),
    "depth": ends(Depth),
    "heads": ends(Heads),
    "mlp_dim": ends(Hidden),
    "patch": ends(Side),
    "image_size": ends(Side),
    "stem_units": ends(Depth),
    "stem_width": ends(Width),
    "branches": ends(Depth),
    "registers": ends(Registers),
    "pre_logits": ends(Hidden),
    "pool_heads": ends(Heads),
    "pool_mlp_dim": ends(Hidden),
    "drop_path": ends(DropPath),
    "channels": ends(Channels),
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
    """Raise UsageError for a number outside of `RANGES`, and for a word that the type of a field does not list."""
    check_values(config, RANGES, MEANT)
