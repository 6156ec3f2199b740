"""How similar positions are to the network: cosine similarity of position embeddings (paper, Figures 7 and 10).

The tile in row r and column c compares the embedding at (r, c) with those of all positions. Training does not tell
learned embeddings how patches are arranged, but nearby ones become similar, and so do those of a row or a column.

| positions | what is shown |
|---|---|
| 1d, 2d | the learned embeddings of the grid; with one table per layer, those of the given layer |
| sincos | the fixed embeddings in the same way: nothing in them was learned |
| relative | in the tile of a query: the embedding of its offset to each key, compared with that of offset 0 |
| relative_bias | the values added to the attention logits, mean over heads |
| rotary alone | mean cosine of the angles between query and key: their logit if both have the same features |
| none | nothing: a UsageError says so |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.maps import require_vit
from vitrail.model.posemb import Relative, RelativeBias, bias_rows
from vitrail.model.vit import ViT

COSINE = "cosine similarity"


@dataclass(frozen=True)
class PositionTiles:
    """One tile for each position of the grid."""

    values: np.ndarray
    """float32 [rows, columns, rows, columns]: position of the tile, position within it."""
    quantity: str
    """The kind of values: cosine similarity, or added logits."""
    about: str
    """The kind of positions, for a title."""


@torch.no_grad()
def position_tiles(model: ViT, layer: int = 0) -> PositionTiles:
    """Return the tiles of a model at the resolution of its config.

    `layer`, which may be negative, matters if each layer has its own positions. Raises UsageError for a model without
    positions, for other networks, and for a layer that does not exist.
    """
    require_vit(model, "position similarity")
    config, positions = model.config, model.positions
    if not -config.depth <= layer < config.depth:
        raise UsageError(f"no layer {layer}: this model has {config.depth}, numbered 0 to {config.depth - 1}")
    layer %= config.depth
    if config.positions == "none":
        places = torch.arange(config.grid[0] * config.grid[1])
        rotation = positions.rotation(layer, places.to(model.like.device), config.grid)
        if rotation is None:
            raise UsageError("this model has no position embeddings: it sees an image as a bag of patches")
        cos, sin = (part[config.prefix :].cpu().double().flatten(1) for part in (rotation.cos, rotation.sin))
        values = (cos @ cos.T + sin @ sin.T) / cos.shape[1]
        of_layer = f", layer {layer}" if rotation.cos.shape[1] > 1 else ""
        return PositionTiles(_tiles(values, config.grid), "mean cosine of angles", f"rotary positions{of_layer}")
    copy = layer % positions.copies
    of_layer = f", layer {layer}" if positions.copies > 1 else ""
    if isinstance(positions, Relative):
        values, about = _offsets(positions.embedding[copy], config.grid), "each offset against offset 0"
        return PositionTiles(_tiles(values, config.grid), COSINE, f"relative positions{of_layer}: {about}")
    if isinstance(positions, RelativeBias):
        rows = bias_rows(torch.arange(config.grid[0] * config.grid[1]), config.grid, class_token=False)
        values = positions.bias[copy].cpu().double().mean(dim=1)[rows]
        about = f"relative positions{of_layer}: bias, mean over heads"
        return PositionTiles(_tiles(values, config.grid), "added to the logit", about)
    table = positions.table(copy, config.grid)
    if table is None:  # of the user's own
        raise UsageError("these positions are the user's own, and have no table to show")
    grid = table[0, table.shape[1] - config.grid[0] * config.grid[1] :].cpu().double()
    kind = {"1d": "learned 1-D", "2d": "learned 2-D", "sincos": "fixed sine and cosine"}.get(
        str(config.positions), type(positions).__name__
    )
    return PositionTiles(_tiles(_cosines(grid, grid), config.grid), COSINE, f"{kind} positions{of_layer}")


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """[n, width], [m, width] -> [n, m], in float64, where no square overflows; 0 if an embedding is 0."""
    return F.normalize(a, dim=1, eps=1e-30) @ F.normalize(b, dim=1, eps=1e-30).T


def _offsets(embedding: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosines of the embedding of q - k with that of 0, [q, k]; embedding [2 n - 1, features], offset 0 at n - 1."""
    count = grid[0] * grid[1]
    embedding = embedding.cpu().double()
    alike = _cosines(embedding, embedding[count - 1 : count])[:, 0]
    places = torch.arange(count)
    return alike[places[:, None] - places + count - 1]


def _tiles(values: Tensor, grid: tuple[int, int]) -> np.ndarray:
    return values.reshape(*grid, *grid).numpy().astype(np.float32)
