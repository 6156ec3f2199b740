"""Augmentations that bend a picture, change its colours or erase a part of it.

Pillow does the work on the calling thread, because torch would start its own threads inside every loading thread.
All random numbers come from the generator that is passed in.

Images of other bands than RGB are float32 [H, W, bands], normalised, so that 0 is the mean. Colour operations are left
out for them, because they are made for the three bands of visible light.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitrail.data.images.geometry import Op, random_rectangles
from vitrail.data.settings import GREY, IGNORED

FULL = 10.0
"""Magnitude that is level 1 of an operation, and timm's largest."""

Change = Callable[[Image.Image, float], Image.Image]
Step = tuple[str, float]
"""An operation of `CHANGES` and its value."""


def changed(image: np.ndarray, change: Change, value: float) -> np.ndarray:
    """Return an image that was changed as a picture of Pillow; one of floats is changed band by band.

    A mask uint8 [H, W] is changed as a picture with a palette, which Pillow never interpolates.
    """
    if image.ndim == 2:
        return np.array(change(Image.frombytes("P", image.shape[::-1], np.ascontiguousarray(image)), value))
    if image.dtype == np.uint8:
        return np.array(change(Image.fromarray(image), value))
    return np.stack([np.asarray(change(Image.fromarray(band), value)) for band in np.moveaxis(image, 2, 0)], axis=2)


def affine(image: Image.Image, matrix: Sequence[float]) -> Image.Image:
    """Return an image whose pixel (x, y) is pixel (a x + b y + c, d x + e y + f) of `image`, matrix (a, ..., f)."""
    affine, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return image.transform(image.size, affine, matrix, resample=bilinear, fillcolor=fill(image))


def fill(image: Image.Image) -> tuple[int, ...] | int:
    """Return the colour of gaps: grey; in a normalised band 0, its mean; in a mask what does not count."""
    return GREY if image.mode == "RGB" else IGNORED if image.mode == "P" else 0


def solarize_table(added: float) -> list[int]:
    """Return the new value of each value: `added` more for dark ones."""
    return [min(255, value + int(added)) if value < 128 else value for value in range(256)]


MOVES: dict[str, Change] = {
    "rotate": lambda image, angle: image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=fill(image)),
    "shear_x": lambda image, shear: affine(image, (1, shear, 0, 0, 1, 0)),
    "shear_y": lambda image, shear: affine(image, (1, 0, 0, shear, 1, 0)),
    "translate_x": lambda image, share: affine(image, (1, 0, share * image.width, 0, 1, 0)),
    "translate_y": lambda image, share: affine(image, (1, 0, 0, 0, 1, share * image.height)),
}
"""Those of `CHANGES` that move pixels and change no colour; also for a single band of floats."""

QUARTERS = (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)

TURNS: dict[str, Change] = {
    "vflip": lambda image, _: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    "rotate90": lambda image, turns: image.transpose(QUARTERS[int(turns) - 1]) if turns else image,
}
"""Those of `CHANGES` that give every pixel a new place, without interpolation; also for a single band of floats."""

CHANGES: dict[str, Change] = {
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, int(threshold)),
    "solarize_add": lambda image, added: image.point(solarize_table(added) * 3),
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    **MOVES,
    **TURNS,
    "grey": lambda image, _: ImageOps.grayscale(image).convert("RGB"),
    "blur": lambda image, radius: image.filter(ImageFilter.GaussianBlur(radius)),
}
"""Name -> change of a picture, a function of (image, value). `vitrail.data.images.batched` has the same for batches."""

VALUES: dict[str, Callable[[float], float]] = {
    "autocontrast": lambda level: 0,
    "equalize": lambda level: 0,
    "invert": lambda level: 0,
    "posterize": lambda level: max(1, 4 - int(4 * abs(level))),
    "solarize": lambda level: 256 - int(256 * abs(level)),
    "solarize_add": lambda level: int(110 * abs(level)),
    **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), lambda level: 1 + 0.9 * level),
    "rotate": lambda level: 30 * level,
    "shear_x": lambda level: 0.3 * level,
    "shear_y": lambda level: 0.3 * level,
    "translate_x": lambda level: 0.45 * level,
    "translate_y": lambda level: 0.45 * level,
}
"""Operation of RandAugment -> its value at a level of timm. The level runs from -1 to 1, which is magnitude 10. A
larger absolute level is always stronger. The sign means left or right, or weaker or stronger colours. Operations with
one direction ignore the sign."""

PIXELS_224 = 100 / 224
"""Shift of level 1 in big_vision, 100 pixels, as a share of an image of 224."""

