"""Google's vision_transformer and big_vision: .npz files of Vision Transformers, under the same names but for a few.

After a prefix (none, `opt/target/`, `params/`, `params/img/`), with D the width, H heads of E features, M the MLP:

| theirs | shape | ours |
|---|---|---|
| `cls` | (1, 1, D) | `cls` |
| `embedding/kernel`, `bias` | (P, P, 3, D); (D) | `stem.weight`, `bias` |
| `Transformer/encoderblock_0/LayerNorm_0/scale`, `bias` | (D) | `blocks.0.attentions.0.norm` |
| `.../MultiHeadDotProductAttention_1/{query,key,value}/kernel`, `bias` | (D, H, E); (H, E) | `...attention.qkv` |
| `.../MultiHeadDotProductAttention_1/out/kernel`, `bias` | (H, E, D); (D) | `...attention.out` |
| `.../LayerNorm_2/scale`, `bias` | (D) | `blocks.0.mlps.0.norm` |
| `.../MlpBlock_3/Dense_0` and `Dense_1/kernel`, `bias` | (D, M); (M) and (M, D); (D) | `...mlp.fc1` and `fc2` |
| `Transformer/encoder_norm/scale`, `bias` | (D) | `norm` |
| `pre_logits/kernel`, `bias` (not in every file) | (D, R); (R) | `pre_logits.hidden` |
| `head/kernel`, `bias` (not in every file) | (D or R, K); (K) | `head` |

These are the numbers of old flax, which counted all modules of a block together; linen counts each kind on its own
(`MODULES`). A file without `cls` and without MAP head is a model with average pooling.

**Google** (google-research/vision_transformer, AugReg's models among them) has the positions in
`Transformer/posembed_input/pos_embedding` (1, 1 + N, D), that of the class token first. Hybrids have a ResNet in front.
With b and u from 1, C the input features, R = 64 * width_factor and W = R * 2**(b - 1):

| theirs | shape | ours |
|---|---|---|
| `conv_root/kernel` | (7, 7, 3, R) | `stem.root.conv.weight` |
| `gn_root/{scale,bias}` | (R), in old files (1, 1, 1, R) | `stem.root.norm` |
| `block{b}/unit{u}/conv{1,2,3}/kernel` | (1, 1, C, W), (3, 3, W, W), (1, 1, W, 4W) | `stem.stages.{b-1}.{u-1}.conv1` |
| `block{b}/unit{u}/gn{1,2,3}/{scale,bias}` | (W), (W), (4W), or with three axes of 1 | `...norm1` |
| `block{b}/unit1/conv_proj/kernel`, `gn_proj/{scale,bias}` | (1, 1, C, 4W); (4W) | `...shortcut.conv`, `.norm` |
| `embedding/kernel`, `bias` | (c, c, C, D); (D) | `stem.proj` |

The patch size, in pixels per token, follows from the convolutions and the embedding: R+Ti/16 has only a root, which
shrinks an image four times, and an embedding of 8 x 8 cells of its output, so that a token covers 32 x 32 pixels.

**big_vision** also has scanned models, with one `Transformer/encoderblock/` whose arrays have the layers as first axis;
towers of SigLIP and similar models (`params/img/`); and

| theirs | shape | ours |
|---|---|---|
| `pos_embedding` | (1, N, D); absent if positions are computed | `positions.embedding` |
| `MAPHead_0/probe` | (1, 1, D) | `pool.probe` |
| `MAPHead_0/MultiHeadDotProductAttention_0/query` | kernel (D, H, E), bias (H, E) | `pool.query` |
| `.../{key,value}` | (D, H, E); (H, E) each | `pool.key_value` |
| `.../out` | (H, E, D); (D) | `pool.out` |
| `MAPHead_0/LayerNorm_0` | scale, bias (D) | `pool.norm` |
| `MAPHead_0/MlpBlock_0/Dense_0`, `Dense_1` | (D, M) and (M, D) | `pool.mlp.fc1`, `fc2` |

Its class token is appended after the positions are added, and has no position. Older files have one more row, for the
class token, or have the table under Google's name. (big_vision's `fix_old_checkpoints` in `models/vit.py` adds that row
to `cls`. It stays separate here, so that the file can be written back unchanged.)

A file holds arrays and nothing else. Whatever names and shapes do not say is fixed by the program that reads it: tanh
GELU, LayerNorm epsilon 1e-6, pixels in [-1, 1], positions resampled like `scipy.ndimage.zoom(order=1)`, images squashed
to the model's size (`vit_jax/input_pipeline.py`), or with big_vision 7/8 of the resized short side. Another model could
be written without an error, but would compute something else (with the exact GELU, logits change by about 2e-4), so it
is rejected here. To accept that change, build the model with the approximation. `vitrail.weights.save` reports what the
file cannot hold besides the network: normalisation of pixels, resampling of positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.flax.npz import found_dtypes, named_axes, stage_units, write_npz
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, state_of
from vitrail.weights.mapping import (
    Conversion,
    NameTable,
    Rule,
    apply_table,
    conv_kernel,
    count,
    dense_rows,
    reshaped,
    scale_bias,
    within,
)
from vitrail.weights.parts import first_reason, without_place

PREFIXES = ("", "opt/target/", "params/", "params/img/")
"""Prefixes of all names in released files and training checkpoints."""
MODULES = {
    "old": ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
}
"""Naming -> names of the attention, of the norm before the MLP, and of the MLP."""
BLOCK, SCANNED = "Transformer/encoderblock_", "Transformer/encoderblock/"
OLD_POSITIONS, POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"
ASSUMED_SIZE = 224
HAS = "pool=gap tokenless pre_logits gelu norm_eps oblong cls_position"
"""The parts in `vitrail.weights.parts` for which both formats have arrays; `gelu` and `norm_eps` are checked later."""


@dataclass(frozen=True)
class FlaxLayout:
    """Naming of the encoder in one file. A card's provenance stores it, so that saving restores the file's names."""

    prefix: str = ""
    naming: str = "old"
    scan: bool = False

    def __post_init__(self) -> None:
        if self.naming not in MODULES:
            raise WeightsError(f"the naming of a flax file is {self.naming!r}; valid: {', '.join(MODULES)}")

    @property
    def block(self) -> str:
        """Start of the names of a layer, with the field {layer}."""
        return f"{self.prefix}{SCANNED}" if self.scan else f"{self.prefix}{BLOCK}{{layer}}/"


@dataclass(frozen=True)
class FlaxViT:
    """The format of google-research/vision_transformer, or of google-research/big_vision."""

    name: str
    layout: FlaxLayout
    """Naming of a file that is written for a model of another format."""
    positions: str
    """Name of the table of positions in such a file."""
    has: str
    """The parts in `vitrail.weights.parts` for which only this format has arrays."""

    def recognises(self, archive: Archive) -> bool:
        """Return whether there is a patch embedding, and an encoder of this format.

        Only big_vision has positions outside the encoder (or computed ones), scanned layers and a MAP head.
        """
        if (prefix := _prefix(archive)) is None:
            return False
        own = f"{prefix}{OLD_POSITIONS}" not in archive or f"{prefix}MAPHead_0/probe" in archive
        own = own or any(name.startswith(f"{prefix}{SCANNED}") for name in archive.names)
        return own == (self is BIG_VISION)

    def find(self, archive: Archive) -> ForeignModel:
        """Infer the model from the shapes. Raises WeightsError that names the tensor that does not fit."""
        if (prefix := _prefix(archive)) is None:
            raise WeightsError(
                f"{archive.path} is not in the format {self.name!r}: it has no embedding/kernel and no encoder"
            )
        layout = _layout(archive, prefix)
        positions = OLD_POSITIONS if f"{prefix}{OLD_POSITIONS}" in archive else POSITIONS
        config, said = self._config(archive, layout, positions)
        google = self is GOOGLE
        wide = _wide_norms(archive, prefix)
        own: dict[str, Any] = {"wide_norms": wide} if google else {"positions": positions}
        outside = {name for name in archive.names if not name.startswith(prefix)}
        beside = {name for name in outside if prefix == "params/img/" and name.startswith("params/")}
        unused = dict.fromkeys(sorted(outside), "state of the training run")
        unused |= dict.fromkeys(sorted(beside), "not of the image tower")
        origin = {"format": self.name, "file": archive.path.name, **asdict(layout), **own}
        origin |= found_dtypes(archive, archive.names - unused.keys())
        preprocess = Preprocess(config.image_size, *(("squash",) if google else ("small", 0.875)))
        card = Card(config, preprocess=preprocess, source=self.name, provenance={"origin": origin})
        if prefix == "params/img/" and config.classes:
            shared = f"the {config.classes} features shared with the text tower"
            said.append(f"the head projects onto {shared}: they count as classes")
        entries = _conversions(expected(config, archive.path), config, layout, positions, wide)
        return ForeignModel(card, entries, unused, assumptions=said)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model under its original names; a model of another format gets those of released files.

        Raises WeightsError if the format cannot hold the model, or if its readers would compute something else.
        """
        config = self._expressible(model)
        origin = origin_of(card, self.name)
        layout = FlaxLayout(**{key: origin.get(key, value) for key, value in asdict(self.layout).items()})
        state, positions = state_of(model), origin.get("positions", self.positions)
        entries = _conversions(state, config, layout, positions, origin.get("wide_norms", []))
        write_npz(path, foreign_tensors(state, entries, self.name), origin)

    def _config(self, archive: Archive, layout: FlaxLayout, positions: str) -> tuple[ViTConfig, list[str]]:
        """Return the config, and what is assumed for it."""
        prefix, name = layout.prefix, f"{layout.prefix}{positions}"
        sizes: dict[str, Any] = {**_top_sizes(archive, prefix), **_encoder_sizes(archive, layout)}
        if f"{prefix}conv_root/kernel" in archive:
            sizes |= _hybrid_sizes(archive, prefix, sizes["patch"])
        patch, pool = sizes["patch"], _pool(archive, prefix, sizes["heads"])
        if name in archive:
            rows = named_axes(archive, name, "1", "positions", "width")[1]
            grid, front = self._read_positions(rows, pool)
            if self is BIG_VISION:
                sizes["cls_position"] = front
            if front and pool != "cls":
                raise WeightsError(
                    f"{archive.path}: {name!r} has {rows} rows, one of them for a class token, but the file has no "
                    "class token"
                )
            if grid == (0, 0):
                raise WeightsError(f"{archive.path} has only the class token's position in {name!r}")
            said = [
                f"{name} has {grid[0] * grid[1]} positions, not a square number, and the file does not say their "
                f"rows: a grid of {grid[0]} x {grid[1]}"
            ] * (grid[0] != grid[1])
        else:
            if layout.naming != "linen":
                raise WeightsError(f"{archive.path} lacks the tensor '{prefix}{OLD_POSITIONS}' (1, positions, width)")
            grid = (max(ASSUMED_SIZE // patch, 1),) * 2
            sizes |= dict(positions="sincos", cls_position=False)
            said = [
                f"positions are sines and cosines, because there is no {name}, and the image size is "
                f"{grid[0] * patch} x {grid[1] * patch} px, because the file does not contain it"
            ]
        size = (grid[0] * patch, grid[1] * patch)
        return ViTConfig.of(**sizes, image_size=size, pool=pool, gelu="tanh", resize_mode="official"), said

    def _read_positions(self, rows: int, pool: str) -> tuple[tuple[int, int], bool]:
        """Return the grid of a table, (0, 0) for an empty one, and whether its first row is for the class token.

        In Google's files it always is, in big_vision's only if the rest is a square.
        """
        front = pool == "cls" if self is GOOGLE else math.isqrt(rows) ** 2 + 1 == rows
        return _grid_of(rows - front), front

    def _expressible(self, model: nn.Module) -> ViTConfig:
        """Return the config of a model that the format can hold. Raises WeightsError with the reason."""
        if not isinstance(model, ViT):
            raise WeightsError(
                f"format {self.name!r} holds Vision Transformers, not a {type(model).__name__}; a ResNetV2 goes into "
                "'bit'"
            )
        config = model.config
        if part := without_place(config, f"{HAS} {self.has}"):
            raise WeightsError(f"format {self.name!r} has no place for {part}. Save as 'vitrail', which has.")
        hybrid, eps = config.stem == "resnet", config.origin.norm_eps
        front, (rows, columns) = config.pool == "cls" and config.cls_position, config.grid
        cells = front + rows * columns
        read, read_front = self._read_positions(cells, config.pool)
        row = " and a row for the class token" * read_front * (self is BIG_VISION)
        reasons = {
            "does not store the kind of GELU, and every program that reads it computes the tanh approximation. The "
            "logits of this model, which has the exact GELU, would change by about 2e-4. Save as 'timm', 'hf' or "
            "'vitrail', or build the model with gelu='tanh' to accept the change.": config.origin.gelu != "tanh",
            f"does not store the epsilon of LayerNorm, and its readers use 1e-6. This model has {eps}.": eps != 1e-6,
            "does not store how a hybrid standardises its kernels, and its readers use (w - mean) / (std + 1e-5) and a "
            f"GroupNorm epsilon of 1e-6. This model has the form {config.std_conv!r} and "
            f"{config.group_norm_eps}.": hybrid and (config.std_conv, config.group_norm_eps) != ("hybrid", 1e-6),
            "has a position for the class token, and this model has none. Save as 'big_vision', which has none "
            "either.": self is GOOGLE and config.pool == "cls" and not config.cls_position,
            f"stores the number of positions but not the grid. The {cells} positions of this model's grid of {rows} x "
            f"{columns} would be read as {read[0]} x {read[1]}{row}. Save as 'vitrail', or load the model with a "
            "square image_size first.": config.positions == "1d" and (read, read_front) != (config.grid, front),
        }
        if reason := first_reason(reasons):
            raise WeightsError(f"format {self.name!r} {reason}")
        return config


GOOGLE = FlaxViT("google", FlaxLayout(), OLD_POSITIONS, "stem=resnet")
BIG_VISION = FlaxViT("big_vision", FlaxLayout("params/", "linen"), POSITIONS, "positions=sincos pool=map")


def _prefix(archive: Archive) -> str | None:
    """Return the prefix of the names in an archive that holds a flax ViT, None for any other archive."""
    for prefix in PREFIXES:
        encoder = any(name.startswith((f"{prefix}{BLOCK}", f"{prefix}{SCANNED}")) for name in archive.names)
        if f"{prefix}embedding/kernel" in archive and encoder:
            return prefix
    return None


def _layout(archive: Archive, prefix: str) -> FlaxLayout:
    """Return the naming of a file. Raises WeightsError if it is unknown."""
    scan = any(name.startswith(f"{prefix}{SCANNED}") for name in archive.names)
    signs = {}
    for naming, (attention, _, _) in MODULES.items():
        layout = FlaxLayout(prefix, naming, scan)
        signs[f"{layout.block.format(layer=0)}{attention}/query/kernel"] = layout
    found = next((layout for sign, layout in signs.items() if sign in archive), None)
    if found is None:
        raise WeightsError(f"{archive.path} has no attention in its first layer: there is no {' or '.join(signs)}")
    return found


def _top_sizes(archive: Archive, prefix: str) -> dict[str, int | None]:
    """Return patch, channels, classes (0 without a head) and pre_logits (None without). Raises WeightsError."""
    kernel = named_axes(archive, f"{prefix}embedding/kernel", "patch", "patch", "channels", "width")
    if kernel[0] != kernel[1]:
        raise WeightsError(f"{archive.path} has patches of {kernel[0]} x {kernel[1]}; they must be square here")
    sizes: dict[str, int | None] = dict(patch=kernel[0], channels=kernel[2], classes=0, pre_logits=None)
    for layer, field in (("head", "classes"), ("pre_logits", "pre_logits")):
        if f"{prefix}{layer}/kernel" in archive or f"{prefix}{layer}/bias" in archive:
            sizes[field] = named_axes(archive, f"{prefix}{layer}/kernel", "features", field)[1]
    return sizes


def _encoder_sizes(archive: Archive, layout: FlaxLayout) -> dict[str, int]:
    """Return width, depth, heads and mlp_dim from the shapes of the first layer. Raises WeightsError."""
    attention, _, mlp = MODULES[layout.naming]
    stacked, first = ("layers",) * layout.scan, layout.block.format(layer=0)
    name = f"{first}{attention}/query/kernel"
    query = named_axes(archive, name, *stacked, "width", "heads", "features of a head")
    hidden = named_axes(archive, f"{first}{mlp}/Dense_0/kernel", *stacked, "width", "mlp_dim")
    width, heads, features = query[-3:]
    if heads * features != width:
        raise WeightsError(
            f"{archive.path}: {name!r} has {heads} heads of {features} features for a width of {width}; "
            "a Vision Transformer's heads share the width evenly"
        )
    depth = query[0] if layout.scan else count(archive, f"{layout.prefix}{BLOCK}", "/")
    for name in sorted(archive.names) if layout.scan else ():
        if name.startswith(first) and archive.shape(name)[:1] != (depth,):
            raise WeightsError(
                f"{archive.path} has {name!r} in shape {archive.shape(name)}; its first axis should be the {depth} "
                "layers that the attention has"
            )
    return dict(width=width, depth=depth, heads=heads, mlp_dim=hidden[-1])


def _hybrid_sizes(archive: Archive, prefix: str, cells: int) -> dict[str, Any]:
    """Return stem, stem_units, stem_width, patch and channels. Raises WeightsError for a ResNet of another kind.

    `cells` is the side of a patch of the ResNet's output.
    """
    name = f"{prefix}conv_root/kernel"
    shape = named_axes(archive, name, "7", "7", "channels", "features")
    if shape[:2] != (7, 7):
        raise WeightsError(
            f"{archive.path} has {name!r} in shape {shape}. Only hybrids that start with 7 x 7 kernels are supported."
        )
    units = stage_units(archive, archive.names, prefix)
    patch = cells * 4 * 2 ** max(len(units) - 1, 0)
    return dict(stem="resnet", stem_units=units, stem_width=shape[3], patch=patch, channels=shape[2])


def _pool(archive: Archive, prefix: str, heads: int) -> str:
    if f"{prefix}MAPHead_0/probe" not in archive:
        return "cls" if f"{prefix}cls" in archive else "gap"
    if f"{prefix}cls" in archive:
        raise WeightsError(
            f"{archive.path} has both '{prefix}cls' and a MAP head; big_vision's models have only one of them"
        )
    name = f"{prefix}MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"
    shape = named_axes(archive, name, "width", "heads", "features of a head")
    if shape[1] != heads:
        raise WeightsError(
            f"{archive.path}: {name!r} has {shape[1]} heads and the encoder has {heads}; they must be equal"
        )
    return "map"


def _grid_of(cells: int) -> tuple[int, int]:
    """Return the grid (rows, columns) of `cells` positions: the squarest one, no taller than wide.

    The formats store the number of positions but not their rows; their own readers take the square root.
    """
    rows = math.isqrt(max(cells, 0))
    while rows and cells % rows:
        rows -= 1
    return (rows, cells // rows) if rows else (0, 0)


def _wide_norms(archive: Archive, prefix: str) -> list[str]:
    """Return the GroupNorm arrays stored as (1, 1, 1, C), without the prefix."""
    pattern = re.compile(re.escape(prefix) + r"((?:block\d+/unit\d+/)?gn\w*/(?:scale|bias))")
    matches = [match for name in sorted(archive.names) if (match := pattern.fullmatch(name))]
    return [match[1] for match in matches if len(archive.shape(match[0])) == 4]


def _table(config: ViTConfig, layout: FlaxLayout) -> NameTable:
    """Return the table of a file."""
    heads, (attention, norm, mlp) = config.heads, MODULES[layout.naming]
    block: NameTable = {
        **scale_bias("attentions.0.norm", "LayerNorm_0"),
        **_projections("attentions.0.attention.qkv", attention, ("query", "key", "value"), heads),
        **_out_projection("attentions.0.attention.out", f"{attention}/out", heads),
        **scale_bias("mlps.0.norm", norm),
        **dense_rows("mlps.0.mlp.fc1", f"{mlp}/Dense_0"),
        **dense_rows("mlps.0.mlp.fc2", f"{mlp}/Dense_1"),
    }
    attention = "MultiHeadDotProductAttention_0"
    head: NameTable = {
        "probe": "probe",
        **_projections("query", attention, ("query",), heads),
        **_projections("key_value", attention, ("key", "value"), heads),
        **_out_projection("out", f"{attention}/out", heads),
        **scale_bias("norm", "LayerNorm_0"),
        **dense_rows("mlp.fc1", "MlpBlock_0/Dense_0"),
        **dense_rows("mlp.fc2", "MlpBlock_0/Dense_1"),
    }
    unit: NameTable = {
        "conv{number}.weight": conv_kernel("conv{number}/kernel"),
        **scale_bias("norm{number}", "gn{number}"),
        "shortcut.conv.weight": conv_kernel("conv_proj/kernel"),
        **scale_bias("shortcut.norm", "gn_proj"),
    }
    return {
        "stem.weight": conv_kernel("{prefix}embedding/kernel"),
        "stem.bias": "{prefix}embedding/bias",
        "stem.root.conv.weight": conv_kernel("{prefix}conv_root/kernel"),
        **scale_bias("stem.root.norm", "{prefix}gn_root"),
        **within("stem.stages.{stage}.{unit}.", "{prefix}block{stage}/unit{unit}/", unit),
        "stem.proj.weight": conv_kernel("{prefix}embedding/kernel"),
        "stem.proj.bias": "{prefix}embedding/bias",
        "cls": "{prefix}cls",
        "positions.embedding": "{prefix}{positions}",
        **within("blocks.{layer}.", layout.block.replace(layout.prefix, "{prefix}", 1), block),
        **scale_bias("norm", "{prefix}Transformer/encoder_norm"),
        **within("pool.", "{prefix}MAPHead_0/", head),
        **dense_rows("pre_logits.hidden", "{prefix}pre_logits"),
        **dense_rows("head", "{prefix}head"),
    }


def _conversions(
    names: Iterable[str], config: ViTConfig, layout: FlaxLayout, positions: str, wide: Collection[str]
) -> list[Conversion]:
    """Return the conversions of all tensors; `positions` is the name of the table of positions.

    `wide` are the arrays of shape (1, 1, 1, C), from `_wide_norms`.
    """
    entries = apply_table(names, _table(config, layout), first=1, prefix=layout.prefix, positions=positions)
    entries = [_of_stack(entry) if layout.scan and entry.ours.startswith("blocks.") else entry for entry in entries]
    wide_names, shape = {f"{layout.prefix}{name}" for name in wide}, reshaped("", (1, 1, 1, -1))
    return [
        replace(entry, reshape=True, write=shape.write) if entry.theirs[0] in wide_names else entry for entry in entries
    ]


def _projections(ours: str, theirs: str, parts: tuple[str, ...], heads: int) -> NameTable:
    """Return the rows of kernels (D, H, E) and biases (H, E) of `parts` for one linear layer, in this order.

    `read` raises ValueError for another number of heads, which would split the features differently.
    """
    kernels, biases = (tuple(f"{theirs}/{part}/{end}" for part in parts) for end in ("kernel", "bias"))
    return {
        f"{ours}.weight": Rule(
            kernels,
            lambda *kernels: torch.cat([_of_heads(kernel, 1, heads).flatten(1).mT for kernel in kernels]),
            lambda weight: [part.mT.unflatten(1, (heads, -1)) for part in weight.chunk(len(parts))],
        ),
        f"{ours}.bias": Rule(
            biases,
            lambda *biases: torch.cat([_of_heads(bias, 0, heads).flatten() for bias in biases]),
            lambda bias: [part.unflatten(0, (heads, -1)) for part in bias.chunk(len(parts))],
        ),
    }


def _out_projection(ours: str, theirs: str, heads: int) -> NameTable:
    """Return the rows of the kernel (H, E, D) that joins the heads, and of its bias (D)."""
    kernel = Rule(
        (f"{theirs}/kernel",),
        lambda kernel: _of_heads(kernel, 0, heads).flatten(0, 1).mT,
        lambda weight: weight.mT.unflatten(0, (heads, -1)),
    )
    return {f"{ours}.weight": kernel, f"{ours}.bias": f"{theirs}/bias"}


def _of_heads(tensor: Tensor, axis: int, heads: int) -> Tensor:
    if tensor.dim() <= axis or tensor.shape[axis] != heads:
        raise ValueError(f"axis {axis} should be {heads} heads")
    return tensor


def _of_stack(entry: Conversion) -> Conversion:
    """Return the conversion of one layer whose arrays are a row of a scanned model's arrays.

    It writes stacks of one row; `vitrail.weights.formats.foreign_tensors` joins those of all layers.
    """
    layer = int(entry.ours.split(".")[1])
    return replace(
        entry,
        read=lambda *stacks: entry.read(*(stack[layer] for stack in stacks)),
        write=lambda tensor: [part[None] for part in entry.written(tensor)],
    )
