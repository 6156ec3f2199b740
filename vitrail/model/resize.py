"""Learned positions and patch kernels at a new resolution (paper, section 3.2).

Every library resamples positions differently, and a model computes what its origin computed only with the
origin's way:

| mode | kernel | as in |
|---|---|---|
| official | bilinear, corners aligned: equal to `scipy.ndimage.zoom(order=1)` | vision_transformer, big_vision |
| timm | bicubic, antialiased | timm |
| hf | bicubic | transformers |
| deit | bicubic | DeiT, DeiT-III, MAE |
| torchvision | bicubic, corners aligned | torchvision |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.model.config import ResizeMode

_KERNELS: dict[str, dict[str, Any]] = {
    "official": dict(mode="bilinear", align_corners=True),
    "timm": dict(mode="bicubic", align_corners=False, antialias=True),
    "hf": dict(mode="bicubic", align_corners=False),
    "deit": dict(mode="bicubic", align_corners=False),
    "torchvision": dict(mode="bicubic", align_corners=True),
}


def resize_positions(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], mode: ResizeMode = "official"
) -> Tensor:
    """Resample a position table from one grid to another; tokens in front of the grid's are kept as they are.

    table [copies, prefix + old_h * old_w, width] -> [copies, prefix + new_h * new_w, width], where prefix is
    what the table has beyond the old grid. Differentiable. Raises UsageError for an unknown mode.
    """
    if mode not in _KERNELS:
        raise UsageError(f"no way of resampling positions is named {mode!r}; valid: {', '.join(_KERNELS)}")
    prefix = table.shape[1] - old[0] * old[1]
    if prefix < 0:
        raise UsageError(f"{table.shape[1]} positions are too few for a grid of {old[0]} x {old[1]}")
    if tuple(old) == tuple(new):
        return table
    front, grid = table[:, :prefix], table[:, prefix:]
    grid = rearrange(grid, "c (h w) d -> c d h w", h=old[0])
    with torch.autocast(table.device.type, enabled=False):
        resized = F.interpolate(grid.float(), size=tuple(new), **_KERNELS[mode]).to(table.dtype)
    return torch.cat([front, rearrange(resized, "c d h w -> c (h w) d")], dim=1)


def resize_line(table: Tensor, length: int) -> Tensor:
    """Resample a table along one axis, end points kept: [copies, n, width] -> [copies, length, width]."""
    if table.shape[1] == length:
        return table
    line = F.interpolate(table.float().transpose(1, 2), size=length, mode="linear", align_corners=True)
    return line.transpose(1, 2).to(table.dtype)


def resize_kernel(kernel: Tensor, patch: int) -> Tensor:
    """Resample patch kernels [width, channels, p, p] to another patch size so that projections are preserved.

    The pseudo-inverse of the bilinear resize (FlexiViT, section 3.4): for an image enlarged together with the
    patch, the new kernel gives the old tokens exactly.
    """
    old = kernel.shape[-1]
    if old == patch:
        return kernel
    basis = torch.eye(old * old, dtype=torch.float64, device=kernel.device).view(-1, 1, old, old)
    enlarge = F.interpolate(basis, size=(patch, patch), mode="bilinear", align_corners=False, antialias=True)
    matrix = torch.linalg.pinv(enlarge.flatten(1))  # [p_new**2, p_old**2]
    return (kernel.double().flatten(2) @ matrix.T).view(*kernel.shape[:2], patch, patch).to(kernel.dtype)
