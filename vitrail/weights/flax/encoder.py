"""The encoder in flax files, shared by the formats of Google's vision_transformer and of big_vision.

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
(`MODULES`). Scanned models have one `Transformer/encoderblock/` whose arrays have the layers as first axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UsageError, WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import Conversion, NameTable, Rule, apply_table, conv_kernel, dense, scale_bias, within

PREFIXES = ("", "opt/target/", "params/", "params/img/")
"""Prefixes of all names in released files and training checkpoints."""

MODULES = {
    "old": ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
}
"""Naming -> names of the attention, of the norm before the MLP, and of the MLP."""


@dataclass(frozen=True)
class EncoderLayout:
    """Naming of the encoder in one file. A card's provenance stores it, so that saving restores the file's names."""

    prefix: str = ""
    naming: str = "old"
    scan: bool = False

    def __post_init__(self) -> None:
        if self.naming not in MODULES:
            raise WeightsError(f"the naming of a flax file is {self.naming!r}; valid: {', '.join(MODULES)}")

    def block(self, layer: int) -> str:
        """Return the start of the names of a layer."""
        return f"{self.prefix}Transformer/encoderblock" + ("/" if self.scan else f"_{layer}/")


def find_prefix(archive: Archive) -> str | None:
    """Return the prefix of the names in an archive that holds a flax ViT, None for any other archive."""
    for prefix in PREFIXES:
        block = f"{prefix}Transformer/encoderblock"
        if f"{prefix}embedding/kernel" in archive and any(name.startswith(block) for name in archive.names):
            return prefix
    return None


def is_big_vision(archive: Archive, prefix: str) -> bool:
    """Return whether a file is from big_vision, not from vision_transformer.

    Only big_vision has positions outside the encoder (or computed ones), scanned layers and a MAP head.
    """
    return (
        f"{prefix}Transformer/posembed_input/pos_embedding" not in archive
        or f"{prefix}MAPHead_0/probe" in archive
        or any(name.startswith(f"{prefix}Transformer/encoderblock/") for name in archive.names)
    )


def find_layout(archive: Archive, prefix: str) -> EncoderLayout:
    """Return the naming of a file. Raises WeightsError if it is unknown."""
    scan = any(name.startswith(f"{prefix}Transformer/encoderblock/") for name in archive.names)
    for naming, (attention, _, _) in MODULES.items():
        layout = EncoderLayout(prefix, naming, scan)
        if f"{layout.block(0)}{attention}/query/kernel" in archive:
            return layout
    expected = " or ".join(f"{layout.block(0)}{attention}/query/kernel" for attention, _, _ in MODULES.values())
    raise WeightsError(f"{archive.path} has no attention in its first layer: there is no {expected}")


def named_axes(archive: Archive, name: str, *axes: str) -> tuple[int, ...]:
    """Return the shape of a required tensor with these axes. Raises WeightsError if it does not fit."""
    if name not in archive:
        raise WeightsError(f"{archive.path} lacks the tensor {name!r} ({', '.join(axes)})")
    shape = tuple(archive.shape(name))
    if len(shape) != len(axes) or 0 in shape:
        raise WeightsError(f"{archive.path} has {name!r} in shape {shape}; it should be ({', '.join(axes)})")
    return shape


def encoder_sizes(archive: Archive, layout: EncoderLayout) -> dict[str, int]:
    """Return width, depth, heads and mlp_dim from the shapes of the first layer. Raises WeightsError."""
    attention, _, mlp = MODULES[layout.naming]
    stacked = ("layers",) * layout.scan
    name = f"{layout.block(0)}{attention}/query/kernel"
    query = named_axes(archive, name, *stacked, "width", "heads", "features of a head")
    hidden = named_axes(archive, f"{layout.block(0)}{mlp}/Dense_0/kernel", *stacked, "width", "mlp_dim")
    width, heads, features = query[-3:]
    if heads * features != width:
        raise WeightsError(
            f"{archive.path}: {name!r} has {heads} heads of {features} features for a width of {width}; "
            "a Vision Transformer's heads share the width evenly"
        )
    depth = _stacked_layers(archive, layout, query[0]) if layout.scan else _count_layers(archive, layout.prefix)
    return dict(width=width, depth=depth, heads=heads, mlp_dim=hidden[-1])


def _stacked_layers(archive: Archive, layout: EncoderLayout, depth: int) -> int:
    for name in sorted(archive.names):
        if name.startswith(layout.block(0)) and archive.shape(name)[:1] != (depth,):
            raise WeightsError(
                f"{archive.path} has {name!r} in shape {archive.shape(name)}; its first axis should be the {depth} "
                "layers that the attention has"
            )
    return depth


def _count_layers(archive: Archive, prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"Transformer/encoderblock_(\d+)/")
    layers = {int(match[1]) for name in archive.names if (match := pattern.match(name))}
    if missing := set(range(len(layers))) - layers:
        raise WeightsError(
            f"{archive.path} has {len(layers)} layers, the last of them Transformer/encoderblock_{max(layers)}, but "
            f"no Transformer/encoderblock_{min(missing)}"
        )
    return len(layers)


def top_sizes(archive: Archive, prefix: str) -> dict[str, int | None]:
    """Return channels, classes (0 without a head) and pre_logits (None without). Raises WeightsError."""
    kernel = named_axes(archive, f"{prefix}embedding/kernel", "patch", "patch", "channels", "width")
    sizes: dict[str, int | None] = dict(channels=kernel[2], classes=0, pre_logits=None)
    for layer, field in (("head", "classes"), ("pre_logits", "pre_logits")):
        if f"{prefix}{layer}/kernel" in archive or f"{prefix}{layer}/bias" in archive:
            sizes[field] = named_axes(archive, f"{prefix}{layer}/kernel", "features", field)[1]
    return sizes


def patch_size(archive: Archive, prefix: str) -> int:
    """Return the side of a patch, in cells of the map that is cut into patches. Raises WeightsError."""
    kernel = named_axes(archive, f"{prefix}embedding/kernel", "patch", "patch", "channels", "width")
    if kernel[0] != kernel[1]:
        raise WeightsError(f"{archive.path} has patches of {kernel[0]} x {kernel[1]}; they must be square here")
    return kernel[0]


def grid_of(cells: int) -> tuple[int, int]:
    """Return the grid (rows, columns) of `cells` positions: the squarest one, no taller than wide.

    The formats store the number of positions but not their rows; their own readers take the square root.
    """
    rows = math.isqrt(cells)
    while cells % rows:
        rows -= 1
    return rows, cells // rows


def assumed_grid(grid: tuple[int, int], name: str) -> list[str]:
    """Return the note for the load report if a grid is not square, as a list."""
    if grid[0] == grid[1]:
        return []
    return [
        f"{name} has {grid[0] * grid[1]} positions, not a square number, and the file does not say their rows: "
        f"a grid of {grid[0]} x {grid[1]}"
    ]


def build_config(archive: Archive, **values: Any) -> ViTConfig:
    """Return the config. Raises WeightsError if the file's shapes contradict each other."""
    try:
        return ViTConfig.of(**values)
    except UsageError as error:
        raise WeightsError(f"{archive.path} does not describe a model: {error}") from error


