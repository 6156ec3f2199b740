"""Images with their own proportions: resized to a number of patches, whatever their shape, and cut into strips.

NaViT (Dehghani et al. 2023) and SigLIP 2 NaFlex (Tschannen et al. 2025) train like this: nothing is cut off and
nothing is filled, and a wide picture costs as much as a square one. `vitrail.strip` says what a strip is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.images.geometry import InceptionCrop, Interpolation, Op, Size, filled_up, resize
from vitrail.data.settings import Preprocess
from vitrail.strip import BITS, longest_side

WHITE = (255, 255, 255)
FLOAT_BIT = 1e4
"""What stands for a set bit among float values, and its negative for another: beyond all normalised values."""


@dataclass(frozen=True)
class Patches:
    """The patches that an image may have: at most `tokens`, with sides of `patch` pixels."""

    patch: int
    tokens: int

    @classmethod
    def of(cls, preprocess: Preprocess) -> Patches:
        """Return the patches of a "native" image."""
        height, patch = preprocess.size
        return cls(patch, height // patch - 1)

    def grid(self, height: int, width: int) -> Size:
        """Return rows and columns of a picture of `height` x `width` pixels.

        It is SigLIP 2's rule: the largest scale at which the sides, rounded up to whole patches, have no more than
        `tokens` patches. No side has more than `longest_side`.
        """
        rows = columns = 1
        longest = longest_side(self.tokens)
        while True:
            taller, wider = rows * width, columns * height  # the scales at which a side needs another patch
            more = rows + (taller <= wider), columns + (wider <= taller)
            if more[0] * more[1] > self.tokens or max(more) > longest:
                return rows, columns
            rows, columns = more

    def size(self, height: int, width: int) -> Size:
        """Return the height and width in pixels to which such a picture is resized."""
        rows, columns = self.grid(height, width)
        return rows * self.patch, columns * self.patch


@dataclass(frozen=True)
class NativeResize(Op):
    """Resize a picture to whole patches, with its own proportions as far as whole patches can have them."""

    patches: Patches
    interpolation: Interpolation = "bilinear"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        return resize(image, *self.patches.size(*image.shape[:2]), self.interpolation)


@dataclass(frozen=True)
class NativeCrop(Op):
    """Cut out a random part (`InceptionCrop` of the whole picture), and resize it to whole patches of its own shape."""

    crop: InceptionCrop
    patches: Patches

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        top, left, height, width = self.crop.box(image.shape[0], image.shape[1], rng)
        part = image[top : top + height, left : left + width]
        return resize(part, *self.patches.size(height, width), self.crop.interpolation)


@dataclass(frozen=True)
class Strip(Op):
    """Cut an image of whole patches into a strip."""

    patches: Patches
    any_shape = True

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        patch, channels = self.patches.patch, image.shape[2]
        rows, columns = image.shape[0] // patch, image.shape[1] // patch
        strip = np.zeros(((1 + self.patches.tokens) * patch, patch, channels), image.dtype)
        cells = image.reshape(rows, patch, columns, patch, channels).swapaxes(1, 2)
        strip[patch : (1 + rows * columns) * patch] = cells.reshape(-1, patch, channels)
        bits = np.array([number >> bit & 1 for number in (rows, columns) for bit in range(BITS)])
        head = np.zeros(patch * patch, image.dtype)
        head[: len(bits)] = 255 * bits if image.dtype == np.uint8 else FLOAT_BIT * (2 * bits - 1)
        strip[:patch, :, 0] = head.reshape(patch, patch)
        return strip


def pictures(strips: np.ndarray) -> np.ndarray:
    """Return the images of strips [batch, height, width, channels], each in the middle of one of the largest sides."""
    images = [picture(strip) for strip in strips]
    size = max(image.shape[0] for image in images), max(image.shape[1] for image in images)
    return np.stack([filled_up(image, size, WHITE) for image in images])


def picture(strip: np.ndarray) -> np.ndarray:
    """Return the image [rows * patch, columns * patch, channels] that was cut into a strip."""
    patch, channels = strip.shape[1:]
    bits = strip[:patch, :, 0].ravel()[: 2 * BITS] > (127 if strip.dtype == np.uint8 else 0)
    rows, columns = (bits.reshape(2, BITS) << np.arange(BITS)).sum(1).tolist()
    cells = strip[patch : (1 + rows * columns) * patch].reshape(rows, columns, patch, patch, channels)
    return cells.swapaxes(1, 2).reshape(rows * patch, columns * patch, channels)
