"""Several views of one image: as it is and mirrored, or ten crops, one above the other in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.data.bands.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.images.geometry import Op, Size
from vitrail.data.images.ops import CROPPED, larger
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError

ViewKind = Literal["flip", "crops"]
VIEWS: dict[ViewKind, int] = {"flip": 2, "crops": 10}
"""Number of views of an image."""


@dataclass(frozen=True)
class Mirrored(Op):
    """The result of `shown`, and below it its mirror image: uint8 [2 * height, width, 3]."""

    shown: Op

    @property
    def pixels(self) -> Pixels:  # type: ignore[override]
        """See Op."""
        return self.shown.pixels

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        seen = self.shown(image, rng)
        return np.concatenate([seen, seen[:, ::-1]])


@dataclass(frozen=True)
class TenCrops(Op):
    """Four corners and the middle of the result of `resize`, and their mirror images: uint8 [10 * height, width, 3].

    These are the ten patches of Krizhevsky et al. (2012, section 4.1).
    """

    resize: Op
    size: Size
    pixels: Pixels = EIGHT_BIT_RGB

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        seen, (height, width) = self.resize(image, rng), self.size
        bottom, right = seen.shape[0] - height, seen.shape[1] - width
        corners = ((0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2))
        crops = [seen[top : top + height, left : left + width] for top, left in corners]
        return np.concatenate([*crops, *(crop[:, ::-1] for crop in crops)])


def views(kind: ViewKind, preprocess: Preprocess, shown: Op) -> Op:
    """Return the transform that makes all views of an image. `shown` is that of one view.

    Raises UsageError for crops if one view shows the whole image.
    """
    if kind == "flip":
        return Mirrored(shown)
    if preprocess.resize not in CROPPED or preprocess.crop == 1:
        whole = {"squash": "images are resized to its size", "pad": "images are padded to its size"}
        why = whole.get(preprocess.resize, "its crop is 1")
        raise UsageError(
            f"--tta crops cuts ten views out of the image, but this network sees the whole image ({why}). "
            "Use --tta flip"
        )
    return TenCrops(larger(preprocess), preprocess.image_size, shown.pixels)
