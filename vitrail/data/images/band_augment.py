"""Augmentations of images of other bands than RGB: float32 [H, W, bands], normalised, so that 0 is the mean.

Colour operations are left out, because they are made for the three bands of visible light.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitrail.data.images.augment import MOVES, RandAugment, RandomErasing


@dataclass(frozen=True)
class MovingAugment(RandAugment):
    """The operations of RandAugment that move pixels, the same for every band; the gap is filled with the mean."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        for change, level in self.drawn(list(MOVES.values()), rng):
            bands = [np.asarray(change(Image.fromarray(band), level)) for band in np.moveaxis(image, 2, 0)]
            image = np.stack(bands, axis=2)
        return image


@dataclass(frozen=True)
class ErasingBands(RandomErasing):
    """`RandomErasing` with values of a standard normal distribution."""

    def noise(self, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
        """Return random values, float32 [h, w, bands]."""
        return rng.standard_normal(shape, np.float32)
