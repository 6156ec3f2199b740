"""Preprocessing of the few-shot protocols: resize to 256 x 256 without antialiasing, then the central 224 x 224."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.images.geometry import CentralCrop, Op, Size


@dataclass(frozen=True)
class FewShotImages(Op):
    """big_vision's `resize(256)|central_crop(224)`, for training and test images; for other sizes in proportion.

    The resize is TensorFlow's bilinear one between pixel centres. It reads four pixels at any scale and rounds down.
    The network's own normalisation then maps to the range [-1, 1].
    """

    size: Size
    """(height, width) of the network's input."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        height, width = (side * 256 // 224 for side in self.size)
        return CentralCrop(self.size)(bilinear(image, height, width), rng)


def bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [H, W, C] to [height, width, C] between pixel centres, without antialiasing, rounding down."""
    top, bottom, down = _between(image.shape[0], height)
    left, right, across = _between(image.shape[1], width)
    across, down = across[None, :, None], down[:, None, None]

    def row(number: np.ndarray) -> np.ndarray:
        first = image[number][:, left].astype(np.float32)
        return first + (image[number][:, right] - first) * across

    above = row(top)
    return (above + (row(bottom) - above) * down).astype(np.uint8)


def _between(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two pixels around each target pixel, and its distance from the first, float32 [target]."""
    place = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * np.float32(source / target) - np.float32(0.5)
    first = np.floor(place)
    low = np.clip(first, 0, source - 1).astype(np.int64)
    high = np.clip(first + 1, 0, source - 1).astype(np.int64)
    return low, high, place - first