BIG_VISION: dict[str, Callable[[float], float]] = {
    **{name: VALUES[name] for name in ("autocontrast", "equalize", "invert", "rotate", "shear_x", "shear_y")},
    "posterize": lambda level: min(max(int(4 * abs(level)), 1), 8),
    "solarize": lambda level: int(256 * abs(level)),
    "solarize_add": VALUES["solarize_add"],
    **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), lambda level: 0.1 + 1.8 * abs(level)),
    "translate_x": lambda level: PIXELS_224 * level,
    "translate_y": lambda level: PIXELS_224 * level,
}
"""Operation -> its value at a level of big_vision (`pp/archive/autoaugment.py`), which AugReg's authors use. Levels go
beyond 1. Colours are weakened below level 0.5 and strengthened above it. Posterising and solarising get weaker with the
level. TensorFlow shifts bytes by at most 7 bits, so that one bit is always left."""


@dataclass(frozen=True)
class DrawnSteps(Op):
    """An operation that draws some of `CHANGES` and applies them in order."""

    @abstractmethod
    def steps(self, rng: np.random.Generator) -> Iterator[Step]:
        """Draw the changes of an image."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        picture = None
        for name, value in self.steps(rng):
            picture = CHANGES[name](Image.fromarray(image) if picture is None else picture, value)
        return image if picture is None else np.array(picture)


@dataclass(frozen=True)
class RandAugment(DrawnSteps):
    """Apply operations drawn from `VALUES` (Cubuk et al. 2019), as DeiT and "ResNet strikes back" do with timm.

    Each of `operations` drawn operations is applied with `probability`, with a random sign, at `magnitude` plus normal
    noise of standard deviation `noise`; the sum is limited to 0..10. Their "rand-m9-mstd0.5-inc1" is (2, 9).
    """

    operations: int = 2
    magnitude: float = 9
    noise: float = 0.5
    probability: float = 0.5

    names = tuple(VALUES)

    def steps(self, rng: np.random.Generator) -> Iterator[Step]:
        """See DrawnSteps."""
        for _ in range(self.operations):
            which, chance, sign = rng.random(3).tolist()
            magnitude = min(max(self.magnitude + self.noise * rng.standard_normal(), 0.0), FULL)
            if chance < self.probability:
                name = self.names[int(which * len(self.names))]
                yield name, VALUES[name](magnitude / FULL if sign < 0.5 else -magnitude / FULL)


@dataclass(frozen=True)
class BigVisionRandAugment(DrawnSteps):
    """RandAugment as in big_vision: every operation that is drawn is applied, at exactly this magnitude.

    Its cut-out is missing, and contrast is changed around the mean of the image.
    """

    operations: int
    magnitude: float

    def steps(self, rng: np.random.Generator) -> Iterator[Step]:
        """See DrawnSteps."""
        for _ in range(self.operations):
            which, sign = rng.random(2).tolist()
            name = list(BIG_VISION)[int(which * len(BIG_VISION))]
            yield name, BIG_VISION[name](self.magnitude / FULL if sign < 0.5 else -self.magnitude / FULL)


@dataclass(frozen=True)
class ThreeAugment(DrawnSteps):
    """Always apply one of grayscale, solarise and blur, at random (Touvron et al. 2022, "DeiT III")."""

    def steps(self, rng: np.random.Generator) -> Iterator[Step]:
        """See DrawnSteps."""
        which, strength = rng.random(2).tolist()
        yield ("grey", 0) if which < 1 / 3 else ("solarize", 128) if which < 2 / 3 else ("blur", 0.1 + 1.9 * strength)


@dataclass(frozen=True)
class ColorJitter(DrawnSteps):
    """Change brightness, contrast and saturation, in random order, each by a factor from 1 - s to 1 + s."""

    strength: float

    def steps(self, rng: np.random.Generator) -> Iterator[Step]:
        """See DrawnSteps."""
        factors = (1 + self.strength * (2 * rng.random(3) - 1)).tolist()
        names = ("brightness", "contrast", "color")
        yield from [(names[which], factors[which]) for which in rng.permutation(3)]


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
        top, left, height, width = self.box(image.shape[0], image.shape[1], rng)
        if not height:
            return image
        erased = image.copy()
        erased[top : top + height, left : left + width] = self.noise((height, width, image.shape[2]), rng)
        return erased

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of the rectangle in a picture; zeros if nothing is erased."""
        if rng.random() < self.probability:
            for h, w, down, right in random_rectangles(height * width, self.scale, self.ratio, rng):
                if 0 < h < height and 0 < w < width:
                    return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
        return 0, 0, 0, 0

    def noise(self, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
        """Return random pixels, uint8 [h, w, channels]."""
        return rng.integers(0, 256, shape, np.uint8)


@dataclass(frozen=True)
class MovingAugment(RandAugment):
    """The operations of RandAugment that move pixels, the same for every band; the gap is filled with the mean."""

    names = tuple(MOVES)

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        for name, value in self.steps(rng):
            image = changed(image, MOVES[name], value)
        return image


@dataclass(frozen=True)
class ErasingBands(RandomErasing):
    """`RandomErasing` with values of a standard normal distribution."""

    def noise(self, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
        """Return random values, float32 [h, w, bands]."""
        return rng.standard_normal(shape, np.float32)
