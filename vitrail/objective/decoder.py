"""The light decoder of a masked autoencoder: encoded visible patches -> pixels of all patches (He et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.block import build_blocks
from vitrail.model.init import init_weights
from vitrail.model.layers import LayerNorm, dense, new_linear
from vitrail.model.posemb import Grid, Positions, sincos_2d
from vitrail.model.variants import Origin, ViTConfig
from vitrail.objective.settings import MAE


def decoder_config(encoder: ViTConfig, config: MAE) -> ViTConfig:
    """Return the decoder's config: no class token, no positions, no stochastic depth."""
    if config.decoder_width % 4 or config.decoder_width % config.decoder_heads or config.decoder_depth < 1:
        raise UsageError(
            f"objective.decoder_width is {config.decoder_width}, decoder_heads {config.decoder_heads}, decoder_depth "
            f"{config.decoder_depth}: the width must be divisible by 4 and by the heads, and the depth at least 1"
        )
    return ViTConfig(
        width=config.decoder_width,
        depth=config.decoder_depth,
        heads=config.decoder_heads,
        mlp_dim=4 * config.decoder_width,
        patch=encoder.patch,
        image_size=encoder.image_size,
        channels=encoder.channels,
        classes=0,
        positions="none",
        pool="gap",
        origin=Origin(norm_eps=encoder.origin.norm_eps, gelu=encoder.origin.gelu),
    )


class Decoder(nn.Module):
    """latent [batch, prefix + visible, encoder's width] -> pixels [batch, patches, patch * patch * channels].

    The pixels of a patch are in the order row, column, channel, as in MAE's code.
    """

    def __init__(self, encoder: ViTConfig, config: MAE) -> None:
        super().__init__()
        own = decoder_config(encoder, config)
        self.prefix = encoder.prefix
        self.embed = new_linear(encoder.width, own.width)
        self.mask = nn.Parameter(torch.empty(own.width))
        self.blocks = build_blocks(own, Positions(own))
        self.norm = LayerNorm(own.width, eps=own.origin.norm_eps)
        self.predict = new_linear(own.width, own.patch**2 * own.channels)
        init_weights(self)
        nn.init.normal_(self.mask, std=0.02)
        for layer in (self.embed, self.predict):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, latent: Tensor, keep: Tensor, grid: Grid) -> Tensor:
        """See the class; `keep` [batch, visible] are the raster numbers of the visible patches in `grid`."""
        tokens = dense(self.embed, latent)
        front, seen = tokens[:, : self.prefix], tokens[:, self.prefix :]
        batch, count, width = len(tokens), grid[0] * grid[1], tokens.shape[-1]
        every = self.mask.to(tokens.dtype).expand(batch, count, width)
        every = every.scatter(1, keep[..., None].expand(-1, -1, width), seen)
        every = every + mae_positions(grid, width).to(tokens)
        tokens = torch.cat([front, every], dim=1)
        places = torch.arange(count, device=tokens.device)
        for block in self.blocks:
            tokens = block(tokens, places, grid)
        return dense(self.predict, self.norm(tokens)[:, self.prefix :])


def mae_positions(grid: Grid, width: int) -> Tensor:
    """Return MAE's fixed positions [rows * columns, width]: sines and cosines of the column, then of the row.

    The exponents of the frequencies are divided by width / 4, not by width / 4 - 1 as in MoCo v3 and big_vision.
    """
    return sincos_2d(grid, width, divisor=width // 4)
