"""Learned positions and patch kernels at a new resolution (paper, section 3.2).

Every library resamples positions differently. A model computes the same as in its library only with that library's
mode:

| mode | kernel | as in |
|---|---|---|
| official | bilinear, corners aligned: equal to `scipy.ndimage.zoom(order=1)` | vision_transformer, big_vision |
| timm | bicubic, antialiased | timm |
| hf | bicubic | transformers |
| deit | bicubic | DeiT, DeiT-III, MAE |
| torchvision | bicubic, corners aligned | torchvision |
| naflex | bilinear, antialiased | SigLIP 2 NaFlex (Tschannen et al. 2025, section 2.4.2) |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.model.limits import ResizeMode

_KERNELS: dict[str, dict[str, Any]] = {
    "official": dict(mode="bilinear", align_corners=True),
    "timm": dict(mode="bicubic", align_corners=False, antialias=True),
    "hf": dict(mode="bicubic", align_corners=False),
    "deit": dict(mode="bicubic", align_corners=False),
    "torchvision": dict(mode="bicubic", align_corners=True),
    "naflex": dict(mode="bilinear", align_corners=False, antialias=True),
}


def resize_positions(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], mode: ResizeMode = "official"
) -> Tensor:
    """Resample a position table from one grid to another; rows in front of the grid's do not change.

    table [copies, prefix + old_h * old_w, width] -> [copies, prefix + new_h * new_w, width], where prefix is the number
    of rows that the table has besides the old grid's. Differentiable. Raises UsageError for an unknown mode.
    """
    _check(mode)
    prefix = table.shape[1] - old[0] * old[1]
    if prefix < 0:
        raise UsageError(f"{table.shape[1]} positions are too few for a grid of {old[0]} x {old[1]}")
    if _equal(old, new, mode):
        return table
    front, grid = table[:, :prefix], table[:, prefix:]
    grid = rearrange(grid, "c (h w) d -> c d h w", h=old[0])
    with torch.autocast(table.device.type, enabled=False):
        resized = F.interpolate(grid.float(), size=tuple(new), **_KERNELS[mode]).to(table.dtype)
    return torch.cat([front, rearrange(resized, "c d h w -> c (h w) d")], dim=1)


def resize_bias(table: Tensor, old: tuple[int, int], new: tuple[int, int], mode: ResizeMode = "official") -> Tensor:
    """Resample BEiT's relative position biases (`vitrail.model.posemb.RelativeBias`) from one grid to another.

    table [copies, (2 old_h - 1)(2 old_w - 1) + 3, heads] -> the same for `new`. The last three rows, those of the class
    token, do not change. The two libraries that have BEiT resample biases in another way than positions: transformers
    (hf) is bilinear without aligned corners, and timm first moves the old offsets apart (see `_spread`). The other
    modes use their kernel. Differentiable. Raises UsageError for an unknown mode.
    """
    _check(mode)
    if _equal(old, new, mode):
        return table
    (old_rows, old_columns), (rows, columns) = ([2 * side - 1 for side in grid] for grid in (old, new))
    offsets = rearrange(table[:, :-3], "c (h w) n -> c n h w", h=old_rows, w=old_columns).float()
    with torch.autocast(table.device.type, enabled=False):
        if mode == "timm":
            moves = (_number(rows) != old_rows) | (_number(columns) != old_columns)  # no, only if a trace left it open
            to_rows, to_columns = _spread(old_rows, rows, moves), _spread(old_columns, columns, moves)
            resized = to_rows.to(offsets) @ offsets @ to_columns.to(offsets).T
        else:
            kernel: dict[str, Any] = dict(mode="bilinear", align_corners=False) if mode == "hf" else _KERNELS[mode]
            resized = F.interpolate(offsets, size=(rows, columns), **kernel)
    return torch.cat([rearrange(resized.to(table.dtype), "c n h w -> c (h w) n"), table[:, -3:]], dim=1)


def _equal(old: tuple[int, int], new: tuple[int, int], mode: ResizeMode) -> bool:
    """Return whether nothing is resampled. A size that a trace or an export leaves open (no int) may be any.

    ONNX's exporter of traces (`dynamo=False`) has no operations for mode timm, so it fixes the size of the images.
    """
    if mode == "timm" and torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
        new = (int(new[0]), int(new[1]))
    return all(type(side) is int for side in new) and tuple(old) == tuple(new)


def _number(size: int) -> Any:
    """Return a size, or a tensor in place of one that a trace or an export leaves open."""
    return size if type(size) is int else torch.scalar_tensor(size, dtype=torch.float64)


def _spread(old: int, new: int, moves: Any) -> Tensor:
    """Return the matrix [new, old] by which timm resamples biases along one axis, after BEiT's own code.

    Near offsets matter more than far ones, so they change least: the k-th old offset on either side of zero moves to
    1 + q + ... + q^(k-1). Bisection between 1.01 and 1.5 finds the q that moves the last offset to the edge of the new
    range. Between these places the biases are linear, beyond them constant. Unless it `moves`, every
    offset keeps its place.
    """
    arm, reach = old // 2, new // 2
    if not arm:
        return torch.ones(new, 1)
    edge = _number(reach)
    low, half = 1.01, 0.49
    while half > 1e-6:
        half /= 2
        ratio = low + half
        low = low + half * ((1 - ratio**arm) / (1 - ratio) <= edge)  # no branch, because a trace may leave it open
    ratio = 1 + (ratio - 1) * moves
    steps = (ratio ** torch.arange(arm, dtype=torch.float64)).cumsum(0)
    places = torch.cat([-steps.flip(0), torch.zeros(1, dtype=torch.float64), steps])
    wanted = torch.arange(-reach, reach + 1, dtype=torch.float64).clamp(places[0], places[-1])
    right = torch.searchsorted(places, wanted).clamp(min=1)
    share = (wanted - places[right - 1]) / (places[right] - places[right - 1])
    matrix, row = torch.zeros(new, old, dtype=torch.float64), torch.arange(new)
    matrix[row, right - 1], matrix[row, right] = 1 - share, share
    return matrix


def _check(mode: str) -> None:
    if mode not in _KERNELS:
        raise UsageError(f"there is no mode {mode!r} of resampling positions; valid: {', '.join(_KERNELS)}")


def resize_line(table: Tensor, length: int) -> Tensor:
    """Resample a table along one axis, with the end points unchanged: [copies, n, width] -> [copies, length, width]."""
    if type(length) is int and table.shape[1] == length:
        return table
    line = F.interpolate(table.float().transpose(1, 2), size=length, mode="linear", align_corners=True)
    return line.transpose(1, 2).contiguous().to(table.dtype)  # of one layout at all sizes, for compiled blocks


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
