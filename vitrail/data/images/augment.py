"""Augmentations that bend a picture, change its colours or erase a part of it.

Pillow does the work on the calling thread, because torch would start its own threads inside every loading thread.
All random numbers come from the generator that is passed in.

Images of other bands than RGB are float32 [H, W, bands], normalised, so that 0 is the mean. Colour operations are left
out for them, because they are made for the three bands of visible light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitrail.data.images.geometry import Op, random_rectangles
from vitrail.data.settings import GREY

USUAL_MAGNITUDE = 10.0
"""Magnitude that is level 1 of an operation."""
LARGEST_MAGNITUDE = 30.0
"""Largest magnitude in the experiments of RandAugment's authors."""

Change = Callable[[Image.Image, float], Image.Image]


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Return an image whose pixel (x, y) is pixel (a x + b y + c, d x + e y + f) of `image`, matrix (a, ..., f)."""
    affine, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return image.transform(image.size, affine, matrix, resample=bilinear, fillcolor=_fill(image))


def _fill(image: Image.Image) -> tuple[int, ...] | int:
    return GREY if image.mode == "RGB" else 0  # a normalised band has the mean 0


def _solarize_add(image: Image.Image, level: float) -> Image.Image:
    added = int(110 * abs(level))
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


MOVES: dict[str, Change] = {
    "rotate": lambda image, level: image.rotate(30 * level, Image.Resampling.BILINEAR, fillcolor=_fill(image)),
    "shear_x": lambda image, level: _affine(image, (1, 0.3 * level, 0, 0, 1, 0)),
    "shear_y": lambda image, level: _affine(image, (1, 0, 0, 0.3 * level, 1, 0)),
    "translate_x": lambda image, level: _affine(image, (1, 0, 0.45 * level * image.width, 0, 1, 0)),
    "translate_y": lambda image, level: _affine(image, (1, 0, 0, 0, 1, 0.45 * level * image.height)),
}
"""Those of `OPERATIONS` that move pixels and change no colour; also for a single band of floats."""

OPERATIONS: dict[str, Change] = {
    "autocontrast": lambda image, level: ImageOps.autocontrast(image),
    "equalize": lambda image, level: ImageOps.equalize(image),
    "invert": lambda image, level: ImageOps.invert(image),
    "posterize": lambda image, level: ImageOps.posterize(image, max(1, 4 - int(4 * abs(level)))),
    "solarize": lambda image, level: ImageOps.solarize(image, 256 - int(256 * abs(level))),
    "solarize_add": _solarize_add,
    "color": lambda image, level: ImageEnhance.Color(image).enhance(1 + 0.9 * level),
    "contrast": lambda image, level: ImageEnhance.Contrast(image).enhance(1 + 0.9 * level),
    "brightness": lambda image, level: ImageEnhance.Brightness(image).enhance(1 + 0.9 * level),
    "sharpness": lambda image, level: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * level),
    **MOVES,
}
"""Name -> operation of RandAugment, a function of (image, level). The level runs from -1 to 1, which is magnitude 10.
A larger absolute level is always stronger. The sign means left or right, or weaker or stronger colours. Operations with
one direction ignore the sign."""


@dataclass(frozen=True)
class RandAugment(Op):
    """Apply operations drawn from `OPERATIONS` (Cubuk et al. 2019), as DeiT and "ResNet strikes back" do.

    Each of `operations` drawn operations is applied with `probability`, with a random sign, at `magnitude` plus normal
    noise of standard deviation `noise`; the sum is limited to 0..10. Their "rand-m9-mstd0.5-inc1" is (2, 9). Magnitudes
    above 10 (AugReg has 15 and 20) extend the same scale; the sum is then limited to 0..30.
    """

    operations: int = 2
    magnitude: float = 9
    noise: float = 0.5
    probability: float = 0.5

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        picture = None
        for change, level in self.drawn(list(OPERATIONS.values()), rng):
            picture = change(Image.fromarray(image) if picture is None else picture, level)
        return image if picture is None else np.array(picture)

    def drawn(self, changes: list[Change], rng: np.random.Generator) -> Iterator[tuple[Change, float]]:
        """Yield the operations to apply, drawn from `changes`, each with its level."""
        most = USUAL_MAGNITUDE if self.magnitude <= USUAL_MAGNITUDE else LARGEST_MAGNITUDE
        for _ in range(self.operations):
            which, chance, sign = rng.random(3).tolist()
            magnitude = min(max(self.magnitude + self.noise * rng.standard_normal(), 0.0), most)
            if chance < self.probability:
                yield changes[int(which * len(changes))], magnitude / 10 if sign < 0.5 else -magnitude / 10


@dataclass(frozen=True)
class ThreeAugment(Op):
    """Always apply one of grayscale, solarise and blur, at random (Touvron et al. 2022, "DeiT III")."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        which, strength = rng.random(2).tolist()
        picture = Image.fromarray(image)
        if which < 1 / 3:
            picture = ImageOps.grayscale(picture).convert("RGB")
        elif which < 2 / 3:
            picture = ImageOps.solarize(picture, 128)
        else:
            picture = picture.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * strength))
        return np.array(picture)


@dataclass(frozen=True)
class ColorJitter(Op):
    """Change brightness, contrast and saturation, in random order, each by a factor from 1 - s to 1 + s."""

    strength: float

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        picture = Image.fromarray(image)
        factors = (1 + self.strength * (2 * rng.random(3) - 1)).tolist()
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for which in rng.permutation(3):
            picture = enhancers[which](picture).enhance(factors[which])
        return np.array(picture)


@dataclass(frozen=True)
class RandomErasing(Op):
    """Overwrite a rectangle with random pixels, with a probability (Zhong et al. 2017).

    The rectangle's share of the area is uniform in `scale`, and its height over width is log-uniform in `ratio`. If
    none of ten draws fits into the picture, nothing is erased.
    """

    probability: float
    scale: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        if rng.random() >= self.probability:
            return image
        height, width, channels = image.shape
        for h, w, down, right in random_rectangles(height * width, self.scale, self.ratio, rng):
            if 0 < h < height and 0 < w < width:
                top, left = int(down * (height - h + 1)), int(right * (width - w + 1))
                erased = image.copy()
                erased[top : top + h, left : left + w] = self.noise((h, w, channels), rng)
                return erased
        return image

    def noise(self, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
        """Return random pixels, uint8 [h, w, channels]."""
        return rng.integers(0, 256, shape, np.uint8)


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
