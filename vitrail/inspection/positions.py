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
    copy, count = layer % positions.copies, config.grid[0] * config.grid[1]
    places, quantity = torch.arange(count), COSINE
    of_layer = f", layer {layer}" if positions.copies > 1 else ""
    if config.positions == "none":
        rotation = positions.rotation(layer, places.to(model.like.device), config.grid)
        if rotation is None:
            raise UsageError("this model has no position embeddings: it sees an image as a bag of patches")
        cos, sin = (part[config.prefix :].cpu().double().flatten(1) for part in (rotation.cos, rotation.sin))
        values, quantity = (cos @ cos.T + sin @ sin.T) / cos.shape[1], "mean cosine of angles"
        about = f"rotary positions{f', layer {layer}' if rotation.cos.shape[1] > 1 else ''}"
    elif isinstance(positions, Relative):  # embedding [2 n - 1, features] of q - k, offset 0 at n - 1
        embedding = positions.embedding[copy].cpu().double()
        alike = _cosines(embedding, embedding[count - 1 : count])[:, 0]
        values = alike[places[:, None] - places + count - 1]
        about = f"relative positions{of_layer}: each offset against offset 0"
    elif isinstance(positions, RelativeBias):
        rows = bias_rows(places, config.grid, class_token=False)
        values, quantity = positions.bias[copy].cpu().double().mean(dim=1)[rows], "added to the logit"
        about = f"relative positions{of_layer}: bias, mean over heads"
    else:
        table = positions.table(copy, config.grid)
        if table is None:  # of the user's own
            raise UsageError("these positions are the user's own, and have no table to show")
        grid = table[0, table.shape[1] - count :].cpu().double()
        values = _cosines(grid, grid)
        kinds = {"1d": "learned 1-D", "2d": "learned 2-D", "sincos": "fixed sine and cosine"}
        about = f"{kinds.get(str(config.positions), type(positions).__name__)} positions{of_layer}"
    tiles = values.reshape(*config.grid, *config.grid).numpy().astype(np.float32)
    return PositionTiles(tiles, quantity, about)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """[n, width], [m, width] -> [n, m], in float64, where no square overflows; 0 if an embedding is 0."""
    return F.normalize(a, dim=1, eps=1e-30) @ F.normalize(b, dim=1, eps=1e-30).T
