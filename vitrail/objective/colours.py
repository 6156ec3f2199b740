"""Convert patches to colours of 3 bits per channel (paper, B.1.2), and back.

The paper does not define the quantisation. Here the mean m of a channel over the pixels, 0 to 255, becomes the level
floor(m / 32), 0 to 7, and the colour is 64 red + 8 green + blue, 0 to 511. It is computed in integers from uint8 pixels
before normalisation, so it is the same on every device. A level represents the middle of its 32 values: 16, 48, ...,
240.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from vitrail.errors import UsageError

LEVELS = 8
COLOURS = LEVELS**3
STEP = 256 // LEVELS


def need_pixels(images: Tensor, what: str) -> None:
    """Raise UsageError unless `images` are uint8 [batch, 3, height, width], from which colours can be read."""
    if images.dtype != torch.uint8 or images.shape[1] != 3:
        raise UsageError(
            f"{what} is computed from the pixels before normalisation: images must be uint8 of 3 channels, "
            f"not {str(images.dtype).removeprefix('torch.')} of {images.shape[1]}"
        )


def mean_colours(images: Tensor, patch: int, across: int = 1) -> Tensor:
    """Return the colours, int64 [batch, patches, across^2], of each patch cut into across x across cells.

    images: uint8 [batch, 3, height, width]; patches and cells are in raster order. `across` 4 is the paper's "4x4
    downsized version". Raises UsageError if the cells are not whole pixels.
    """
    need_pixels(images, "a mean colour")
    if patch % across:
        raise UsageError(
            f"a patch of {patch} pixels cannot be cut into {across} x {across} cells: use a patch divisible by "
            f"{across}, or objective.target colour"
        )
    side = patch // across
    cells = rearrange(images, "b c (h y p) (w x q) -> b (h w) (y x) c (p q)", y=across, x=across, p=side, q=side)
    red, green, blue = (cells.sum(-1, dtype=torch.int64) // (STEP * side * side)).unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def colour_values(colours: Tensor) -> Tensor:
    """Return red, green and blue, uint8 [..., 3], of colours [...]: the middle of each level."""
    levels = torch.stack([colours // LEVELS**2, colours // LEVELS % LEVELS, colours % LEVELS], dim=-1)
    return (levels * STEP + STEP // 2).to(torch.uint8)


def painted(colours: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return uint8 images [batch, 3, height, width] with the colours [batch, patches, cells]."""
    across = round(colours.shape[-1] ** 0.5)
    values = colour_values(colours)
    small = rearrange(values, "b (h w) (y x) c -> b c (h y) (w x)", h=grid[0], y=across)
    return small.repeat_interleave(patch // across, -2).repeat_interleave(patch // across, -1)
