"""What a model is, as values: `ViTConfig`, `ResNetConfig` and the names the papers give them. Torch-free.

`variant("B/16")` reads the paper's own strings (Table 1 and section 4.1):

| name | meaning |
|---|---|
| `Ti/16 S/16 B/32 L/16 H/14 g/14 G/14` | size and patch; any patch |
| `S36x1/16`, `S18x2/16` | depth x parallel branches: 36 blocks in a row, or 18 of two branches (follow-up, section 3) |
| `R50+B/16`, `R50+L/32`, `R26+S/32`, `R+Ti/16` | ResNet stem; the number is the total down-sampling ratio |
| `axial-B/16` | row attention + MLP, column attention + MLP (appendix D.6) |
| `R50x1 ... R152x4, R200x3` | BiT: depth x width multiplier; `axial-R50` is AxialResNet50 |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from vitrail.errors import UsageError, did_you_mean

Stem = Literal["linear", "levit", "early", "hmlp", "resnet"]
Positions = Literal["none", "1d", "2d", "relative", "sincos", "relative_bias"]
Place = Literal["input", "every", "shared"]
Pool = Literal["cls", "gap", "map", "cls+gap"]
ResizeMode = Literal["official", "timm", "hf", "deit", "torchvision"]
StdConv = Literal["hybrid", "bit", "timm"]


@dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer (paper, section 3.1), complete: two equal configs build the same network.

    Sizes are in pixels (image_size, patch) or features (width, mlp_dim, pre_logits). Raises UsageError where
    the values contradict each other.
    """

    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    patch: int = 16
    """Total down-sampling ratio of the stem: one token covers patch x patch pixels."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width the learned positions are for; other sizes are resampled at run time."""
    channels: int = 3
    classes: int = 1000
    """0 builds no classifier: the model returns pooled features."""
    stem: Stem = "linear"
    stem_norm: Literal["batch", "layer"] = "batch"
    """Normalisation inside the levit, early and hmlp stems."""
    stem_units: tuple[int, ...] = ()
    """Hybrid only: bottleneck units in each ResNet stage, (3, 4, 9) for R50+B/16; () is the root alone."""
    std_conv: StdConv = "hybrid"
    """Hybrid only: how kernels are standardised (`vitrail.model.resnet.stdconv`); each weight source has its own."""
    group_norm_eps: float = 1e-6
    """Hybrid only."""
    block: Literal["sequential", "parallel", "axial"] = "sequential"
    branches: int = 1
    """Parallel only: attentions (and MLPs) side by side in each block."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """swiglu: silu(gate) * value (DINOv2's giant); mlp_dim features are left after the product."""
    positions: Positions = "1d"
    place: Place = "input"
    resize_mode: ResizeMode = "official"
    """How positions are resampled to another grid (`vitrail.model.resize`); each weight source has its own."""
    cls_position: bool = True
    """Do class and distillation token have position embeddings of their own? (DeiT-III and big_vision: no.)"""
    register_positions: bool = False
    """Do registers have position embeddings of their own?"""
    pool: Pool = "cls"
    class_token: bool | None = None
    """None: where the pool reads it. True keeps one that it does not read (BEiT, MAE: pool 'gap')."""
    distilled: bool = False
    """A distillation token with a classifier of its own, averaged with the class token's (DeiT, section 4)."""
    registers: int = 0
    final_norm: Literal["tokens", "pooled"] = "tokens"
    """Where Eq. 4's LayerNorm is: on all tokens, or on the pooled features (BEiT, MAE fine-tuned)."""
    pre_logits: int | None = None
    """Width of the tanh hidden layer before the classifier (section 3.1, pre-training only)."""
    dropout: float = 0.0
    drop_path: float = 0.0
    """Stochastic depth: the rate of the last block; the rates rise linearly from 0."""
    drop_path_shape: Literal["linear", "constant"] = "linear"
    layer_scale: float | None = None
    """Initial value of LayerScale; None leaves it out."""
    norm_eps: float = 1e-6
    gelu: Literal["erf", "tanh"] = "erf"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Of pixels scaled to [0, 1]; used where the model is handed uint8 images."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        for name in ("image_size", "stem_units", "mean", "std"):  # YAML and JSON give lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("mean", "std"):  # one value for every channel is enough
            value = getattr(self, name)
            if len(value) != self.channels:
                if len(set(value)) > 1:
                    raise UsageError(f"{name} has {len(value)} values for {self.channels} channels")
                object.__setattr__(self, name, (value[0],) * self.channels)
        self._check()

    def _check(self) -> None:
        height, width = self.image_size
        if height % self.patch or width % self.patch:
            raise UsageError(f"image size {height}x{width} is not divisible by the patch, {self.patch} px")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.block == "axial" and self.prefix:
            raise UsageError(
                "axial blocks attend along rows and columns of the grid, where a class token or a register has "
                "no place: use pool 'gap' or 'map' and 0 registers"
            )
        if (self.branches > 1) != (self.block == "parallel"):
            raise UsageError(f"{self.branches} branches do not go with {self.block} blocks")
        if self.positions in ("2d", "sincos") and self.width % 4:
            raise UsageError(f"{self.positions} positions need a width divisible by 4, got {self.width}")
        self._check_prefix()

    def _check_prefix(self) -> None:
        """Do the tokens in front of the grid, what is read of them, and their positions go together?"""
        if self.class_token is False and self.pool in ("cls", "cls+gap"):
            raise UsageError(
                f"pool {self.pool!r} reads the class token, so class_token cannot be false: use pool 'gap' or 'map'"
            )
        if self.distilled and (self.pool != "cls" or self.pre_logits):
            raise UsageError(
                "a distilled model has one classifier on its class token and one on its distillation token: "
                f"use pool 'cls' and no pre_logits, not pool {self.pool!r} and pre_logits {self.pre_logits}"
            )
        if self.positions == "relative_bias" and self.prefix > self.has_class_token:
            raise UsageError(
                "relative_bias positions have a place for the grid and a class token only: "
                "use 0 registers and no distillation token"
            )
        if self.register_positions and self.positions not in ("1d", "2d"):
            raise UsageError(
                f"register_positions are rows of a learned table, which {self.positions} positions do not have: "
                "use positions '1d' or '2d'"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens at `image_size`."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def has_class_token(self) -> bool:
        """Is there a class token, read by the pool or not?"""
        return self.pool in ("cls", "cls+gap") if self.class_token is None else self.class_token

    @property
    def prefix(self) -> int:
        """Tokens in front of the grid's: class token, distillation token, registers, in this order."""
        return self.has_class_token + self.distilled + self.registers

    @property
    def front(self) -> int:
        """How many of the prefix have a row in a learned table of positions."""
        tokens = (self.has_class_token + self.distilled) * self.cls_position
        return tokens + self.registers * self.register_positions

    @property
    def pooled(self) -> int:
        """Features that the pool makes of an image."""
        return self.width * (2 if self.distilled or self.pool == "cls+gap" else 1)

    @property
    def features(self) -> int:
        """Features of an image that a model without classifier returns."""
        return self.pre_logits or self.pooled

    @property
    def head_width(self) -> int:
        """Features that each classifier sees."""
        return self.features // (1 + self.distilled)


@dataclass(frozen=True)
class ResNetConfig:
    """BiT ResNetV2 (weight-standardised convolutions, GroupNorm), or AxialResNet where `axial` (D.6)."""

    units: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    """Features of the root; stage s has width * 4 * 2**s."""
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    axial: bool = False
    """Replace each 3x3 convolution by row and column attention with relative positions."""
    std_conv: StdConv = "bit"
    """How kernels are standardised (`vitrail.model.resnet.stdconv`); each weight source has its own."""
    group_norm_eps: float = 1e-5
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        for name in ("units", "image_size", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def features(self) -> int:
        """Features of an image, those of the last stage."""
        return self.width * 4 * 2 ** (len(self.units) - 1)


# name: width, depth, heads, mlp_dim. B, L, H: paper Table 1; Ti, S: DeiT; g, G: "Scaling Vision Transformers"
SIZES: dict[str, tuple[int, int, int, int]] = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
}

# units per stage of the ResNet in front; /16 moves stage 4's units into stage 3 (section 4.1, option ii)
HYBRIDS: dict[tuple[str, int], tuple[int, ...]] = {
    ("R50", 32): (3, 4, 6, 3),
    ("R50", 16): (3, 4, 9),
    ("R26", 32): (2, 2, 2, 2),
    ("R26", 16): (2, 2, 4),
}

BIT_UNITS: dict[int, tuple[int, ...]] = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

NAMES: tuple[str, ...] = (
    *("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14", "g/14", "G/14"),
    *("R+Ti/16", "R26+S/32", "R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"),
    *("R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3"),
    *("S36x1/16", "S18x2/16", "B36x1/16", "B18x2/16", "axial-B/32", "axial-B/16", "axial-R50"),
)
"""The names with a pinned parameter count; `variant` also reads any other combination of their parts."""

_VIT = re.compile(
    r"(?P<axial>axial-)?(?:(?P<resnet>R\d*)\+)?(?P<size>[A-Za-z]+?)(?:(?P<depth>\d+)x(?P<branches>\d+))?/(?P<patch>\d+)"
)
_RESNET = re.compile(r"(?P<axial>axial-)?R(?P<depth>\d+)(?:x(?P<width>\d+))?")


def variant(name: str, **overrides: Any) -> ViTConfig | ResNetConfig:
    """Return the config of a model by the papers' name, with any field overridden.

    `variant("B/16", classes=10, image_size=384)`. A patch that does not divide 224 gets the nearest smaller
    image size it does divide. Raises UsageError with the nearest valid name.
    """
    if match := _VIT.fullmatch(name):
        config = _vit(name, match, overrides)
        return config
    if match := _RESNET.fullmatch(name):
        units = BIT_UNITS.get(int(match["depth"]))
        if units and not (match["axial"] and match["depth"] != "50"):
            base = ResNetConfig(units=units, width=64 * int(match["width"] or 1), axial=bool(match["axial"]))
            return replace(base, **_known(ResNetConfig, name, overrides))
    raise UsageError(f"no model is named {name!r}.{did_you_mean(name, NAMES)} Valid: {', '.join(NAMES)}")


def _vit(name: str, match: re.Match[str], overrides: dict[str, Any]) -> ViTConfig:
    if match["size"] not in SIZES:
        raise UsageError(f"no size {match['size']!r} in {name!r}; valid sizes: {', '.join(SIZES)}")
    width, depth, heads, mlp_dim = SIZES[match["size"]]
    patch = int(match["patch"])
    values: dict[str, Any] = dict(width=width, depth=depth, heads=heads, mlp_dim=mlp_dim, patch=patch)
    if match["depth"]:
        branches = int(match["branches"])
        values |= dict(depth=int(match["depth"]), branches=branches)
        values |= dict(block="parallel") if branches > 1 else {}
    if match["axial"]:
        values |= dict(block="axial", pool="gap")
    if match["resnet"]:
        values |= dict(stem="resnet", stem_units=_hybrid_units(name, match["resnet"], patch))
        if match["resnet"] == "R":  # the root alone: 4x, then an 8x8 patch on its map (protocols: really /32)
            values["patch"] = 32
    values |= _known(ViTConfig, name, overrides)
    if "image_size" not in values:
        size = 224 // values["patch"] * values["patch"] or values["patch"]
        values["image_size"] = (size, size)
    return ViTConfig(**values)


def _hybrid_units(name: str, resnet: str, ratio: int) -> tuple[int, ...]:
    if resnet == "R":
        return ()
    if (resnet, ratio) not in HYBRIDS:
        valid = ", ".join(f"{r}+?/{p}" for r, p in HYBRIDS)
        raise UsageError(f"no hybrid stem for {name!r}; valid: {valid} and R+?/16")
    return HYBRIDS[resnet, ratio]


def _known(config: type, name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    valid = [field.name for field in fields(config)]
    for key in overrides:
        if key not in valid:
            raise UsageError(f"{name} has no setting {key!r}.{did_you_mean(key, valid)} Valid: {', '.join(valid)}")
    return overrides
