"""What one patch attends to: its row of a layer's attention maps, over the grid."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.maps import HeadMaps
from vitrail.inspection.reading import need_vit
from vitrail.model.posemb import Grid
from vitrail.model.taps import AttentionMap, tap_attention
from vitrail.model.vit import ViT


def patch_attention(
    model: ViT, images: Tensor, patch: tuple[int, int], layer: int = -1, head: int | None = None
) -> list[HeadMaps]:
    """Return what the patch at (row, column) of the grid attends to in a layer, one entry for each attention of it.

    Of one head, or of all. Shares to the class token and its like are left out, so a map sums to at most 1; in an
    axial block the patch attends along its row, and along its column, and to nothing else. Raises UsageError for
    a patch, layer or head that is not there, and for a network that is no ViT.
    """
    need_vit(model, "an attention map")
    grid, prefix = model.grid(images), model.config.prefix
    if not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
        raise UsageError(f"no patch {patch[0]}, {patch[1]}: the grid has {grid[0]} rows and {grid[1]} columns, from 0")
    found: list[HeadMaps] = []

    def receive(one: AttentionMap) -> None:
        if one.axis:
            shares = _along(one, patch, grid)
        else:
            shares = one.maps[:, :, prefix + patch[0] * grid[1] + patch[1], prefix:].unflatten(2, grid)
        found.append(HeadMaps(one.layer, one.branch, one.axis, shares.float().clone()))

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), tap_attention(model, receive, [layer], None if head is None else [head]):
            model.features(images)
    finally:
        model.train(training)
    return found


def _along(one: AttentionMap, patch: tuple[int, int], grid: Grid) -> Tensor:
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
