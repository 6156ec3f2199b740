"""Masking and the stem: masking after the stem equals masking before it if no pixel reaches another patch's token.

That holds for the linear stems and the hMLP stem (follow-up, section 5). But in training their BatchNorm computes its
statistics from all patches, so masked patches are erased from the image first, unless the setting says otherwise. In
the other stems 3x3 convolutions mix masked pixels into visible tokens, and erasing would create edges instead.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.posemb import Grid
from vitrail.model.vit import ViT

LOCAL = ("linear", "linear+norm", "linear+gelu", "linear+norm+gelu", "hmlp")
ERASED = 128
"""uint8 value of erased pixels; in normalised images they are 0."""


def need_maskable(model: nn.Module, kind: str, *, after_stem: bool) -> ViT:
    """Return `model` if its patches can be masked; otherwise raise UsageError with the reason."""
    if not isinstance(model, ViT):
        raise UsageError(
            f"objective {kind} masks patches, so it needs a Vision Transformer, not {type(model).__name__}"
        )
    if model.config.block == "axial":
        raise UsageError(f"objective {kind} cannot mask in axial blocks, which need every row and column whole")
    if model.config.stem not in LOCAL and not after_stem:
        raise UsageError(
            f"objective {kind} with stem {model.config.stem!r}: its convolutions carry the pixels of masked patches "
            "into the tokens of their neighbours, so masking before and after the stem are two different things. Use "
            "stem 'hmlp' or 'linear', where they are the same, or ask for masking after the stem with "
            "--mask-after-stem (objective.mask_after_stem: true); the follow-up found no gain in it (section 5)"
        )
    return model


def cut_patches(images: Tensor, patch: int) -> Tensor:
    """[batch, channels, height, width] -> [batch, patches, patch * patch * channels], ordered row, column, channel."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)


def join_patches(patches: Tensor, grid: Grid, patch: int) -> Tensor:
    """Undo `cut_patches`: return images [batch, channels, height, width]."""
    return rearrange(patches, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], p=patch, q=patch)


def pixel_mask(patches: Tensor, images: Tensor, patch: int) -> Tensor:
    """bool [batch, patches] -> bool [batch, 1, height, width]: True at the pixels of these patches of `images`."""
    batch, _, height, width = images.shape
    grid = patches.view(batch, 1, height // patch, width // patch)
    return grid.repeat_interleave(patch, -2).repeat_interleave(patch, -1)


def erase(images: Tensor, masked: Tensor, patch: int) -> Tensor:
    """Return images [batch, channels, height, width] in which the patches `masked` [batch, patches] are grey."""
    return images.masked_fill(pixel_mask(masked, images, patch), ERASED if images.dtype == torch.uint8 else 0)


def into_stem(model: ViT, images: Tensor, masked: Tensor, *, after_stem: bool) -> Tensor:
    """Return the stem's input for `images` in which the patches `masked` are hidden."""
    shares = any(isinstance(module, nn.BatchNorm2d) for module in model.stem.modules())
    return erase(images, masked, model.config.patch) if shares and not after_stem else images


def encoded(model: ViT, tokens: Tensor, grid: Grid, keep: Tensor | None = None) -> Tensor:
    """Return the encoder's output for all tokens, normalised even if the config normalises only after pooling."""
    tokens = model.encode(tokens, grid, keep)
    return tokens if model.config.origin.final_norm == "tokens" else model.norm(tokens)


def flags(places: Tensor, patches: int) -> Tensor:
    """Raster numbers [batch, n] -> bool [batch, patches]: True at these patches."""
    return torch.zeros(len(places), patches, dtype=torch.bool, device=places.device).scatter(1, places, True)


def at(tokens: Tensor, places: Tensor) -> Tensor:
    """[batch, patches, features] -> [batch, n, features]: the tokens at `places` [batch, n]."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
