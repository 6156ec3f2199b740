"""big_vision's .npz: Vision Transformers, alone or as the image tower of SigLIP and similar models.

The names are those of `encoder.py` in the linen numbering, and

| theirs | shape | ours |
|---|---|---|
| `pos_embedding` | (1, N, D); absent if positions are computed | `positions.embedding` |
| `MAPHead_0/probe` | (1, 1, D) | `pool.probe` |
| `MAPHead_0/MultiHeadDotProductAttention_0/query` | kernel (D, H, E), bias (H, E) | `pool.query` |
| `.../{key,value}` | (D, H, E); (H, E) each | `pool.key_value` |
| `.../out` | (H, E, D); (D) | `pool.out` |
| `MAPHead_0/LayerNorm_0` | scale, bias (D) | `pool.norm` |
| `MAPHead_0/MlpBlock_0/Dense_0`, `Dense_1` | (D, M) and (M, D) | `pool.mlp.fc1`, `fc2` |

The class token, if there is one, is appended after the positions are added, and has no position. Older files have one
more row, for the class token, or have the table under Google's name. (big_vision's `fix_old_checkpoints` in
`models/vit.py` adds that row to `cls`. It stays separate here, so that the file can be written back unchanged.) A file
with neither class token nor MAP head has average pooling. Evaluation resizes the short side and crops 7/8 of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.flax import encoder as flax
from vitrail.weights.flax.write import expressible, found_dtypes, write_npz
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, state_of
from vitrail.weights.mapping import Conversion, NameTable, dense, scale_bias, within

POSITIONS = "pos_embedding"
OLD_POSITIONS = "Transformer/posembed_input/pos_embedding"
ASSUMED_SIZE = 224
DEFAULT = flax.EncoderLayout(prefix="params/", naming="linen")


@dataclass(frozen=True)
class BigVision:
    """The format of google-research/big_vision."""

    name: str = "big_vision"

    def recognises(self, archive: Archive) -> bool:
        """Return whether there is a patch embedding, and big_vision's positions, scanned layers or MAP head."""
        prefix = flax.find_prefix(archive)
        return prefix is not None and flax.is_big_vision(archive, prefix)

    def find(self, archive: Archive) -> ForeignModel:
        """Infer the model from the shapes. Raises WeightsError that names the tensor that does not fit."""
        prefix = flax.find_prefix(archive)
        if prefix is None:
            raise WeightsError(
                f"{archive.path} is not in big_vision's format: it has no embedding/kernel and no encoder"
            )
        layout = flax.find_layout(archive, prefix)
        positions = OLD_POSITIONS if f"{prefix}{OLD_POSITIONS}" in archive else POSITIONS
        config, said = _config(archive, layout, positions)
        unused = flax.unused_tensors(archive, prefix)
        origin = {"format": self.name, "file": archive.path.name, **asdict(layout), "positions": positions}
        card = Card(
            config,
            preprocess=Preprocess(config.image_size, resize="small", crop=0.875),
            source=self.name,
            provenance={"origin": {**origin, **found_dtypes(archive, archive.names - unused.keys())}},
        )
        said += flax.projector_note(prefix, config.classes)
        entries = _conversions(expected(config, archive.path), config, layout, positions)
        return ForeignModel(card, entries, unused, assumptions=said)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model under its original names; a model of another format gets `params/` and separate layers.

        Raises WeightsError if the format cannot hold the model, or if its readers would compute something else: see
        `flax/write.py`.
        """
        config = expressible(model, self.name, has="positions=sincos cls_position pool=map")
        _check_positions(config)
        origin = origin_of(card, self.name)
        layout = flax.EncoderLayout(**{key: origin.get(key, value) for key, value in asdict(DEFAULT).items()})
        state = state_of(model)
        entries = _conversions(state, config, layout, origin.get("positions", POSITIONS))
        write_npz(path, foreign_tensors(state, entries, self.name), origin)


def _config(archive: Archive, layout: flax.EncoderLayout, positions: str) -> tuple[ViTConfig, list[str]]:
    """Return the config, and what is assumed for it."""
    prefix = layout.prefix
    sizes: dict[str, Any] = {**flax.top_sizes(archive, prefix), **flax.encoder_sizes(archive, layout)}
    sizes["patch"] = patch = flax.patch_size(archive, prefix)
    sizes["pool"] = pool = _pool(archive, prefix, sizes["heads"])
    if f"{prefix}{positions}" in archive:
        rows = flax.named_axes(archive, f"{prefix}{positions}", "1", "positions", "width")[1]
        grid, sizes["cls_position"] = _read_positions(rows)
        if sizes["cls_position"] and pool != "cls":
            raise WeightsError(
                f"{archive.path}: '{prefix}{positions}' has {rows} rows, one of them for a class token, but the file "
                "has no class token"
            )
        said = flax.assumed_grid(grid, f"{prefix}{positions}")
    else:
        grid, sizes["positions"], sizes["cls_position"] = _computed(archive, layout, patch), "sincos", False
        said = [
            f"positions are sines and cosines, because there is no {prefix}{positions}, and the image size is "
            f"{grid[0] * patch} x {grid[1] * patch} px, because the file does not contain it"
        ]
    image_size = (grid[0] * patch, grid[1] * patch)
    return flax.build_config(archive, **sizes, image_size=image_size, gelu="tanh", resize_mode="official"), said


def _pool(archive: Archive, prefix: str, heads: int) -> str:
    if f"{prefix}MAPHead_0/probe" not in archive:
        return "cls" if f"{prefix}cls" in archive else "gap"
    if f"{prefix}cls" in archive:
        raise WeightsError(
            f"{archive.path} has both '{prefix}cls' and a MAP head; big_vision's models have only one of them"
        )
    name = f"{prefix}MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"
    shape = flax.named_axes(archive, name, "width", "heads", "features of a head")
    if shape[1] != heads:
        raise WeightsError(
            f"{archive.path}: {name!r} has {shape[1]} heads and the encoder has {heads}; they must be equal"
        )
    return "map"


def _read_positions(rows: int) -> tuple[tuple[int, int], bool]:
    """Return the grid of a table, and whether its first row is for the class token, which makes the rest a square."""
    front = math.isqrt(rows) ** 2 + 1 == rows
    return flax.grid_of(rows - front), front


def _check_positions(config: ViTConfig) -> None:
    """Raise WeightsError if a reader would infer another grid from the number of positions."""
    if config.positions == "sincos":
        return
    front = config.pool == "cls" and config.cls_position
    rows, columns = config.grid
    if (read := _read_positions(front + rows * columns)) != (config.grid, front):
        row = " and a row for the class token" * read[1]
        raise WeightsError(
            f"format 'big_vision' stores the number of positions but not the grid. The {front + rows * columns} "
            f"positions of this model's grid of {rows} x {columns} would be read as {read[0][0]} x {read[0][1]}{row}. "
            "Save as 'vitrail', or load the model with a square image_size first."
        )


def _computed(archive: Archive, layout: flax.EncoderLayout, patch: int) -> tuple[int, int]:
    """Return the grid that is assumed for a model without a table of positions."""
    if layout.naming != "linen":
        raise WeightsError(f"{archive.path} lacks the tensor '{layout.prefix}{OLD_POSITIONS}' (1, positions, width)")
    side = max(ASSUMED_SIZE // patch, 1)
    return side, side


def _conversions(
    names: Iterable[str], config: ViTConfig, layout: flax.EncoderLayout, positions: str
) -> list[Conversion]:
    """Return the conversions of all tensors; `positions` is the name of the table of positions."""
    attention = "MultiHeadDotProductAttention_0"
    head: NameTable = {
        "probe": "probe",
        **flax.projections("query", attention, ("query",), config.heads),
        **flax.projections("key_value", attention, ("key", "value"), config.heads),
        **flax.out_projection("out", f"{attention}/out", config.heads),
        **scale_bias("norm", "LayerNorm_0"),
        **dense("mlp.fc1", "MlpBlock_0/Dense_0"),
        **dense("mlp.fc2", "MlpBlock_0/Dense_1"),
    }
    table = {
        **flax.encoder_table(layout, config.heads),
        "positions.embedding": "{prefix}{positions}",
        **within("pool.", "{prefix}MAPHead_0/", head),
    }
    return flax.encoder_conversions(names, table, layout, positions=positions)


FORMAT = BigVision()
