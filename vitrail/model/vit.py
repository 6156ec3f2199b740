"""The Vision Transformer, Eq. 1-4 of "An Image is Worth 16x16 Words". Read this first.

z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos         (1)  embed
z'_l = MSA(LN(z_{l-1})) + z_{l-1}                       (2)  block.Block, attention branch
z_l  = MLP(LN(z'_l)) + z'_l                             (3)  block.Block, MLP branch
y    = LN(z_L^0)                                        (4)  encode, summary
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.block import build_blocks
from vitrail.model.head import PreLogits, build_heads, build_pool
from vitrail.model.init import init_weights
from vitrail.model.layers import LayerNorm
from vitrail.model.posemb import Grid, build_positions
from vitrail.model.stems.convolutional import build_stem
from vitrail.model.stems.patch import normalise, pixel_statistics
from vitrail.model.variants import ViTConfig


class ViT(nn.Module):
    """images [batch, channels, height, width] -> logits [batch, classes].

    uint8 images are normalised inside with the config's mean and std; float images are taken as normalised.
    Height and width may be anything divisible by the patch: positions are resampled as they are needed.
    Raises UsageError for images that do not fit.
    """

    card: Any = None
    """Where the weights come from (`vitrail.weights.card.Card`); set by whoever loads them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = build_stem(config)
        self.cls = nn.Parameter(torch.empty(1, 1, config.width)) if config.has_class_token else None
        self.dist = nn.Parameter(torch.empty(1, 1, config.width)) if config.distilled else None
        self.registers = nn.Parameter(torch.empty(1, config.registers, config.width)) if config.registers else None
        self.positions = build_positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = build_blocks(config, self.positions)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.pool = build_pool(config)
        self.pre_logits = PreLogits(config.pooled, config.pre_logits) if config.pre_logits else nn.Identity()
        self.head, self.head_dist = build_heads(config)
        scale, shift = pixel_statistics(config.mean, config.std)
        self.register_buffer("pixel_scale", scale, persistent=False)
        self.register_buffer("pixel_shift", shift, persistent=False)
        self.pixel_scale: Tensor
        self.pixel_shift: Tensor
        init_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return self.classify(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """What the classifier sees: [batch, pre_logits or config.pooled]; of two tokens, one after the other."""
        return self.summary(self.encode(self.embed(images), self.grid(images), read=self.pool.reads))

    def embed(self, images: Tensor) -> Tensor:
        """Eq. 1: images -> tokens [batch, prefix + grid, width].

        The prefix is class token, distillation token and registers, those there are; the grid is in raster order.
        """
        return self.place(self.patches(images), self.grid(images))

    def patches(self, images: Tensor) -> Tensor:
        """E x_p of Eq. 1: images -> patch embeddings [batch, grid, width] without positions, in raster order."""
        self.grid(images)  # refuses what does not fit
        if images.dtype == torch.uint8 and not getattr(self.stem, "folds_pixels", False):
            images = normalise(images, self.pixel_scale, self.pixel_shift).to(self.norm.weight.dtype)
        return rearrange(self.stem(images), "b d h w -> b (h w) d")

    def place(self, patches: Tensor, grid: Grid) -> Tensor:
        """The rest of Eq. 1: patch embeddings [batch, grid, width] -> tokens with the prefix in front, and E_pos."""
        prefix = (self.cls, self.dist, self.registers)
        front = [token.expand(patches.shape[0], -1, -1) for token in prefix if token is not None]
        tokens = torch.cat([*front, patches], dim=1) if front else patches
        positions = self.positions.tokens(None, grid)
        return self.dropout(tokens if positions is None else tokens + positions)

    def encode(
        self, tokens: Tensor, grid: Grid | None = None, keep: Tensor | None = None, read: int | None = None
    ) -> Tensor:
        """Eq. 2, 3 for every layer, then the LayerNorm of Eq. 4, unless `config.final_norm` is "pooled".

        tokens [batch, prefix + grid, width] -> [batch, prefix + kept, width]. `grid` is (rows, columns) where
        it is not the config's; `keep` [batch, kept] are the raster indices of the grid tokens to go on with
        (masked pre-training), all of them by default. `read` returns the first so many tokens and spares the
        last layer the work on the others: for a class token about 7 % of B/16's cost, at no change of the result.
        """
        grid = grid or self.config.grid
        prefix = self.config.prefix
        places = torch.arange(grid[0] * grid[1], device=tokens.device)
        if keep is not None:
            tokens, places = _take(tokens, keep, prefix), keep
        for layer, block in enumerate(self.blocks):
            positions = self.positions.tokens(layer, grid)
            if positions is not None:
                tokens = tokens + (positions if keep is None else _take(positions, keep, prefix))
            tokens = block(tokens, places, grid, read if layer == self.config.depth - 1 else None)
        return self.norm(tokens) if self.config.final_norm == "tokens" else tokens

    def summary(self, tokens: Tensor) -> Tensor:
        """Encoded tokens [batch, prefix + kept, width] -> features: pool, its LayerNorm if there, pre-logits."""
        pooled = self.pool(tokens, self.config.prefix)
        if self.config.final_norm == "pooled":
            pooled = self.norm(pooled.unflatten(-1, (-1, self.config.width))).flatten(-2)
        return self.pre_logits(pooled)

    def classify(self, features: Tensor) -> Tensor:
        """Features -> logits [batch, classes]; without a classifier the features themselves."""
        if self.head is None:
            return features
        if self.head_dist is None:
            return self.head(features)
        cls, dist = features.chunk(2, dim=-1)
        return (self.head(cls) + self.head_dist(dist)) / 2

    def grid(self, images: Tensor) -> Grid:
        """Rows and columns of tokens that these images give."""
        channels, height, width = images.shape[-3:]
        patch = self.config.patch
        if height % patch or width % patch or channels != self.config.channels:
            raise UsageError(
                f"images of {channels} channels and {height} x {width} pixels do not fit this model: it takes "
                f"{self.config.channels} channels and sides divisible by {patch}"
            )
        return height // patch, width // patch

    def reset_head(self, classes: int) -> None:
        """Replace the whole head by a zero-initialised linear layer (fine-tuning, section 3.2); 0 leaves none.

        A distilled model keeps both tokens and gets two such layers, as in DeiT's code.
        """
        self.config = replace(self.config, classes=classes, pre_logits=None)
        self.pre_logits = nn.Identity()
        self.head, self.head_dist = build_heads(self.config, self.norm.weight.device, self.norm.weight.dtype)
        for head in (self.head, self.head_dist):
            if head is not None:
                nn.init.zeros_(head.weight)
                nn.init.zeros_(head.bias)


def _take(tokens: Tensor, keep: Tensor, prefix: int) -> Tensor:
    """The prefix and the grid tokens at `keep` [batch, kept]."""
    tokens = tokens.expand(len(keep), -1, -1)
    grid = tokens[:, prefix:].gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]))
    return torch.cat([tokens[:, :prefix], grid], dim=1)
