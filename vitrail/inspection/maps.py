"""The attention maps themselves: what each head of a layer lets into what the classifier reads.

Of every map, the row of the class token is shown, or where an average over the grid is read, the mean row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.inspection.reading import average_reading, need_vit
from vitrail.model.posemb import Grid
from vitrail.model.taps import AttentionMap, tap_attention
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class HeadMaps:
    """One attention of a layer, seen from what is read."""

    layer: int
    branch: int
    axis: str | None
    shares: Tensor
    """[batch, heads, rows, columns] in float32: attention to each patch, summing to 1 less that to the prefix."""


def head_maps(model: ViT, images: Tensor, layer: int = -1, head: int | None = None) -> list[HeadMaps]:
    """Return the maps of a layer, one entry for each of its attentions; of one head, or of all.

    Parallel blocks have an attention for each branch, axial ones two, whose lines are put back onto the grid.
    What is kept of a map is one row. Raises UsageError for a layer or head that is not there, and for a network
    that is no ViT.
    """
    need_vit(model, "an attention map")
    grid, config = model.grid(images), model.config
    row = average_reading(config, grid).to(images.device)
    found: list[HeadMaps] = []

    def receive(one: AttentionMap) -> None:
        shares = _along(one, grid) if one.axis else torch.einsum("q,bhqk->bhk", row, one.maps)[:, :, config.prefix :]
        place = (one.layer, one.branch, one.axis)
        found.append(HeadMaps(*place, shares.reshape(len(images), -1, *grid).clone()))

    training = model.training
    model.eval()
    heads = None if head is None else [head]
    try:
        with torch.no_grad(), tap_attention(model, receive, [layer], heads):
            model.features(images)
    finally:
        model.train(training)
    return found


def _along(one: AttentionMap, grid: Grid) -> Tensor:
    """Mean attention of a line's tokens to each other, every line with the same weight: [batch, heads, tokens]."""
    lines = grid[0] if one.axis == "row" else grid[1]
    shares = one.maps.mean(dim=2).unflatten(0, (-1, lines)) / lines  # [batch, lines, heads, length]
    shares = shares.transpose(1, 2)
    return (shares if one.axis == "row" else shares.transpose(2, 3)).flatten(2)
