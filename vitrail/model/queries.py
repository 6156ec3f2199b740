"""Queries: learned tokens in the last blocks of a plain ViT, each of which predicts a class and a mask.

Source: Kerssies et al. 2025, "Your ViT is Secretly an Image Segmentation Model" (EoMT), and its code. The queries join
the tokens before the last blocks. Behind the LayerNorm of Eq. 4, a linear layer tells the class of each query, with one
class more for "no object", and the product of an MLP of the query with the patches' tokens, which are scaled up, is its
mask. In training the queries of some blocks see only the patches in the mask that they predict before the block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitrail.model.layers import Conv2d, dense, dense_after_gelu, new_linear
from vitrail.model.posemb import Grid, Queried
from vitrail.model.stem import LayerNorm2d

if TYPE_CHECKING:
    from vitrail.model.vit import ViT


class Answers(NamedTuple):
    """What queries predict for a batch of images."""

    classes: Tensor
    """Logits [batch, queries, classes + 1]; the last class is "no object"."""
    masks: Tensor
    """Logits [batch, queries, rows, columns], in cells of a part of a patch."""

    def scores(self) -> Tensor:
        """Return the score of each class in each cell, [batch, classes, rows, columns], in 0 to the number of queries.

        It is the sum over the queries of the class's probability times the mask's (Mask2Former's semantic inference).
        """
        classes = self.classes.float().softmax(-1)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", classes, self.masks.float().sigmoid())


class Upscale(nn.Module):
    """Maps [batch, width, rows, columns] -> twice the rows and columns: EoMT's ScaleBlock."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.mix = Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = LayerNorm2d(width, eps=1e-6)

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        return self.norm(self.mix(F.gelu(self.up(maps))))  # type: ignore[no-any-return]


class Queries(nn.Module):
    """The queries of a network with tokens of `width`, and what they predict from.

    They enter before the last `blocks` blocks. The patches' tokens are scaled up to cells of 4 pixels, at least twice.
    All layers begin as torch's do and the queries as a normal distribution, as in EoMT's code.
    """

    def __init__(self, width: int, classes: int, *, count: int = 100, blocks: int = 4, patch: int = 16) -> None:
        super().__init__()
        self.blocks = blocks
        self.tokens = nn.Parameter(torch.empty(1, count, width))
        self.classify = new_linear(width, classes + 1)
        self.mask = nn.ModuleList(new_linear(width, width) for _ in range(3))
        self.upscale = nn.Sequential(*(Upscale(width) for _ in range(max(1, int(math.log2(patch)) - 2))))
        if not self.tokens.is_meta:
            nn.init.normal_(self.tokens)

    @property
    def count(self) -> int:
        """Number of queries."""
        return self.tokens.shape[1]

    def predict(self, tokens: Tensor, grid: Grid) -> Answers:
        """Normalised tokens [batch, prefix + grid + queries, width] -> what the queries predict."""
        queries, count = tokens[:, -self.count :], grid[0] * grid[1]
        maps = rearrange(tokens[:, -self.count - count : -self.count], "b (h w) d -> b d h w", h=grid[0])
        first, second, third = self.mask
        masks = dense_after_gelu(third, dense_after_gelu(second, dense(first, queries)))
        return Answers(dense(self.classify, queries), torch.einsum("bqd,bdhw->bqhw", masks, self.upscale(maps)))


def ask(model: ViT, queries: Queries, images: Tensor, masked: Tensor | None = None) -> list[Answers]:
    """Return what the queries predict after the last block of `model`, for images as the model takes them.

    With `masked`, bool [batch, blocks, queries], the answers before each of the last blocks come first. In a block in
    which a query is masked, it attends to no patch outside of its mask.
    """
    grid = model.grid(images)
    places = torch.arange(grid[0] * grid[1], device=images.device)
    tokens, first, answers = model.embed(images), model.layers - queries.blocks, []
    for layer in range(model.layers):
        if layer < first:
            tokens = model._layer(layer, tokens, places, grid)
            continue
        if layer == first:
            tokens = torch.cat([tokens, queries.tokens.to(tokens.dtype).expand(len(tokens), -1, -1)], dim=1)
        hidden = None
        if masked is not None:
            answers.append(queries.predict(model.norm(tokens), grid))
            hidden = _outside(answers[-1].masks, grid) & masked[:, layer - first, :, None]
        tokens = model._layer(layer, tokens, places, Queried(grid, queries.count, hidden))
    return [*answers, queries.predict(model.norm(tokens), grid)]


@torch.no_grad()
def _outside(masks: Tensor, grid: Grid) -> Tensor:
    """Return which patches are outside of masks [batch, queries, rows, columns], bool [batch, queries, patches]."""
    return (F.interpolate(masks.float(), size=grid, mode="bilinear") <= 0).flatten(2)
