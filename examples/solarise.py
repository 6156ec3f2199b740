"""An augmentation of one's own: `vitrail train digits --augment solarise:Solarised --augment.share 0.2`."""

from dataclasses import dataclass

import numpy as np

from vitrail import Augment
from vitrail.ranges import Share


@dataclass(frozen=True)
class Solarised(Augment):
    """The built-in operations, and then bright pixels of some images inverted."""

    share: Share = 0.2
    """Share of the images."""

    def operations(self, preprocess):
        """Return the operations on a training image, in order."""
        return [*super().operations(preprocess), self.solarise]

    def solarise(self, image, rng):
        """uint8 [H, W, 3] -> the same shape; all random numbers come from `rng`."""
        return np.where(image >= 128, 255 - image, image) if rng.random() < self.share else image
