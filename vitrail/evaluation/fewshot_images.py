"""Images as the few-shot protocols prepare them: squashed to 256 pixels without antialiasing, the middle 224 kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.images.geometry import CentralCrop, Op, Size


@dataclass(frozen=True)
class FewShotImages(Op):
    """big_vision's `resize(256)|central_crop(224)`, for training and test images; for other sizes in proportion.

    TensorFlow's bilinear resize between pixel centres, which looks at four pixels however much it shrinks, and cuts
    fractions off. The range [-1, 1] that follows is the network's own normalisation.
    """

    size: Size
    """(height, width) handed to the network."""

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
    """The two pixels that each target pixel lies between, and how far it is from the first, float32 [target]."""
    place = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * np.float32(source / target) - np.float32(0.5)
    first = np.floor(place)
    low = np.clip(first, 0, source - 1).astype(np.int64)
    high = np.clip(first + 1, 0, source - 1).astype(np.int64)
    return low, high, place - first
