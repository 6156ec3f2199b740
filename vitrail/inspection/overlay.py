"""Draw a map over the grid of tokens onto the original picture, in the part that the network saw.

The network sees a resized and cropped copy, but the overlay goes on the picture itself. `visible_box` follows the
pixels back through resizing and cropping, in fractions of a pixel. The part that was cut off gets no tint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitrail.data.images.geometry import (
    CentralCrop,
    Compose,
    Letterbox,
    Op,
    ResizeSmall,
    Squash,
    largest_inside,
    margins,
)
from vitrail.data.images.native import NativeResize
from vitrail.errors import UsageError

TINT = "cividis"
"""From blue to yellow with rising brightness: readable with every colour vision and on a black-and-white printer."""
SMOOTH = 128
"""Minimum length of a picture's longer side under a map, in pixels."""
UNSEEN = 235
"""Grey level of the parts that the network did not see."""


@dataclass(frozen=True)
class Box:
    """A rectangle in a picture, in pixels and fractions of them; pixel (0, 0) covers 0 to 1."""

    top: float
    left: float
    height: float
    width: float

    def covers(self, height: int, width: int) -> bool:
        """Return whether a whole picture lies in the rectangle, but for half a pixel."""
        bottom, right = self.top + self.height, self.left + self.width
        return max(self.top, self.left, height - bottom, width - right) <= 0.5

    def scaled(self, vertical: float, horizontal: float) -> Box:
        """Return the same part of a picture that was resized by these factors."""
        return Box(self.top * vertical, self.left * horizontal, self.height * vertical, self.width * horizontal)


def visible_box(transform: Op, height: int, width: int) -> Box:
    """Return the part of a `height` x `width` picture that remains after `transform`, in the picture's pixels.

    `transform` comes from `vitrail.data.images.ops.eval_transform`. Raises UsageError for an operation that does not
    crop or resize in a fixed way.
    """
    top, left, vertical, horizontal = 0.0, 0.0, 1.0, 1.0  # the result's origin, and the size of its pixels
    for op in transform.ops if isinstance(transform, Compose) else (transform,):
        if isinstance(op, ResizeSmall):
            (height, width), cut = op.middle(height, width), (height, width)
            top += (cut[0] - height) // 2 * vertical
            left += (cut[1] - width) // 2 * horizontal
            resized = op.resized(height, width)
        elif isinstance(op, Squash):
            resized = op.size
        elif isinstance(op, NativeResize):
            resized = op.patches.size(height, width)
        elif isinstance(op, Letterbox):  # the result shows more than the picture: its margins
            inner, resized = largest_inside(height, width, op.size), op.size
            (above, before), high, wide = margins(inner, op.size), height / inner[0], width / inner[1]
            top, left = top - above * high * vertical, left - before * wide * horizontal
            vertical, horizontal = vertical * high, horizontal * wide
            height, width = resized
        elif isinstance(op, CentralCrop):
            top += (height - op.size[0]) // 2 * vertical
            left += (width - op.size[1]) // 2 * horizontal
            height, width = resized = op.size
        else:
            raise UsageError(f"the part of a picture that is visible after {type(op).__name__} is not known")
        vertical, horizontal = vertical * height / resized[0], horizontal * width / resized[1]
        height, width = resized
    return Box(top, left, height * vertical, width * horizontal)


def interpolate_grid(values: np.ndarray, box: Box, height: int, width: int) -> np.ndarray:
    """Interpolate values [rows, columns] of a grid that fills `box` to all pixels: float32 [height, width].

    Values are bilinear between the centres of the cells, constant beyond the outermost centres, and NaN at pixels
    outside the box.
    """
    down = _weights(values.shape[0], box.top, box.height, height)
    across = _weights(values.shape[1], box.left, box.width, width)
    return down @ values.astype(np.float32) @ across.T


def _weights(cells: int, start: float, length: float, pixels: int) -> np.ndarray:
    """Return the weight of each cell at each pixel along one side, float32 [pixels, cells]; NaN outside."""
    along = (np.arange(pixels) + 0.5 - start) / length
    at = np.clip(along * cells - 0.5, 0, cells - 1)
    low = np.minimum(at.astype(np.int64), max(cells - 2, 0))
    weights = np.zeros((pixels, cells), dtype=np.float32)
    places = np.arange(pixels)
    weights[places, low] = 1 - (at - low)
    if cells > 1:
        weights[places, low + 1] = at - low
    weights[(along < 0) | (along > 1)] = np.nan
    return weights


def scale_to_unit(values: np.ndarray) -> np.ndarray:
    """Scale values to the range from 0 to 1; all 0 if they are equal."""
    span = float(values.max() - values.min())
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def under_attention(image: np.ndarray, shares: np.ndarray, box: Box | None = None) -> np.ndarray:
    """Return the picture [H, W, 3] in grey, tinted by a map [rows, columns] over its part `box`: uint8 [H', W', 3].

    Blue is the lowest value of the map, yellow the highest. The part outside the box is faded; by default the box is
    the whole picture. Small pictures are enlarged, so that the map is smooth.
    """
    import matplotlib  # of the extra train; the server finds boxes without it

    height, width = image.shape[:2]
    factor = max(1, -(-SMOOTH // max(height, width)))
    grey = np.asarray(Image.fromarray(image).convert("L")).repeat(factor, 0).repeat(factor, 1)
    place = (box or Box(0, 0, height, width)).scaled(factor, factor)
    heat = interpolate_grid(scale_to_unit(shares), place, *grey.shape)
    tint = matplotlib.colormaps[TINT](np.nan_to_num(heat))[:, :, :3] * 255
    tint[np.isnan(heat)] = UNSEEN
    return (0.35 * grey[:, :, None] + 0.65 * tint).astype(np.uint8)
