"""Geometric transforms: resizing, cropping, shifting, mirroring."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.settings import GREY, Colour
from vitrail.errors import UsageError

Interpolation = Literal["bilinear", "bicubic"]
Size = tuple[int, int]

MAX_ASPECT = 8
"""Largest aspect ratio of a picture that is resized by its short side. A longer picture is cut to its middle first,
because a strip of 5000 x 1 would become 1,280,000 x 256."""


DISTORTION = (3 / 4, 4 / 3)
"""Width over height of a random part of a picture, as a multiple of the usual one (paper, B.1)."""

WIDEST = 2**25
"""Largest number of pixels between the two directions of a resize, 100 MB."""


class Op(ABC):
    """One transform between a decoded image and the network's input.

    It takes uint8 [H, W, 3] and a generator, the source of all its random numbers, and returns uint8 [h, w, 3]. It
    never changes the array that is passed in, and returns this array itself if there is nothing to do. Images of other
    bands are float32 [H, W, bands], normalised (see `pixels`).
    """

    pixels: Pixels = EIGHT_BIT_RGB
    """How stored images become the input of this transform."""
    any_shape = False
    """Whether it gives images of any shape one shape, so that those before it may each have their own."""

    @abstractmethod
    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Apply to one image."""

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """Apply to images of one size, uint8 [n, H, W, 3], with one generator each; the same bits as one by one.

        Cheap operations override this with whole-array arithmetic, so that Python does not slow down small images in
        memory.
        """
        return np.stack([self(image, rng) for image, rng in zip(images, rngs, strict=True)])


def resize(image: np.ndarray, height: int, width: int, interpolation: Interpolation = "bilinear") -> np.ndarray:
    """Resize uint8 [H, W, 3] to [height, width, 3] with antialiasing; the result is Pillow's within a rounding.

    Other bands are float32 [H, W, bands].

    The width is resized first, then the height, except if all rows at the new width are more than `WIDEST` pixels.
    Pillow begins with the cheaper direction. The difference can show in
    single pixels of a noisy picture if bicubic overshoots the range of uint8 in between. torch's kernel for uint8 in
    channels-last order takes a fraction of Pillow's time, runs only on the calling thread and releases the interpreter
    lock, so that threads may resize during a training step.
    """
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    image = np.require(image, requirements=("C", "W"))
    if image.shape[0] * width > WIDEST and image.shape[0] > height:  # its height first, or all of its rows get wide
        image = _interpolated(image, height, image.shape[1], interpolation)
    return _interpolated(image, height, width, interpolation)


def _interpolated(image: np.ndarray, height: int, width: int, interpolation: Interpolation) -> np.ndarray:
    # the batch dimension is added before the permutation; added after, its stride would hide the channels-last order
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(pixels, (height, width), mode=interpolation, antialias=True)
    return np.ascontiguousarray(resized.permute(0, 2, 3, 1)[0].numpy())


