"""Attention maps of one layer: of the classifier's input, or of one patch, over the grid of patches.

The classifier's input is a class token, whose row of every map is shown, or an average over the grid, for which the
mean row is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.network import eval_mode, require_vit
from vitrail.inspection.pooling import average_pooling_weights
from vitrail.model.posemb import Grid
from vitrail.model.record import AttentionMap, tap_attention
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class HeadMaps:
    """The maps of one attention of a layer, one for each head."""

    layer: int
    branch: int
    axis: str | None
    shares: Tensor
    """[batch, heads, rows, columns] in float32: attention to each patch. It sums to 1 with that to the prefix."""


def head_maps(model: ViT, images: Tensor, layer: int = -1, head: int | None = None) -> list[HeadMaps]:
    """Return the attention of the classifier's input in a layer, one entry for each attention of the layer.

    Parallel blocks have one attention per branch. Axial blocks have two, whose lines are put back onto the grid.
    `head` selects one head. Raises UsageError for a layer or head that does not exist, and for other networks.
    """
    require_vit(model, "an attention map")
    grid, prefix = model.grid(images), model.config.prefix
    weights = average_pooling_weights(model.config, grid).to(images.device)

    def reduce(one: AttentionMap) -> Tensor:
        shares = (
            _mean_of_lines(one, grid) if one.axis else torch.einsum("q,bhqk->bhk", weights, one.maps)[:, :, prefix:]
        )
        return shares.reshape(len(images), -1, *grid).clone()

    return _reduced(model, images, layer, head, reduce)


def patch_attention(
    model: ViT, images: Tensor, patch: tuple[int, int], layer: int = -1, head: int | None = None
) -> list[HeadMaps]:
    """Return the attention of the patch at (row, column) in a layer, one entry for each attention of the layer.

    Attention to the class token and other prefix tokens is left out, so a map sums to at most 1. In an axial block the
    patch attends only along its row and along its column. Raises UsageError for a patch, layer or head that does not
    exist, and for other networks.
    """
    require_vit(model, "an attention map")
    grid, prefix = model.grid(images), model.config.prefix
    if not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
        raise UsageError(f"no patch {patch[0]}, {patch[1]}: the grid has {grid[0]} rows and {grid[1]} columns, from 0")

    def reduce(one: AttentionMap) -> Tensor:
        if one.axis:
            return _line_of_patch(one, patch, grid).float().clone()
        row = one.maps[:, :, prefix + patch[0] * grid[1] + patch[1], prefix:]
        return row.unflatten(2, grid).float().clone()

    return _reduced(model, images, layer, head, reduce)


def _reduced(
    model: ViT, images: Tensor, layer: int, head: int | None, reduce: Callable[[AttentionMap], Tensor]
) -> list[HeadMaps]:
    """Run the network and reduce the maps of one layer to [batch, heads, rows, columns] as they are computed."""
    found: list[HeadMaps] = []

    def receive(one: AttentionMap) -> None:
        found.append(HeadMaps(one.layer, one.branch, one.axis, reduce(one)))

    heads = None if head is None else [head]
    with eval_mode(model), torch.no_grad(), tap_attention(model, receive, [layer], heads):
        model.features(images)
    return found


def _mean_of_lines(one: AttentionMap, grid: Grid) -> Tensor:
    """Return the mean attention of a line's tokens, every line with the same weight: [batch, heads, tokens]."""
    lines = grid[0] if one.axis == "row" else grid[1]
    shares = one.maps.mean(dim=2).unflatten(0, (-1, lines)) / lines  # [batch, lines, heads, length]
    shares = shares.transpose(1, 2)
    return (shares if one.axis == "row" else shares.transpose(2, 3)).flatten(2)


def _line_of_patch(one: AttentionMap, patch: tuple[int, int], grid: Grid) -> Tensor:
    """[images * lines, heads, length, length] -> [images, heads, rows, columns], zero outside the patch's line."""
    line, place = patch if one.axis == "row" else patch[::-1]
    lines = grid[0] if one.axis == "row" else grid[1]
    shares = one.maps.unflatten(0, (-1, lines))[:, line, :, place]  # [images, heads, length]
    full = shares.new_zeros(*shares.shape[:2], *grid)
    if one.axis == "row":
        full[:, :, line] = shares
    else:
        full[:, :, :, line] = shares
    return full
