"""A data source of one's own: `vitrail train faces.npz --data npz_source:Arrays --data.images pixels`."""

from dataclasses import dataclass

import numpy as np

from vitrail import Data


@dataclass(frozen=True)
class Arrays(Data):
    """Images and labels in one .npz, under any names."""

    images: str = "images"
    """Name of the array of images, uint8 [N, H, W] or [N, H, W, 3]."""
    labels: str = "labels"
    """Name of the array of labels, numbers or names."""

    def find(self, *, labels=True):
        """Return the splits by name: here one, whose items are pairs (image, label)."""
        with np.load(self.path) as arrays:
            return {"train": list(zip(arrays[self.images], arrays[self.labels], strict=True))}
