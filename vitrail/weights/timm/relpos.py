"""timm's relative positions: BEiT's tables, and the tables and MLPs of its `vit_relpos` and `vit_srelpos` networks.

| network | of each block | of all blocks |
|---|---|---|
| BEiT | `blocks.0.attn.relative_position_bias_table` | `rel_pos_bias.relative_position_bias_table` |
| relpos, "table" | `blocks.0.attn.rel_pos.relative_position_bias_table` | `shared_rel_pos.` and the same |
| relpos, "cr" and "swin" | `blocks.0.attn.rel_pos.mlp.{fc1,fc2}` | `shared_rel_pos.mlp.{fc1,fc2}` |

An MLP computes the bias of an offset from the logarithms of its rows and columns (Liu et al. 2022, Swin Transformer V2,
section 3.3). Its input is the offset itself ("cr"), or the offset as a share of the grid ("swin", whose last layer has
no bias). vitrail has no such MLP. The table of a model (`vitrail.model.posemb.RelativeBias`) holds what the MLP
computes for each offset of the grid. Such a model goes back to timm with a table in place of the MLP.

BEiT's tables end with three rows for the class token. In a relpos network, tables have these rows only if there is a
class token, and an MLP computes no bias for it.
"""

from __future__ import annotations

import math
import re
from math import isqrt
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import Rule, shape_of, stacked
from vitrail.weights.timm.file import TABLE, TimmFile

RelposKind = Literal["", "table", "cr", "swin"]
"""How a relpos network computes its bias; "" for other networks."""
_FIRST, _SHARED = "blocks.0.attn.rel_pos", "shared_rel_pos"
BEIT_TABLES = (f"blocks.0.attn.{TABLE}", f"rel_pos_bias.{TABLE}")
SOURCES = (*BEIT_TABLES, *(f"{place}.{part}" for place in (_FIRST, _SHARED) for part in (TABLE, "mlp.fc2.weight")))
"""One tensor of each kind of relative positions and each place. A file has at most one of them."""
_CLASS_ROWS = 3
"""Number of rows of a table for the class token."""
_SWIN_RANGE, _SWIN_GAIN = 8.0, 16.0
"""In the "swin" kind, offsets are scaled to [-8, 8], and biases are 16 * sigmoid(x)."""
_USUAL_SIZE = 224
"""Height and width of the images in pixels if neither config.json nor the architecture's name says them."""


def relpos_kind(archive: Archive) -> RelposKind:
    """Return how a relpos network computes its bias, "" for other networks."""
    for place in (_FIRST, _SHARED):
        if f"{place}.{TABLE}" in archive:
            return "table"
        if f"{place}.mlp.fc2.weight" in archive:
            return "cr" if f"{place}.mlp.fc2.bias" in archive else "swin"
    return ""


def relative_positions(file: TimmFile, source: str, patch: int, *, class_token: bool) -> dict[str, Any]:
    """Return positions, heads and image size as fields of the config. `source` is the tensor of `SOURCES` in the file.

    Raises WeightsError for a table that fits no grid.
    """
    given = file.image_size()
    grid = None if given is None else (given[0] // patch, given[1] // patch)
    if source.endswith(TABLE):
        offsets, heads = shape_of(file.archive, source, 2)
        more = _CLASS_ROWS if source in BEIT_TABLES or class_token else 0
        grid = _window(file.archive, source, offsets - more, more, grid)
    else:
        heads = shape_of(file.archive, source, 2)[0]
    if grid is None:
        named = re.search(r"_(\d{2,4})$", file.architecture)
        side = int(named[1]) if named else _USUAL_SIZE
        file.notes.append(f"images of {side} x {side} pixels, because config.json does not say the size")
        grid = (side // patch, side // patch)
    place = "every" if source.startswith("blocks.") else "shared"
    size = (grid[0] * patch, grid[1] * patch)
    return dict(positions="relative_bias", place=place, heads=heads, image_size=size)


def _window(archive: Archive, name: str, offsets: int, more: int, given: tuple[int, int] | None) -> tuple[int, int]:
    """Return the grid (rows, columns) of a table with (2 rows - 1) * (2 columns - 1) offsets and `more` rows."""
    if given and offsets == (2 * given[0] - 1) * (2 * given[1] - 1):
        return given
    side = isqrt(max(offsets, 0))
    if side * side != offsets or side % 2 == 0:
        raise WeightsError(
            f"{archive.path}: {name!r} has {offsets + more} rows, which fit no square grid. Add a config.json with "
            "an architecture and pretrained_cfg.input_size."
        )
    return (side + 1) // 2, (side + 1) // 2


def bias_rule(config: ViTConfig, kind: RelposKind) -> Rule:
    """Return the rule of the table of a model; `kind` is that of the file."""
    within, shared = ("rel_pos.", _SHARED) if kind else ("", "rel_pos_bias")
    place = f"{shared}." if config.place == "shared" else f"blocks.{{layer}}.attn.{within}"
    if kind in ("cr", "swin"):
        return _computed(config, kind, place)
    if not kind or config.has_class_token:
        return stacked(f"{place}{TABLE}")
    return Rule(  # tables without rows for a class token, which the model does not have either
        (f"{place}{TABLE}",),
        lambda *tables: F.pad(torch.stack(tables), (0, 0, 0, _CLASS_ROWS)),
        lambda stack: [table[:-_CLASS_ROWS] for table in stack],
    )


def _computed(config: ViTConfig, kind: RelposKind, place: str) -> Rule:
    """Return the rule of MLPs for the tables that they compute for the grid of a config."""
    parts = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")[: 4 if kind == "cr" else 3]

    def read(*tensors: Tensor) -> Tensor:
        layers = [tensors[first : first + len(parts)] for first in range(0, len(tensors), len(parts))]
        return torch.stack([_table(config.grid, kind, *layer) for layer in layers])

    def write(stack: Tensor) -> tuple[Tensor, ...]:
        raise WeightsError("no MLP is known that computes the table of a model: write the table")

    return Rule(tuple(f"{place}mlp.{part}" for part in parts), read, write)


def _table(
    grid: tuple[int, int], kind: RelposKind, first: Tensor, shift: Tensor, last: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Return the table [(2 rows - 1)(2 columns - 1) + 3, heads] that an MLP computes for a grid (rows, columns).

    first [hidden, 2] and shift [hidden] are its hidden layer, last [heads, hidden] and offset [heads] its output.
    """
    axes = []
    for side in grid:
        steps = torch.arange(1 - side, side, dtype=torch.float64, device=first.device)
        if kind == "swin":
            steps = steps / max(side - 1, 1) * _SWIN_RANGE  # a side of one patch has the offset 0 alone
        axes.append(steps.sign() * steps.abs().log1p() / (math.log(8) if kind == "swin" else 1.0))
    places = torch.cartesian_prod(*axes)
    hidden = F.relu(F.linear(places, first.double(), shift.double()))
    bias = F.linear(hidden, last.double(), None if offset is None else offset.double())
    bias = _SWIN_GAIN * bias.sigmoid() if kind == "swin" else bias
    return F.pad(bias, (0, 0, 0, _CLASS_ROWS)).float()
