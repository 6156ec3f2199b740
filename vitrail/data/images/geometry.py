"""Geometric transforms: resizing, cropping, shifting, mirroring."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.errors import UsageError

Interpolation = Literal["bilinear", "bicubic"]
Size = tuple[int, int]

MAX_ASPECT = 8
"""A picture longer than this many times its other side is cut to its middle before it is resized by its short
side: a strip of 5000 x 1 would otherwise become 1,280,000 x 256."""


class Op(ABC):
    """One transform between a decoded image and the network's input.

    Takes uint8 [H, W, 3] and a generator, from which it draws all its randomness, and returns uint8 [h, w, 3]:
    where there is nothing to do, the very array that was passed in, which is never changed.
    """

    @abstractmethod
    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Apply to one image."""

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """Apply to images of one size, uint8 [n, H, W, 3]: the same bits as one by one with the same generators.

        Cheap operations override this with whole-array arithmetic, so that small images held in memory are not
        slowed down by Python.
        """
        return np.stack([self(image, rng) for image, rng in zip(images, rngs, strict=True)])


def resize(image: np.ndarray, height: int, width: int, interpolation: Interpolation = "bilinear") -> np.ndarray:
    """Resize uint8 [H, W, 3] to [height, width, 3] with antialiasing: Pillow's result within a rounding.

    The two directions are resized one after the other, width first; Pillow takes the cheaper one first, which
    where bicubic overshoots the range of uint8 in between can show in single pixels of a noisy picture.
    torch's kernel for uint8 in channels-last order takes a fraction of Pillow's time, runs on the calling
    thread alone and releases the interpreter lock, so that threads may resize beside a training step.
    """
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    image = np.require(image, requirements=("C", "W"))
    # the batch dimension comes before the permutation: made after, its stride hides the channels-last order
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(pixels, (height, width), mode=interpolation, antialias=True)
    return np.ascontiguousarray(resized.permute(0, 2, 3, 1)[0].numpy())


def _central(image: np.ndarray, height: int, width: int) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _check_covers(image: np.ndarray, size: Size) -> None:
    if image.shape[0] < size[0] or image.shape[1] < size[1]:
        raise UsageError(
            f"cannot cut {size[0]} x {size[1]} (height x width) out of an image of "
            f"{image.shape[0]} x {image.shape[1]}; resize it first"
        )


@dataclass(frozen=True)
class Compose(Op):
    """Apply operations in order, all drawing from the one generator of the image."""

    ops: tuple[Op, ...]

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        for op in self.ops:
            image = op(image, rng)
        return image

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """See Op."""
        for op in self.ops:
            images = op.batch(images, rngs)
        return images


@dataclass(frozen=True)
class ToSize(Op):
    """A transform that resizes an image to `size` (height, width), and returns one of that size unchanged."""

    size: Size

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """See Op."""
        return images if images.shape[1:3] == self.size else super().batch(images, rngs)


@dataclass(frozen=True)
class Squash(ToSize):
    """Resize to exactly `size` (height, width), without keeping the aspect ratio."""

    interpolation: Interpolation = "bilinear"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        return resize(image, *self.size, self.interpolation)


@dataclass(frozen=True)
class ResizeSmall(ToSize):
    """Resize, keeping the aspect ratio, to the smallest picture that covers `size` (height, width).

    For a square size the short side becomes that long, the other one round(long * size / short).
    """

    interpolation: Interpolation = "bilinear"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        middle = self.middle(*image.shape[:2])
        return resize(_central(image, *middle), *self.resized(*middle), self.interpolation)

    def middle(self, height: int, width: int) -> Size:
        """Return (height, width) of the part of a picture that is resized: all of it but for very long ones."""
        longest = MAX_ASPECT * min(height, width)
        return min(height, longest), min(width, longest)

    def resized(self, height: int, width: int) -> Size:
        """Return the (height, width) that this part gets."""
        scale = max(self.size[0] / height, self.size[1] / width)
        # the side that fits exactly must not be rounded away
        return max(round(height * scale), self.size[0]), max(round(width * scale), self.size[1])


