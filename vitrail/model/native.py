"""Images of any shape in one batch (NaViT; SigLIP 2 NaFlex): the grids of strips, and what they change in a network.

A strip (`vitrail.strip`) is one patch wide, so the stem turns it into a column of patch embeddings, the head's first.
Each image has positions for its own grid; the tokens behind its last patch are seen by no query and by no pool. So the
result for an image is that which it has alone, as a picture of its own shape.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.model.layers import Constants
from vitrail.model.limits import ResizeMode
from vitrail.model.resize import resize_positions
from vitrail.strip import BITS, longest_side

UNSEEN = -1e4
"""What is added to the logits of empty tokens: finite in float16, and its exponential is 0."""


class Grids(NamedTuple):
    """The grids of a batch of strips."""

    rows: Tensor
    """int64 [batch]"""
    columns: Tensor
    """int64 [batch]"""
    tokens: int
    """Number of tokens of each strip, the empty ones too."""

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each token in its grid, int64 [batch, tokens]; empty tokens have any."""
        number = torch.arange(self.tokens, device=self.rows.device)
        last = longest_side(self.tokens) - 1
        return (number // self.columns[:, None]).clamp(max=last), number % self.columns[:, None]

    def filled(self) -> Tensor:
        """Return which tokens are patches of the image, bool [batch, tokens]."""
        return torch.arange(self.tokens, device=self.rows.device) < (self.rows * self.columns)[:, None]

    def mask(self, front: int, like: Tensor) -> Tensor:
        """Return values to add to attention logits [batch, 1, 1, front + tokens], for `front` tokens before these."""
        empty = torch.nn.functional.pad(~self.filled(), (front, 0))
        return empty[:, None, None].to(like.dtype) * UNSEEN


class Unseen:
    """The bias that hides empty tokens from all queries (`vitrail.model.posemb.Bias`)."""

    def __init__(self, grids: Grids, front: int) -> None:
        self.grids, self.front = grids, front

    def __call__(self, query: Tensor) -> Tensor:
        """Queries [batch, heads, n, features] -> [batch, heads, n, front + tokens]."""
        return self.grids.mask(self.front, query).expand(-1, *query.shape[1:3], -1)


def grids_of(head: Tensor, tokens: int) -> Grids:
    """Return the grids of strips whose heads have these pixels [batch, patch * patch], centred on 0.

    Heads of noise name impossible grids, so the sides are clamped.
    """
    bits = (head[:, : 2 * BITS] > 0).unflatten(1, (2, BITS))
    sides = (bits * 2 ** torch.arange(BITS, device=head.device)).sum(-1).clamp(1, longest_side(tokens))
    return Grids(sides[:, 0], sides[:, 1], tokens)


@lru_cache(maxsize=8)
def line_weights(old: int, tokens: int, mode: ResizeMode) -> Tensor:
    """Return how a side of `old` positions is resampled to each length: float32 [lengths + 1, places, old].

    [n, i] are the weights of the old positions at place i of n; n and i go to `longest_side`. Every mode resamples rows
    and columns one after the other.
    """
    longest = longest_side(tokens)
    with torch.inference_mode(False), torch.device("cpu"):  # a skeleton is built on the meta device
        weights, ones = torch.zeros(longest + 1, longest, old), torch.eye(old)[None]
        for length in range(1, longest + 1):
            weights[length, :length] = resize_positions(ones, (old, 1), (length, 1), mode)[0]
    return weights


class Resampler(Constants):
    """Resamples learned positions for the grid of each image of a batch; empty tokens get any values."""

    rows: Tensor
    columns: Tensor

    def __init__(self, grid: tuple[int, int], mode: ResizeMode) -> None:
        tokens = grid[0] * grid[1]
        super().__init__(rows=line_weights(grid[0], tokens, mode), columns=line_weights(grid[1], tokens, mode))

    def forward(self, table: Tensor, grids: Grids) -> Tensor:
        """Positions [rows * columns, width] of one grid -> [batch, tokens, width]."""
        down, across = self._weights(grids)
        return _product((down[..., :, None] * across[..., None, :]).flatten(-2), table)

    def lines(self, rows: Tensor, columns: Tensor, grids: Grids) -> tuple[Tensor, Tensor]:
        """Positions of rows and of columns, [n, width] each -> [batch, tokens, width] each."""
        down, across = self._weights(grids)
        return _product(down, rows), _product(across, columns)

    def _weights(self, grids: Grids) -> tuple[Tensor, Tensor]:
        row, column = grids.places()
        return self.rows[grids.rows[:, None], row], self.columns[grids.columns[:, None], column]


def _product(weights: Tensor, table: Tensor) -> Tensor:
    with torch.autocast(table.device.type, enabled=False):
        return (weights.float() @ table.float()).to(table.dtype)