def unused_tensors(archive: Archive, prefix: str) -> dict[str, str]:
    """Return name -> reason for the tensors that do not belong to the image network."""
    reasons = {}
    for name in sorted(archive.names):
        if not name.startswith(prefix):
            tower = prefix == "params/img/" and name.startswith("params/")
            reasons[name] = "not of the image tower" if tower else "state of the training run"
    return reasons


def projector_note(prefix: str, classes: int | None) -> list[str]:
    """Return the note for the load report about the head of an image tower, as a list."""
    if prefix != "params/img/" or not classes:
        return []
    return [f"the head projects onto the {classes} features shared with the text tower: they count as classes"]


def encoder_table(layout: EncoderLayout, heads: int) -> NameTable:
    """Return the table of stem, class token, blocks, last norm, pre-logits and head."""
    attention, norm, mlp = MODULES[layout.naming]
    block: NameTable = {
        **scale_bias("attentions.0.norm", "LayerNorm_0"),
        **projections("attentions.0.attention.qkv", attention, ("query", "key", "value"), heads),
        **out_projection("attentions.0.attention.out", f"{attention}/out", heads),
        **scale_bias("mlps.0.norm", norm),
        **dense("mlps.0.mlp.fc1", f"{mlp}/Dense_0"),
        **dense("mlps.0.mlp.fc2", f"{mlp}/Dense_1"),
    }
    return {
        "stem.weight": conv_kernel("{prefix}embedding/kernel"),
        "stem.bias": "{prefix}embedding/bias",
        "cls": "{prefix}cls",
        **within("blocks.{layer}.", "{prefix}Transformer/encoderblock" + ("/" if layout.scan else "_{layer}/"), block),
        **scale_bias("norm", "{prefix}Transformer/encoder_norm"),
        **dense("pre_logits.hidden", "{prefix}pre_logits"),
        **dense("head", "{prefix}head"),
    }


def encoder_conversions(
    names: Iterable[str], table: NameTable, layout: EncoderLayout, **fields: str
) -> list[Conversion]:
    """Return the conversions of a model's tensors by a table that has the rows of `encoder_table`, and its fields."""
    entries = apply_table(names, table, first=1, prefix=layout.prefix, **fields)
    if not layout.scan:
        return entries
    return [_of_stack(entry) if entry.ours.startswith("blocks.") else entry for entry in entries]


def projections(ours: str, theirs: str, parts: tuple[str, ...], heads: int) -> NameTable:
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


def out_projection(ours: str, theirs: str, heads: int) -> NameTable:
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
