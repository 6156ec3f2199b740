"""Attention rollout: which parts of the image reach the output (paper, section 4.5 and Figure 6).

"Quantifying Attention Flow in Transformers" (Abnar and Zuidema, 2020), computed as the paper's authors do:
the heads of a layer are averaged, the identity is added for the residual, rows are normalised to sum to 1,
and the layers are multiplied in order. The class token's row of the product says what it is made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.model.posemb import Grid
from vitrail.model.taps import AttentionMap, tap_attention
from vitrail.model.vit import ViT


def rollout(model: ViT, images: Tensor) -> Tensor:
    """Return the share of each grid token in the output, [batch, rows, columns] in float32, not negative.

    images as the model takes them. It is the row of the product for what the pool reads: the class token, the
    mean of it and the distillation token, the grid's mean row (GAP, MAP), or the mean of that and the class
    token. Shares of the class token itself and its like are left out, so a map sums to at most 1. The branches
    of a parallel layer are averaged like heads; the two halves of an axial layer count as layers. Holds one
    layer's maps at a time. Raises UsageError for a network that is no ViT.
    """
    if not isinstance(model, ViT):
        raise UsageError(f"attention rollout needs a Vision Transformer, not a {type(model).__name__}")
    grid, config = model.grid(images), model.config
    flow = _Flow(grid)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), tap_attention(model, flow.receive):
            model.features(images)
    finally:
        model.train(training)
    joint = flow.joint()
    if config.pool == "cls":
        row = joint[:, : 1 + config.distilled].mean(dim=1)
    else:
        row = joint[:, config.prefix :].mean(dim=1)
        row = (row + joint[:, 0]) / 2 if config.pool == "cls+gap" else row
    return row[:, config.prefix :].reshape(len(images), *grid)


class _Flow:
    """Multiplies the layers' maps as they arrive."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.place: tuple[int, str | None] | None = None
        self.branches: list[Tensor] = []
        self.product: Tensor | None = None

    def receive(self, found: AttentionMap) -> None:
        """Take one attention's maps; branches of the same layer come one after the other."""
        place = (found.layer, found.axis)
        if place != self.place:
            self._close_layer()
            self.place = place
        heads_mean = found.maps.float().mean(dim=1)
        self.branches.append(_on_grid(heads_mean, found.axis, self.grid))

    def joint(self) -> Tensor:
        """A_n ... A_2 A_1, [batch, tokens, tokens]; rows sum to 1."""
        self._close_layer()
        assert self.product is not None
        return self.product

    def _close_layer(self) -> None:
        if not self.branches:
            return
        mean = torch.stack(self.branches).mean(dim=0)
        layer = mean + torch.eye(mean.shape[-1], device=mean.device)
        layer = layer / layer.sum(dim=-1, keepdim=True)
        self.product = layer if self.product is None else layer @ self.product
        self.branches = []


def _on_grid(maps: Tensor, axis: str | None, grid: Grid) -> Tensor:
    """Maps along one axis as maps over the whole grid: tokens of other rows (columns) get no attention."""
    rows, columns = grid
    if axis is None:
        return maps
    if axis == "row":
        lines = maps.unflatten(0, (-1, rows))  # [batch, rows, columns, columns]
        full = torch.einsum("brcd,rs->brcsd", lines, torch.eye(rows, device=maps.device))
    else:
        lines = maps.unflatten(0, (-1, columns))  # [batch, columns, rows, rows]
        full = torch.einsum("bcrs,cd->brcsd", lines, torch.eye(columns, device=maps.device))
    return full.reshape(-1, rows * columns, rows * columns)
