"""Models as values: `ViTConfig`, `ResNetConfig` and their names, which are the papers' where they have one. Torch-free.

`variant("B/16")` reads the paper's own strings (Table 1 and section 4.1):

| name | meaning |
|---|---|
| `Ti/16 S/16 B/32 L/16 H/14 g/14 G/14` | size and patch; any patch |
| `S36x1/16`, `S18x2/16` | depth x branches: 36 sequential blocks, or 18 blocks of two branches (follow-up, section 3) |
| `R50+B/16`, `R50+L/32`, `R26+S/32`, `R+Ti/16` | ResNet stem; the number is the total down-sampling ratio |
| `axial-B/16` | row attention + MLP, column attention + MLP (appendix D.6) |
| `b/32` | the half-width B/32 of Figure 4, which is S/32 |
| `R50x1 ... R152x4, R200x3` | BiT: depth x width multiplier; `axial-R50` is AxialResNet50 |
| `smoke/2 digits/4 small/4 small/8 narrow/4` | networks of vitrail's own recipes (`OWN`); any patch |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, TypeVar

from vitrail.errors import UsageError, did_you_mean
from vitrail.model.limits import (
    MOST_STAGES,
    MOST_TOKENS,
    Gelu,
    Init,
    Norm,
    Pool,
    PositionKind,
    PositionPlace,
    QKNormKind,
    ResizeMode,
    Sines,
    StdConv,
    Stem,
    check_ranges,
)
from vitrail.model.own_part import OwnPart
from vitrail.ranges import DEEPEST, Finite, Positive, Settings


@dataclass(frozen=True)
class Rotary(Settings, section="rotary"):
    """How queries and keys of the grid's tokens are rotated by their place; tokens in front of the grid are not.

    | model | settings |
    |---|---|
    | EVA-02 | `Rotary(reference=(16, 16))` |
    | DINOv3 | `Rotary(base=100, coordinates="centred", pairs="halves")` |
    | RoPE-ViT (timm's `vit_*_rope_224`) | `Rotary(base=100, first="column")` |
    | RoPE-ViT, mixed | `Rotary(frequencies="mixed", base=10, first="column")` |
    | Perception Encoder | `Rotary(reference=(24, 24), offset=1, first="column")` |

    A head of d features has d / 2 pairs of features. Pair i of one coordinate, i < d / 4, is rotated by the angle
    coordinate * base^(-4 i / d). Raises UsageError for values that contradict each other.
    """

    frequencies: Literal["axial", "mixed"] = "axial"
    """axial: half of the pairs are rotated by the row, half by the column. mixed: each pair of each head and layer has
    two learned frequencies, one for the row and one for the column (Heo et al. 2024, "Rotary Position Embedding for
    Vision Transformer")."""
    base: Positive = 10_000.0
    """Base of the frequencies: 10,000 in language models and EVA-02, 100 in DINOv3. Mixed: of the initial ones."""
    coordinates: Literal["index", "centred"] = "index"
    """index: the number of the row and of the column. centred: the centre of a patch, from -1 to 1 over the image,
    times 2 pi (DINOv3)."""
    offset: Finite = 0.0
    """Added to the numbers of rows and columns. It is 1 in the Perception Encoders with a class token."""
    reference: tuple[int, int] | None = None
    """Rows and columns of the grid to which the numbers are scaled, so that images of any size span the same angles
    (EVA-02). None: they are not scaled."""
    first: Literal["row", "column"] = "row"
    """The coordinate that rotates the first half of the pairs."""
    pairs: Literal["neighbours", "halves"] = "neighbours"
    """Features 2 i and 2 i + 1 are a pair, or features i and i + d / 2 (DINOv3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is not None and not all(type(side) is int and side > 0 for side in self.reference):
            raise UsageError(f"rotary.reference is {self.reference}; valid: rows and columns of a grid")
        if self.reference and self.coordinates == "centred":
            raise UsageError("rotary.reference scales numbers of rows and columns; centred coordinates have no scale")
        if self.frequencies == "mixed" and (self.coordinates, self.offset, self.reference) != ("index", 0.0, None):
            raise UsageError("mixed rotary frequencies go with coordinates 'index', offset 0 and no reference only")

    def __str__(self) -> str:
        parts = [
            f"base {self.base:g}",
            f"{self.coordinates} coordinates",
            f"{self.first} first",
            f"{self.pairs} paired",
        ]
        parts += [f"offset {self.offset:g}"] if self.offset else []
        parts += [f"for a grid of {self.reference[0]} x {self.reference[1]}"] if self.reference else []
        return f"{self.frequencies} ({', '.join(parts)})"


@dataclass(frozen=True)
class Origin:
    """What differs from the paper's network in weights of other origins: no flag, recipe or study sets these fields.

    Raises UsageError for values outside of `vitrail.model.limits.RANGES`, and for values that contradict each other.
    """

    mlp: Literal["gelu", "swiglu"] = "gelu"
    """swiglu: silu(gate) * value (DINOv2's giant), where mlp_dim is the number of features after the product."""
    mlp_norm: bool = False  # SwiGLU only: a LayerNorm after the product (EVA-02, B and L)
    attention_norm: bool = False  # a LayerNorm before the output projection of the attention (EVA-02-CLIP)
    qk_norm: QKNormKind = "none"
    """Norms of queries and keys before their product (Dehghani et al. 2023, section 2.1), over the features of each
    head, or over the whole width (InternViT 6B)."""
    key_bias: bool = True
    """Whether keys have a bias. With rotary positions it matters: EVA-02 and DINOv3 have none."""
    rotary: Rotary | None = None
    """Rotary positions, alone (DINOv3: with positions "none") or beside the others (EVA-02). None: no rotary ones."""
    sines: Sines = "moco"
    """Frequencies of sincos positions, 1 to 1/10000: with the last (MoCo v3, big_vision), or without (MAE, AIMv2)."""
    resize_mode: ResizeMode = "official"
    """How positions are resampled to another grid (`vitrail.model.resize`). It depends on the weights' source."""
    register_positions: bool = False  # whether registers have position embeddings
    pool_heads: int | None = None  # pools 'map' and 'probe' only: number of heads of the probe (default: heads)
    pool_mlp_dim: int | None = None  # pool 'map' only: hidden width of its MLP (default: mlp_dim)
    pool_prefix: bool = False
    """Whether pool 'map' or 'probe' also reads the tokens in front of the grid (Perception Encoder)."""
    class_token: bool | None = None
    """Whether there is a class token. None: if the pool reads it. BEiT and MAE have one with pool 'gap', too."""
    distilled: bool = False
    """Whether there is a distillation token. Its classifier is averaged with the class token's (DeiT, section 4)."""
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    """Where Eq. 4's LayerNorm is applied: to all tokens, to the pooled features (BEiT and MAE, fine-tuned), or nowhere
    (InternViT)."""
    norm_after: bool = False
    """Whether the norms of a block come behind attention and MLP, before the addition (Swin V2, timm's rpn)."""
    pre_norm: bool = False
    """Whether a LayerNorm of its own stands before the first block (CLIP, Radford et al. 2021)."""
    norm_eps: float = 1e-6
    norm: Norm = "layer"
    """Kind of all norms. rms: RMSNorm, without mean and shift (Zhang and Sennrich 2019; AIMv2, InternViT 6B)."""
    patch_norm: bool = False  # a norm of the patch embeddings, before positions (AIMv2)
    gelu: Gelu = "erf"
    """quick: x * sigmoid(1.702 x), CLIP's approximation (Hendrycks and Gimpel 2016, section 2)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.mlp_norm and self.mlp != "swiglu":
            raise UsageError(f"mlp_norm is the norm of gated MLPs: use mlp 'swiglu', not {self.mlp!r}")


ORIGIN_FIELDS = frozenset(item.name for item in fields(Origin))
"""Names of the fields of `Origin`."""


NATIVE_POSITIONS = ("none", "1d", "2d", "sincos")
"""Kinds of positions that can differ from image to image."""


@dataclass(frozen=True)
class ViTConfig:
    """A complete Vision Transformer (paper, section 3.1): two equal configs build the same network.

    Sizes are in pixels (image_size, patch) or features (width, mlp_dim, pre_logits). Raises UsageError for values
    outside of `vitrail.model.limits.RANGES`, and for values that contradict each other.
    """

    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    patch: int = 16
    """Total down-sampling ratio of the stem: one token covers patch x patch pixels."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width for which positions are learned. For other sizes they are resampled at run time."""
    channels: int = 3
    classes: int = 1000
    """Number of classes. With 0 there is no classifier, and the model returns pooled features."""
    stem: Stem | OwnPart = "linear"
    stem_norm: Literal["batch", "layer"] = "batch"
    """Normalisation inside the linear+norm, levit, early and hmlp stems."""
    stem_units: tuple[int, ...] = ()
    """Hybrid only: number of bottlenecks in each ResNet stage, (3, 4, 9) for R50+B/16; () is the root alone."""
    stem_width: int = 64  # hybrid only: features of the ResNet's root, 64 * width_factor
    std_conv: StdConv = "hybrid"
    """Hybrid only: how kernels are standardised (`vitrail.model.stdconv`). It depends on the weights' source."""
    group_norm_eps: float = 1e-6  # hybrid only
    block: Literal["sequential", "parallel", "axial"] = "sequential"
    branches: int = 1
    """Parallel only: number of parallel attentions, and of parallel MLPs, in each block."""
    attention: OwnPart | None = None  # of the user's own; None: multi-head self-attention
    positions: PositionKind | OwnPart = "1d"
    place: PositionPlace = "input"
    cls_position: bool = True
    """Whether class and distillation token have position embeddings. In DeiT-III and big_vision they have none."""
    pool: Pool = "cls"
    """map: attention pooling with an MLP (Scaling Vision Transformers). probe: attention pooling without an MLP, whose
    query is the probe itself (AIMv2)."""
    registers: int = 0
    head: OwnPart | None = None  # of the user's own; None: a linear layer
    segmentation: Literal["", "linear", "layers", "queries"] = ""
    """Kind of the head that tells the class of each patch (`vitrail.model.segmentation`); "": the class of an image."""
    queries: int = 100
    """Segmentation queries only: number of queries (`vitrail.model.queries`), and of the last blocks that have them."""
    query_blocks: int = 4
    pre_logits: int | None = None
    """Width of the tanh hidden layer before the classifier (section 3.1, pre-training only)."""
    dropout: float = 0.0
    drop_path: float = 0.0
    """Stochastic depth: the rate of the last block; the rates rise linearly from 0."""
    drop_path_shape: Literal["linear", "constant"] = "linear"
    layer_scale: float | None = None  # initial value; None means no LayerScale
    native: bool = False
    """Whether the network also takes strips, which hold images of any shape (`vitrail.strip`)."""
    init: Init = "paper"
    """Whose code draws the initial weights (`vitrail.model.init.init_weights`)."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean and standard deviation of pixels in [0, 1], for uint8 images. One value may stand for all channels."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    origin: Origin = Origin()
    """Fields that only weights of other origins need. Files hold them beside the others (`flat`)."""

    @classmethod
    def of(cls, **values: Any) -> ViTConfig:
        """Return the config with these values, those of `Origin` by their names, too."""
        return cls().changed(**values)

    def changed(self, **values: Any) -> ViTConfig:
        """Return the config with other values, those of `Origin` by their names, too."""
        own = {name: values.pop(name) for name in ORIGIN_FIELDS & values.keys()}
        return replace(self, origin=replace(values.pop("origin", self.origin), **own), **values)

    def __post_init__(self) -> None:
        _set_tuples(self, "stem_units")
        check_ranges(self)
        _set_statistics(self)
        _check_depth(self.depth * self.branches + sum(self.stem_units), len(self.stem_units))
        self._check()

    def _check(self) -> None:
        height, width = self.image_size
        if height % self.patch or width % self.patch:
            raise UsageError(f"image size {height}x{width} is not divisible by the patch, {self.patch} px")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not divisible by {self.heads} heads")
        self.check_tokens(self.image_size)
        if self.block == "axial" and self.prefix:
            raise UsageError(
                "axial blocks attend along rows and columns of the grid, where a class token or a register has "
                "no place: use pool 'gap' or 'map' and 0 registers"
            )
        if (self.branches > 1) != (self.block == "parallel"):
            raise UsageError(f"{self.branches} branches do not go with {self.block} blocks")
        if self.positions in ("2d", "sincos") and self.width % 4:
            raise UsageError(f"{self.positions} positions need a width divisible by 4, not {self.width}")
        if self.origin.rotary and (features := self.width // self.heads) % 4:
            raise UsageError(f"rotary positions need heads with a multiple of 4 features, not {features}")
        if self.width % (self.origin.pool_heads or 1):
            raise UsageError(f"width {self.width} is not divisible by {self.origin.pool_heads} heads of the pool")
        self._check_prefix()
        if self.segmentation and (self.native or self.head or self.origin.distilled or self.pre_logits):
            raise UsageError(
                "a head for the classes of pixels goes with no classifier of the user's own, no pre_logits, no "
                "distillation token, and no strips of patches (preprocess.resize native)"
            )
        if self.segmentation == "queries" and (self.block == "axial" or self.attention):
            raise UsageError(
                "segmentation 'queries' adds tokens behind the grid's, which axial blocks and an attention of your own "
                "do not have. Use 'layers' or 'linear'"
            )
        if self.native:
            self._check_native()

    def _check_native(self) -> None:
        """Check that nothing but attention mixes tokens, and that positions can differ from image to image."""
        wrong = {
            f"the stem linear, and this network has {self.stem}": self.stem != "linear",
            f"sequential or parallel blocks, and this network has {self.block} ones": self.block == "axial",
            "vitrail's own attention, and this network has another": self.attention,
            f"positions of kind {', '.join(NATIVE_POSITIONS)}, and this network has {self.positions}": self.positions
            not in NATIVE_POSITIONS,
            "positions that are added to tokens, and this network has rotary ones": self.origin.rotary,
        }
        if needed := [what for what, differs in wrong.items() if differs]:
            raise UsageError(f"images of any shape (preprocess.resize native) need {needed[0]}")

    def _check_prefix(self) -> None:
        """Check the tokens in front of the grid, their pool and their positions."""
        if self.origin.class_token is False and self.pool in ("cls", "cls+gap"):
            raise UsageError(
                f"pool {self.pool!r} reads the class token, so class_token cannot be false: use pool 'gap' or 'map'"
            )
        for name, pools in (
            ("pool_heads", ("map", "probe")),
            ("pool_prefix", ("map", "probe")),
            ("pool_mlp_dim", ("map",)),
        ):
            if getattr(self.origin, name) and self.pool not in pools:
                raise UsageError(f"{name} is a setting of pool {' or '.join(map(repr, pools))}, not {self.pool!r}")
        if self.origin.distilled and (self.pool != "cls" or self.pre_logits):
            raise UsageError(
                "a distilled model has one classifier on its class token and one on its distillation token: "
                f"use pool 'cls' and no pre_logits, not pool {self.pool!r} and pre_logits {self.pre_logits}"
            )
        if self.positions == "relative_bias" and self.prefix > self.has_class_token:
            raise UsageError(
                "relative_bias positions exist for the grid and a class token only: "
                "use 0 registers and no distillation token"
            )
        if self.origin.register_positions and self.positions not in ("1d", "2d"):
            raise UsageError(
                f"register_positions are rows of a learned table, which {self.positions} positions do not have: "
                "use positions '1d' or '2d'"
            )

    def check_tokens(self, image_size: tuple[int, int]) -> None:
        """Raise UsageError if images of this size have too many tokens."""
        height, width = image_size
        # attention with relative positions needs memory for each pair of tokens
        most = MOST_TOKENS // 16 if self.positions in ("relative", "relative_bias") else MOST_TOKENS
        if (tokens := (height // self.patch) * (width // self.patch)) > most:
            raise UsageError(
                f"images of {height} x {width} pixels have {tokens:,} patches of {self.patch} x {self.patch} pixels; "
                f"at most {most:,} are possible with {self.positions} positions"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens at `image_size`."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def has_class_token(self) -> bool:
        """Whether there is a class token, even one that the pool does not read."""
        return self.pool in ("cls", "cls+gap") if self.origin.class_token is None else self.origin.class_token

    @property
    def prefix(self) -> int:
        """Number of tokens in front of the grid's: class token, distillation token, registers, in this order."""
        return self.has_class_token + self.origin.distilled + self.registers

    @property
    def front(self) -> int:
        """Number of tokens of the prefix that have a row in a learned table of positions."""
        tokens = (self.has_class_token + self.origin.distilled) * self.cls_position
        return tokens + self.registers * self.origin.register_positions

    @property
    def position_tables(self) -> int:
        """Number of tables of learned positions: one, or one for each layer."""
        in_logits = self.positions in ("relative", "relative_bias")
        every_layer = self.place == "every" or (in_logits and self.place == "input")
        return self.depth if every_layer else 1

    @property
    def pooled(self) -> int:
        """Number of features of an image after the pool."""
        return self.width * (2 if self.origin.distilled or self.pool == "cls+gap" else 1)

    @property
    def features(self) -> int:
        """Number of features of an image that a model without classifier returns."""
        return self.pre_logits or self.pooled

    @property
    def head_width(self) -> int:
        """Number of inputs of each classifier."""
        return self.features // (1 + self.origin.distilled)


@dataclass(frozen=True)
class ResNetConfig:
    """BiT ResNetV2 (weight-standardised convolutions, GroupNorm), or with `axial` AxialResNet (D.6)."""

    units: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    """Number of features of the root; stage s has width * 4 * 2**s."""
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    axial: bool = False
    """Replace each 3x3 convolution by row and column attention with relative positions."""
    std_conv: StdConv = "bit"
    """How kernels are standardised (`vitrail.model.stdconv`). It depends on the weights' source."""
    group_norm_eps: float = 1e-5
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        _set_tuples(self, "units")
        check_ranges(self)
        _set_statistics(self)
        _check_depth(sum(self.units), len(self.units))
        if not self.units:
            raise UsageError("units is empty; a ResNet has at least one stage")

    @property
    def features(self) -> int:
        """Number of features of an image, those of the last stage."""
        return self.width * 4 * 2 ** (len(self.units) - 1)


@dataclass(frozen=True)
class ForeignConfig:
    """What is known of a network that is not one of vitrail's: its images, and how many outputs it has."""

    image_size: tuple[int, int]
    classes: int
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """By which images are normalised before the network gets them."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        _set_tuples(self)
        check_ranges(self)
        _set_statistics(self)


def flat(config: NetworkConfig) -> dict[str, Any]:
    """Return every field of a config by its name, those of its `Origin` beside the others: the form of files."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    origin = values.pop("origin", None)
    return values if origin is None else values | {item.name: getattr(origin, item.name) for item in fields(origin)}


def _set_tuples(config: NetworkConfig, *names: str) -> None:
    """Turn the lists of YAML and JSON, and single numbers, into tuples; one image size is both height and width."""
    for name in ("image_size", "mean", "std", *names):
        value = getattr(config, name)
        one = (value, value) if name == "image_size" else (value,)
        object.__setattr__(config, name, one if isinstance(value, Real | None) else tuple(value))


def _check_depth(layers: int, stages: int) -> None:
    """Raise UsageError for too many layers, or too many stages of a ResNet."""
    if layers > DEEPEST:
        raise UsageError(f"the network has {layers:,} layers; at most {DEEPEST:,} are possible")
    if stages > MOST_STAGES:
        raise UsageError(f"the ResNet has {stages:,} stages; at most {MOST_STAGES} are possible")


def _set_statistics(config: NetworkConfig) -> None:
    """Give each channel a mean and a std. Raises UsageError for different values of another number."""
    for name in ("mean", "std"):
        value = getattr(config, name)
        if len(value) != config.channels:
            if len(set(value)) != 1:
                raise UsageError(f"{name} has {len(value)} values for {config.channels} channels")
            object.__setattr__(config, name, value[:1] * config.channels)


HYBRIDS: dict[tuple[str, int], tuple[int, ...]] = {
    ("R50", 32): (3, 4, 6, 3),
    ("R50", 16): (3, 4, 9),
    ("R26", 32): (2, 2, 2, 2),
    ("R26", 16): (2, 2, 4),
}
"""Hybrids, by name and ratio. /16 moves stage 4's units into stage 3 (paper, section 4.1, option ii)."""

BIT_UNITS: dict[int, tuple[int, ...]] = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""BiT, by depth."""

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

# The networks of vitrail's own recipes: sizes as above, and the other fields in which they differ from the paper's
OWN: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "smoke": ((32, 2, 2, 64), {}),
    "digits": ((96, 4, 3, 192), {}),
    "small": ((128, 4, 4, 256), dict(layer_scale=0.1, pool="gap", stem="early")),
    "narrow": ((128, 6, 4, 512), dict(pool="gap")),
}

NAMES: tuple[str, ...] = (
    *("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14", "g/14", "G/14"),
    *("R+Ti/16", "R26+S/32", "R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"),
    *("R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3"),
    *("S36x1/16", "S18x2/16", "B36x1/16", "B18x2/16", "axial-B/32", "axial-B/16", "axial-R50"),
    *("smoke/2", "digits/4", "small/4", "small/8", "narrow/4", "narrow/8"),
)
"""The names with a pinned parameter count; `variant` also reads any other combination of their parts."""

SAME = {"b/32": "S/32"}  # Figure 4: "all hidden dimensions halved"; with this patch only, because b looks like B
_NUMBER = "[0-9]{1,9}"
_VIT = re.compile(
    r"(?P<axial>axial-)?(?:(?P<resnet>R[0-9]*)\+)?(?P<size>[A-Za-z]+?)"
    rf"(?:(?P<depth>{_NUMBER})x(?P<branches>{_NUMBER}))?/(?P<patch>{_NUMBER})"
)
_RESNET = re.compile(rf"(?P<axial>axial-)?R(?P<depth>{_NUMBER})(?:x(?P<width>{_NUMBER}))?")
Config = ViTConfig | ResNetConfig
NetworkConfig = Config | ForeignConfig
ConfigType = TypeVar("ConfigType", ViTConfig, ResNetConfig)


def variant(name: str, **overrides: Any) -> ViTConfig | ResNetConfig:
    """Return the config of a model by its name, with any field overridden.

    `variant("B/16", classes=10, image_size=384)`. If the patch does not divide 224, the image size is the nearest
    smaller one that it divides. pre_logits may be "width". Raises UsageError with the nearest valid name.
    """
    if match := _VIT.fullmatch(SAME.get(name, name)):
        return _built(ViTConfig, name, _vit(name, match, overrides))
    if match := _RESNET.fullmatch(name):
        units = BIT_UNITS.get(int(match["depth"]))
        if units and not (match["axial"] and match["depth"] != "50"):
            values = dict(units=units, width=64 * int(match["width"] or 1), axial=bool(match["axial"]))
            return _built(ResNetConfig, name, {**values, **overrides})
    raise UsageError(f"there is no model {name!r}.{did_you_mean(name, NAMES)} Valid: {', '.join(NAMES)}")


def _vit(name: str, match: re.Match[str], overrides: dict[str, Any]) -> dict[str, Any]:
    sizes = {**{size: (numbers, {}) for size, numbers in SIZES.items()}, **OWN}
    if match["size"] not in sizes:
        raise UsageError(f"there is no size {match['size']!r}, as in {name!r}; valid sizes: {', '.join(sizes)}")
    (width, depth, heads, mlp_dim), other = sizes[match["size"]]
    patch = int(match["patch"])
    values: dict[str, Any] = dict(width=width, depth=depth, heads=heads, mlp_dim=mlp_dim, patch=patch, **other)
    if match["depth"]:
        branches = int(match["branches"])
        values |= dict(depth=int(match["depth"]), branches=branches)
        values["block"] = "parallel" if branches > 1 else "sequential"
    if match["axial"]:
        values |= dict(block="axial", pool="gap")
    if match["resnet"]:
        values |= dict(stem="resnet", stem_units=_hybrid_units(name, match["resnet"], patch))
        if match["resnet"] == "R":  # the root shrinks 4 times, and the patch on its map is 8x8: really /32
            values["patch"] = 32
    values |= overrides
    values |= {"pre_logits": values["width"]} if values.get("pre_logits") == "width" else {}
    patch = values["patch"]
    return {"image_size": 224 // patch * patch if 0 < patch <= 224 else patch, **values}


def _hybrid_units(name: str, resnet: str, ratio: int) -> tuple[int, ...]:
    if resnet == "R":
        return ()
    if (resnet, ratio) not in HYBRIDS:
        valid = ", ".join(f"{r}+?/{p}" for r, p in HYBRIDS)
        raise UsageError(f"no hybrid stem for {name!r}; valid: {valid} and R+?/16")
    return HYBRIDS[resnet, ratio]


def _built(config: type[ConfigType], name: str, values: dict[str, Any]) -> ConfigType:
    default = config()
    valid = flat(default)
    for key in values:
        if key not in valid:
            raise UsageError(f"{name} has no setting {key!r}.{did_you_mean(key, valid)} Valid: {', '.join(valid)}")
    try:
        return config(**values) if isinstance(default, ResNetConfig) else config.of(**values)
    except UsageError as error:  # perhaps about a number in the name
        raise UsageError(f"model {name}: {error}") from None
