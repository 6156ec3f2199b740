"""Attention rollout: which parts of the image reach the output (paper, section 4.5 and Figures 6 and 14).

"Quantifying Attention Flow in Transformers" (Abnar and Zuidema, 2020), computed as the paper's authors do:
the heads of a layer are averaged, the identity is added for the residual, rows are normalised to sum to 1,
and the layers are multiplied in order. The row of the product for what the classifier reads (`reading`) says
what that is made of. It knows neither values nor classes; `relevance` does.

What the method leaves open is decided so:

* Relative positions act on the logits, so the maps contain them already.
* Registers are tokens like others: what passes through them counts for the patches it came from.
* The branches of a parallel layer are averaged like heads. Heads, too, are maps over the same input whose
  results are summed into the same residual, and rollout gives that sum one weight: the residual's. Treating
  branches as layers in a row instead would let one pass on what it never saw.
* The two halves of an axial layer are two layers with a residual each. Attention along a row is a map over the
  whole grid that is zero outside the row, so their product reaches everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.inspection.reading import need_vit, reading
from vitrail.model.posemb import Grid
from vitrail.model.taps import AttentionMap, tap_attention
from vitrail.model.vit import ViT


def rollout(model: ViT, images: Tensor) -> Tensor:
    """Return the share of each grid token in the output, [batch, rows, columns] in float32, not negative.

    images as the model takes them. Shares of the class token itself and its like are left out, so a map sums to
    at most 1. Holds one layer's maps at a time. Raises UsageError for a network that is no ViT.
    """
    need_vit(model, "attention rollout")
    grid = model.grid(images)
    flow = _Flow(grid)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), tap_attention(model, flow.receive):
            row = reading(model, model.encode(model.embed(images), grid, read=model.pool.reads), grid)
    finally:
        model.train(training)
    with torch.inference_mode():
        shares = torch.einsum("bq,bqk->bk", row, flow.joint())[:, model.config.prefix :]
    return shares.reshape(len(images), *grid).clone()


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
