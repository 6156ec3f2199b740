"""Attention rollout: which parts of the image reach the output (paper, section 4.5 and Figures 6 and 14).

"Quantifying Attention Flow in Transformers" (Abnar and Zuidema, 2020), computed as the paper's authors do:
the heads of a layer are averaged, the identity is added for the residual, rows are normalised to sum to 1,
and the layers are multiplied in order. The row of the product for the classifier's input (`pooling_weights`) is the
share of each token in it. Rollout uses neither values nor classes; `relevance` does.

Decisions that the method leaves open:

* Relative positions act on the logits, so the maps contain them already.
* Registers are ordinary tokens: what passes through them counts for the patches it came from.
* The branches of a parallel layer are averaged like heads. Heads, too, are maps over the same input whose
  results are summed into the same residual, and rollout gives that sum one weight: the residual's. Treating
  branches as sequential layers would let one branch pass on information that it never received.
* The two halves of an axial layer are two layers with a residual each. Attention along a row is a map over the
  whole grid that is zero outside the row, so their product reaches everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.inspection.maps import on_grid, pooling_weights, require_vit
from vitrail.model.build import eval_mode
from vitrail.model.posemb import Grid
from vitrail.model.record import AttentionMap, tap_attention
from vitrail.model.vit import ViT


def rollout(model: ViT, images: Tensor) -> Tensor:
    """Return the share of each grid token in the output, [batch, rows, columns] in float32, not negative.

    `images` are the model's input. Shares of the class token and other prefix tokens are left out, so a map sums to at
    most 1. Memory holds the maps of one layer. Raises UsageError for other networks.
    """
    require_vit(model, "attention rollout")
    grid = model.grid(images)
    flow = _Flow(grid)
    with eval_mode(model), torch.inference_mode(), tap_attention(model, flow.receive):
        row = pooling_weights(model, model.encode(model.embed(images), grid, num_queries=model.pool.reads), grid)
    with torch.inference_mode():
        shares = torch.einsum("bq,bqk->bk", row, flow.joint())[:, model.config.prefix :]
    return shares.reshape(len(images), *grid).clone()


class _Flow:
    """The product of the layers' maps, multiplied as they arrive."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.place: tuple[int, str | None] | None = None
        self.branches: list[Tensor] = []
        self.product: Tensor | None = None

    def receive(self, attention: AttentionMap) -> None:
        """Add the maps of one attention. The branches of a layer arrive in sequence."""
        place = (attention.layer, attention.axis)
        if place != self.place:
            self._close_layer()
            self.place = place
        heads_mean = attention.maps.float().mean(dim=1)
        self.branches.append(on_grid(heads_mean, attention.axis, self.grid))

    def joint(self) -> Tensor:
        """Return A_n ... A_2 A_1, [batch, tokens, tokens]; rows sum to 1."""
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
