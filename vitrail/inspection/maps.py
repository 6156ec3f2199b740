"""Attention maps of one layer: of the classifier's input, or of one patch, over the grid of patches.

The classifier's input is a class token, whose row of every map is shown, or an average over the grid, for which the
mean row is shown. `pooling_weights` are the share of every token in it. They sum to 1:

| pool | weights |
|---|---|
| class token | 1 for the class token; in a distilled model half for it and half for the distillation token |
| GAP | the same for every token of the grid |
| class token and GAP | half for the class token, half for the grid |
| MAP | the attention of the probe to its tokens, averaged over heads: the probe is one more layer with one query |

Registers have weight 0, and so does a class token that the pool does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.model.build import eval_mode
from vitrail.model.head import MAPHead
from vitrail.model.posemb import Grid
from vitrail.model.record import AttentionMap, tap_attention
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT


def require_vit(model: object, what: str) -> None:
    """Raise UsageError for any network but a ViT; the message says that `what` needs one."""
    if not isinstance(model, ViT):
        raise UsageError(f"{what} needs a Vision Transformer, not a {type(model).__name__}")


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

    Parallel blocks have one attention per branch, axial blocks have two. `head` selects one head. Raises UsageError for
    a layer or head that does not exist, and for other networks.
    """
    require_vit(model, "an attention map")
    weights = average_pooling_weights(model.config, model.grid(images)).to(images.device)
    return _rows(model, images, layer, head, lambda maps: torch.einsum("q,bhqk->bhk", weights, maps))


def patch_attention(
    model: ViT, images: Tensor, patch: tuple[int, int], layer: int = -1, head: int | None = None
) -> list[HeadMaps]:
    """Return the attention of the patch at (row, column) in a layer, one entry for each attention of the layer.

    Attention to the class token and other prefix tokens is left out, so a map sums to at most 1. In an axial block the
    patch attends only along its row and along its column. Raises UsageError for a patch, layer or head that does not
    exist, and for other networks.
    """
    require_vit(model, "an attention map")
    rows, columns = model.grid(images)
    if not (0 <= patch[0] < rows and 0 <= patch[1] < columns):
        raise UsageError(f"no patch {patch[0]}, {patch[1]}: the grid has {rows} rows and {columns} columns, from 0")
    query = model.config.prefix + patch[0] * columns + patch[1]
    return _rows(model, images, layer, head, lambda maps: maps[:, :, query])


def _rows(model: ViT, images: Tensor, layer: int, head: int | None, row: Callable[[Tensor], Tensor]) -> list[HeadMaps]:
    """Run the network, and reduce the maps of one layer to a row for each head as soon as they are computed.

    `row` maps [batch, heads, tokens, tokens] to [batch, heads, tokens].
    """
    grid = model.grid(images)
    found: list[HeadMaps] = []

    def receive(one: AttentionMap) -> None:
        shares = row(on_grid(one.maps, one.axis, grid))[:, :, model.config.prefix :]
        found.append(HeadMaps(one.layer, one.branch, one.axis, shares.unflatten(2, grid).float().clone()))

    heads = None if head is None else [head]
    with eval_mode(model), torch.no_grad(), tap_attention(model, receive, [layer], heads):
        model.features(images)
    return found


def on_grid(maps: Tensor, axis: str | None, grid: Grid) -> Tensor:
    """Return maps along the rows or columns of a grid as maps over the whole grid: other lines get no attention.

    [batch * lines, ..., length, length] -> [batch, ..., tokens, tokens]; with axis None the maps are whole already.
    """
    rows, columns = grid
    if axis is None:
        return maps
    if axis == "row":
        lines = maps.unflatten(0, (-1, rows))  # [batch, rows, ..., columns, columns]
        full = torch.einsum("br...cd,rs->b...rcsd", lines, torch.eye(rows, device=maps.device))
    else:
        lines = maps.unflatten(0, (-1, columns))  # [batch, columns, ..., rows, rows]
        full = torch.einsum("bc...rs,cd->b...rcsd", lines, torch.eye(columns, device=maps.device))
    return full.flatten(-2).flatten(-3, -2)


def average_pooling_weights(config: ViTConfig, grid: Grid) -> Tensor:
    """Return pooling weights [tokens] in float32, the same for all images; for MAP, those of an average pool."""
    row = torch.zeros(config.prefix + grid[0] * grid[1])
    if config.pool == "cls":
        row[: 1 + config.origin.distilled] = 1 / (1 + config.origin.distilled)
        return row
    row[config.prefix :] = 1 / (grid[0] * grid[1])
    if config.pool == "cls+gap":
        row /= 2
        row[0] = 0.5
    return row


def pooling_weights(model: ViT, encoded: Tensor, grid: Grid) -> Tensor:
    """Return the pooling weights for each image, [batch, prefix + rows * columns] in float32.

    encoded [batch, tokens, width] is the output of `model.encode`; only the tokens that the pool uses are needed.
    """
    row = average_pooling_weights(model.config, grid).to(encoded.device).expand(len(encoded), -1)
    if isinstance(model.pool, MAPHead):
        row = row.clone()
        first = model.pool.first(model.config.prefix)
        maps, _ = model.pool.weigh(encoded[:, first:])
        row[:, first:] = maps.float().mean(dim=1)[:, 0]
    return row