def _central(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the middle of an image, a view."""
    if image.shape[:2] == (height, width):
        return image
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _check_covers(image: np.ndarray, size: Size) -> None:
    """Raise UsageError for an image that is smaller than `size`."""
    if image.shape[0] < size[0] or image.shape[1] < size[1]:
        raise UsageError(
            f"cannot cut {size[0]} x {size[1]} (height x width) out of an image of "
            f"{image.shape[0]} x {image.shape[1]}; resize it first"
        )


@dataclass(frozen=True)
class Compose(Op):
    """Apply operations in order; all of them draw from the image's generator."""

    ops: tuple[Op, ...]
    pixels: Pixels = EIGHT_BIT_RGB

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        for op in self.ops:
            image = op(image, rng)
        return image

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """See Op."""
        if any(op.any_shape for op in self.ops):
            return super().batch(images, rngs)
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
    """Resize to the smallest picture of the same aspect ratio that covers `size` (height, width).

    For a square size the short side gets its length, and the long side becomes round(long * size / short).
    """

    interpolation: Interpolation = "bilinear"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        middle = self.middle(*image.shape[:2])
        return resize(_central(image, *middle), *self.resized(*middle), self.interpolation)

    def middle(self, height: int, width: int) -> Size:
        """Return (height, width) of the part of a picture that is resized: all, unless the picture is very long."""
        longest = MAX_ASPECT * min(height, width)
        return min(height, longest), min(width, longest)

    def resized(self, height: int, width: int) -> Size:
        """Return the (height, width) that this part gets."""
        scale = max(self.size[0] / height, self.size[1] / width)
        # rounding must not make the side that fits exactly too short
        return max(round(height * scale), self.size[0]), max(round(width * scale), self.size[1])


def largest_inside(height: int, width: int, size: Size) -> Size:
    """Return the (height, width) of the largest picture of this aspect ratio that fits into `size`."""
    scale = min(size[0] / height, size[1] / width)
    return max(round(height * scale), 1), max(round(width * scale), 1)


def margins(inner: Size, size: Size) -> Size:
    """Return (top, left) of a picture in the middle of one of `size`, rounded down as timm and OpenCLIP do."""
    return (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2


def filled_up(image: np.ndarray, size: Size, fill: Colour) -> np.ndarray:
    """Return an image in the middle of one of `size`. The rest has the colour `fill`; in other bands than RGB, 0."""
    if image.shape[:2] == size:
        return image
    canvas = np.zeros((*size, image.shape[2]), image.dtype)
    if image.dtype == np.uint8:
        canvas[:] = fill
    top, left = margins((image.shape[0], image.shape[1]), size)
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas


@dataclass(frozen=True)
class Letterbox(ToSize):
    """Resize to the largest picture of the same aspect ratio that fits into `size` (height, width), and fill the rest.

    The picture is in the middle. In bands other than RGB the rest is 0, the mean of the training images.
    """

    interpolation: Interpolation = "bilinear"
    fill: Colour = GREY

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        inner = largest_inside(image.shape[0], image.shape[1], self.size)
        return filled_up(resize(image, *inner, self.interpolation), self.size, self.fill)


@dataclass(frozen=True)
class CentralCrop(ToSize):
    """Cut `size` (height, width) from the middle. Raises UsageError for a smaller image."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        _check_covers(image, self.size)
        return np.ascontiguousarray(_central(image, *self.size))


@dataclass(frozen=True)
class CropBorder(Op):
    """Cut off the border of an image. Raises UsageError if nothing would be left."""

    border: int
    """Number of pixels to cut from each of the four sides."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        height, width = image.shape[:2]
        if min(height, width) <= 2 * self.border:
            raise UsageError(f"cannot cut {self.border} pixels off each side of an image of {height} x {width}")
        return np.ascontiguousarray(image[self.border : height - self.border, self.border : width - self.border])


@dataclass(frozen=True)
class RandomCrop(Op):
    """Cut `size` (height, width) from a uniformly drawn place. Raises UsageError for a smaller image."""

    size: Size

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        _check_covers(image, self.size)
        top = int(rng.random() * (image.shape[0] - self.size[0] + 1))
        left = int(rng.random() * (image.shape[1] - self.size[1] + 1))
        return np.ascontiguousarray(image[top : top + self.size[0], left : left + self.size[1]])


def random_rectangles(
    pixels: int, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Iterator[tuple[int, int, float, float]]:
    """Yield ten draws of a rectangle in a picture: its two sides, and two numbers from 0 to 1 that place it.

    Its share of the picture's `pixels` is uniform in `scale`, and its first side over its second log-uniform in
    `ratio`.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        share, shape, down, right = rng.random(4).tolist()
        area = pixels * (scale[0] + share * (scale[1] - scale[0]))
        sides = math.exp(low + shape * (high - low))
        yield round(math.sqrt(area * sides)), round(math.sqrt(area / sides)), down, right


@dataclass(frozen=True)
class InceptionCrop(Op):
    """Cut out a random part of the picture and resize it to `size` (height, width), as in the paper's B.1.

    The part's share of the area is uniform in `scale`, its width over height is log-uniform in `ratio`, and its place
    is uniform (Szegedy et al. 2015, "Going deeper with convolutions", section 6). If none of ten draws fits into the
    picture, the part is the largest central one of a valid shape.

    Without a `ratio`, width over height is that of `size`, or that of the picture if evaluation shows the `whole` of
    it, times 3/4 to 4/3. So objects have the proportions in training that they have in evaluation.
    """

    size: Size
    scale: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] | None = None
    interpolation: Interpolation = "bilinear"
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"the crop's scale is {self.scale}; it must be (low, high) with 0 < low <= high <= 1")
        if self.ratio is not None and not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"the crop's ratio is {self.ratio}; it must be (low, high) with 0 < low <= high")

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of the part of a `height` x `width` picture, in pixels."""
        usual = width / height if self.whole else self.size[1] / self.size[0]
        low, high = self.ratio or (usual * DISTORTION[0], usual * DISTORTION[1])
        for w, h, down, right in random_rectangles(height * width, self.scale, (low, high), rng):
            h, w = max(1, h), max(1, w)
            if h <= height and w <= width:
                return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
        ratio = min(max(width / height, low), high)
        h, w = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
        return (height - h) // 2, (width - w) // 2, h, w

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        top, left, height, width = self.box(image.shape[0], image.shape[1], rng)
        return resize(image[top : top + height, left : left + width], *self.inner(image), self.interpolation)

    def inner(self, image: np.ndarray) -> Size:
        """Return the (height, width) that the part gets."""
        return self.size


@dataclass(frozen=True)
class LetterboxedCrop(InceptionCrop):
    """`InceptionCrop` in the place that the whole picture has in evaluation (`Letterbox`); the rest is filled.

    So the network sees the same margins in training as in evaluation.
    """

    whole: bool = True
    fill: Colour = GREY

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        return filled_up(super().__call__(image, rng), self.size, self.fill)

    def inner(self, image: np.ndarray) -> Size:
        """See InceptionCrop."""
        return largest_inside(image.shape[0], image.shape[1], self.size)


@dataclass(frozen=True)
class PadShift(Op):
    """Shift by up to `pad` pixels in each direction, drawn uniformly; the reflected picture fills the gap.

    This is the usual augmentation of small images (pad by 4, crop 32), but the network sees no black frame. Raises
    UsageError for an image with a side of `pad` pixels or fewer.
    """

    pad: int = 4

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
        mirrored = np.empty(image.shape, image.dtype)
        for channel in range(image.shape[2]):  # four times as fast as copying the reversed view at once
            mirrored[:, :, channel] = image[:, ::-1, channel]
        return mirrored

    def batch(self, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
        """See Op."""
        chosen = np.array([rng.random() < self.probability for rng in rngs], dtype=bool)
        flipped = images.copy()
        flipped[chosen] = images[chosen, :, ::-1]
        return flipped
