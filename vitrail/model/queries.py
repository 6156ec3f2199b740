"""Queries: learned tokens in the last blocks of a plain ViT, each of which predicts a class and a mask.

Source: Kerssies et al. 2025, "Your ViT is Secretly an Image Segmentation Model" (EoMT), and its code. The queries join
the tokens before the last blocks. Behind the LayerNorm of Eq. 4, a linear layer tells the class of each query, with one
class more for "no object", and the product of an MLP of the query with the patches' tokens, which are scaled up, is its
mask. In training the queries of some blocks see only the patches in the mask that they predict before the block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitrail.model.layers import Conv2d, ConvTranspose2d, dense, dense_after_gelu, new_linear
from vitrail.model.posemb import Grid, Queried
from vitrail.model.segmentation import PixelHead
from vitrail.model.stem import LayerNorm2d
from vitrail.model.variants import ViTConfig

TINY = 1e-12
"""Smallest score of a class in a cell."""


class QueryOutputs(NamedTuple):
    """What queries predict for a batch of images."""

    classes: Tensor
    """Logits [batch, queries, classes + 1]; the last class is "no object"."""
    masks: Tensor
    """Logits [batch, queries, rows, columns], in cells of a part of a patch."""

    def logits(self) -> Tensor:
        """Return the logits of the classes in each cell, float32 [batch, classes, rows, columns].

        They are the logarithm of a sum over the queries, of the class's probability times the mask's: Mask2Former's
        semantic inference, whose scores then add up to 1 after a softmax.
        """
        classes = self.classes.float().softmax(-1)[..., :-1]
        scores = torch.einsum("bqc,bqhw->bchw", classes, self.masks.float().sigmoid())
        return scores.clamp(min=TINY).log()


class Upscale(nn.Module):
    """Maps [batch, width, rows, columns] -> twice the rows and columns: EoMT's ScaleBlock."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = ConvTranspose2d(width, width, 2, 2)
        self.mix = Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = LayerNorm2d(width, eps=1e-6)

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        return self.norm(self.mix(F.gelu(self.up(maps))))  # type: ignore[no-any-return]


def upscalings(patch: int) -> int:
    """Return how many times the patches' tokens are scaled up: to cells of 4 pixels, but at least once."""
    return max(1, patch.bit_length() - 3)


class Queries(PixelHead):
    """The queries of a network, and what they predict from: segmentation "queries"."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.blocks = min(config.query_blocks, config.depth)
        self.tokens = nn.Parameter(torch.empty(1, config.queries, width))
        self.classify = new_linear(width, config.classes + 1)
        self.mask = nn.ModuleList(new_linear(width, width) for _ in range(3))
        self.upscale = nn.Sequential(*(Upscale(width) for _ in range(upscalings(config.patch))))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values: the queries from a normal distribution, layers as torch does (EoMT's code)."""
        if self.tokens.is_meta:
            return
        nn.init.normal_(self.tokens)
        parts: list[Any] = [part for part in self.modules() if part is not self and hasattr(part, "reset_parameters")]
        for part in parts:
            part.reset_parameters()

    def forward(self, network: Any, images: Tensor) -> Tensor:
        """See `PixelHead`."""
        return self.ask(network, images)[-1].logits()

    def ask(self, network: Any, images: Tensor, masked: Tensor | None = None) -> list[QueryOutputs]:
        """Return what the queries predict after the last block of the network, for images as it takes them.

        With `masked`, bool [batch, blocks, queries], the answers before each of the last blocks come first. In a block
        in which a query is masked, it attends to no patch outside of its mask.
        """
        grid = network.grid(images)
        places = torch.arange(grid[0] * grid[1], device=images.device)
        tokens, first, answers = network.embed(images), network.layers - self.blocks, []
        for layer in range(first):
            tokens = network._layer(layer, tokens, places, grid)
        tokens = torch.cat([tokens, self.tokens.to(tokens.dtype).expand(tokens.shape[0], -1, -1)], dim=1)
        for block in range(self.blocks):
            hidden = None
            if masked is not None:
                answers.append(self._answers(network.norm(tokens), grid))
                hidden = _outside(answers[-1].masks, grid) & masked[:, block, :, None]
            tokens = network._layer(first + block, tokens, places, Queried(grid, self.tokens.shape[1], hidden))
        return [*answers, self._answers(network.norm(tokens), grid)]

    def _answers(self, tokens: Tensor, grid: Grid) -> QueryOutputs:
        """Normalised tokens [batch, prefix + grid + queries, width] -> what the queries predict."""
        count, patches = self.tokens.shape[1], grid[0] * grid[1]
        queries = tokens[:, -count:]
        maps = rearrange(tokens[:, -count - patches : -count], "b (h w) d -> b d h w", h=grid[0])
        first, second, third = self.mask
        masks = dense_after_gelu(third, dense_after_gelu(second, dense(first, queries)))
        return QueryOutputs(dense(self.classify, queries), torch.einsum("bqd,bdhw->bqhw", masks, self.upscale(maps)))


@torch.no_grad()
def _outside(masks: Tensor, grid: Grid) -> Tensor:
    """Return which patches are outside of masks [batch, queries, rows, columns], bool [batch, queries, patches]."""
    return (F.interpolate(masks.float(), size=grid, mode="bilinear") <= 0).flatten(2)