@dataclass(frozen=True)
class CentralCrop(ToSize):
    """Cut `size` (height, width) out of the middle. Raises UsageError for a smaller image."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        _check_covers(image, self.size)
        return np.ascontiguousarray(_central(image, *self.size))


@dataclass(frozen=True)
class CropBorder(Op):
    """Cut this many pixels off each of the four sides. Raises UsageError where nothing would be left."""

    pixels: int

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        height, width = image.shape[:2]
        if min(height, width) <= 2 * self.pixels:
            raise UsageError(f"cannot cut {self.pixels} pixels off each side of an image of {height} x {width}")
        return np.ascontiguousarray(image[self.pixels : height - self.pixels, self.pixels : width - self.pixels])


@dataclass(frozen=True)
class RandomCrop(Op):
    """Cut `size` (height, width) out of a place drawn uniformly. Raises UsageError for a smaller image."""

    size: Size

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        _check_covers(image, self.size)
        top = int(rng.random() * (image.shape[0] - self.size[0] + 1))
        left = int(rng.random() * (image.shape[1] - self.size[1] + 1))
        return np.ascontiguousarray(image[top : top + self.size[0], left : left + self.size[1]])


@dataclass(frozen=True)
class InceptionCrop(Op):
    """Cut out a random part of the picture and resize it to `size` (height, width): the paper's B.1.

    The part's share of the area is uniform in `scale`, its width over height log-uniform in `ratio`, its place
    uniform (Szegedy et al. 2015, "Going deeper with convolutions", section 6). Ten tries are made for one that
    fits into the picture; after that it is the largest central part of a permitted shape.
    """

    size: Size
    scale: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"the crop's scale is {self.scale}; it must be (low, high) with 0 < low <= high <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"the crop's ratio is {self.ratio}; it must be (low, high) with 0 < low <= high")

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of the part of a `height` x `width` picture, in pixels."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            share, shape, down, right = rng.random(4).tolist()
            area = height * width * (self.scale[0] + share * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + shape * (high - low))
            h, w = max(1, round(math.sqrt(area / ratio))), max(1, round(math.sqrt(area * ratio)))
            if h <= height and w <= width:
                return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        h, w = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
        return (height - h) // 2, (width - w) // 2, h, w

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        top, left, height, width = self.box(image.shape[0], image.shape[1], rng)
        return resize(image[top : top + height, left : left + width], *self.size, self.interpolation)


@dataclass(frozen=True)
class PadShift(Op):
    """Shift by up to `pad` pixels each way, drawn uniformly; what comes in is the picture's reflection.

    The usual augmentation of small images (pad by 4, crop 32), without a black frame for the network to see.
    Raises UsageError for an image with a side of `pad` pixels or fewer.
    """

    pad: int = 4

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise UsageError(f"augment.pad is {self.pad}; it must be 0 or more pixels")

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        return self.batch(image[None], [rng])[0]

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """See Op."""
        height, width = images.shape[1:3]
        if min(height, width) <= self.pad:
            raise UsageError(f"cannot shift images of {height} x {width} by up to {self.pad} pixels")
        margin = (self.pad, self.pad)
        padded = np.pad(images, ((0, 0), margin, margin, (0, 0)), mode="reflect")
        shifted = np.empty_like(images)
        places = 2 * self.pad + 1
        for source, target, rng in zip(padded, shifted, rngs, strict=True):
            top, left = int(rng.random() * places), int(rng.random() * places)
            target[:] = source[top : top + height, left : left + width]
        return shifted


@dataclass(frozen=True)
class Flip(Op):
    """Mirror left to right with this probability."""

    probability: float = 0.5

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        if rng.random() >= self.probability:
            return image
        mirrored = np.empty(image.shape, np.uint8)
        for channel in range(image.shape[2]):  # four times faster than copying the reversed view at once
            mirrored[:, :, channel] = image[:, ::-1, channel]
        return mirrored

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """See Op."""
        chosen = np.array([rng.random() < self.probability for rng in rngs], dtype=bool)
        flipped = images.copy()
        flipped[chosen] = images[chosen, :, ::-1]
        return flipped
