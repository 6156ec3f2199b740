"""The operations of `Augment.also`: what each word does to an image, and with which random numbers.

Pillow does the work on the calling thread, as torchvision's transforms do for images of Pillow, and the results are the
same (tests/data/test_worded.py). Words whose changes are in `CHANGES` may be left to the device (`batched.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitrail.data.images.augment import MOVES, TURNS, DrawnSteps, Step, affine, changed, fill
from vitrail.data.images.geometry import Op
from vitrail.data.images.native import Patches
from vitrail.data.images.own import named_operation
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.settings import Augment, Preprocess
from vitrail.data.wording import MEANINGS, Worded
from vitrail.errors import UsageError
from vitrail.ranges import size_text

KNOTS, QUADS = 5, 16
"""Number of displacements that `elastic` draws along a side, and of the quadrangles between which it interpolates."""


def operations(augment: Augment, preprocess: Preprocess, pixels: Pixels) -> list[Op]:
    """Return the operations of `augment.also` on images of the network's input size, or of any shape, in order.

    Raises UsageError for one that cannot work on such images.
    """
    return [operation(asked, preprocess, pixels) for asked in augment.worded]


def operation(asked: Worded, preprocess: Preprocess, pixels: Pixels) -> Op:
    """Return one of the operations. See `operations`."""
    native = preprocess.resize == "native"
    size = Patches.of(preprocess).size(1, 2) if native else preprocess.image_size  # one of the shapes, and no square
    if asked.is_path:
        return named_operation(asked, size, pixels)
    rgb = pixels is EIGHT_BIT_RGB
    if not rgb and MEANINGS[asked.name].colours:
        valid = [name for name, meaning in MEANINGS.items() if not meaning.colours]
        raise UsageError(
            f"augment.also {asked.text!r} is for RGB images with 8 bits, and these have other bands or bits. Words for "
            f"such images: {', '.join(valid)}"
        )
    if asked.name == "rotate90" and size[0] != size[1] and not native:
        raise UsageError(
            f"augment.also {asked.text!r} makes quarter turns, so the network's input must be square, not "
            f"{size_text(size)}. Use vflip, or a square image_size"
        )
    if asked.name not in STEPS:
        return WordedChange(asked.name, asked.strength, asked.share)
    steps = WordedSteps(asked.name, asked.strength, asked.share)
    return steps if rgb else OnBands(steps)


@dataclass(frozen=True)
class WordedSteps(DrawnSteps):
    """A word whose changes are in `CHANGES`."""

    name: str
    strength: float
    share: float

    def steps(self, rng: np.random.Generator) -> Iterator[Step]:
        """See DrawnSteps."""
        if rng.random() < self.share:
            yield from STEPS[self.name](self.strength, rng)


@dataclass(frozen=True)
class OnBands(Op):
    """Moves of pixels on images of other bands than RGB, on each band alike; a gap is filled with the mean."""

    moves: WordedSteps

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        for name, value in self.moves.steps(rng):
            image = changed(image, MOVES[name] if name in MOVES else TURNS[name], value)
        return image


@dataclass(frozen=True)
class WordedChange(Op):
    """A word that is computed on the host only."""

    name: str
    strength: float
    share: float

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        return DRAWN[self.name](image, self.strength, rng) if rng.random() < self.share else image


def _within(strength: float, rng: np.random.Generator) -> float:
    """Draw a number from -strength to strength."""
    return strength * (2 * rng.random() - 1)


def _factor(name: str) -> Callable[[float, np.random.Generator], list[Step]]:
    return lambda strength, rng: [(name, 1 + _within(strength, rng))]


def _fixed(name: str) -> Callable[[float, np.random.Generator], list[Step]]:
    return lambda strength, rng: [(name, strength)]


STEPS: dict[str, Callable[[float, np.random.Generator], list[Step]]] = {
    "vflip": _fixed("vflip"),
    "rotate90": lambda strength, rng: [("rotate90", float(rng.integers(4)))],
    "rotate": lambda strength, rng: [("rotate", _within(strength, rng))],
    "translate": lambda strength, rng: [(f"translate_{axis}", _within(strength, rng)) for axis in "xy"],
    "blur": lambda strength, rng: [("blur", strength * rng.random())],
    "brightness": _factor("brightness"),
    "contrast": _factor("contrast"),
    "saturation": _factor("color"),
    "sharpness": _factor("sharpness"),
    "grayscale": _fixed("grey"),
    **{name: _fixed(name) for name in ("autocontrast", "equalize", "invert", "solarize", "posterize")},
}
"""Word -> function of (strength, random numbers) that draws changes of `CHANGES`."""


def _shear(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Slant an image around its middle, across and down, by up to `strength` degrees each."""
    across, down = (math.tan(math.radians(_within(strength, rng))) for _ in range(2))
    return _around_middle(image, (1 + across * down, across, down, 1))


def _zoom(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Scale an image around its middle by a factor from 1 - strength to 1 + strength."""
    inverse = 1 / (1 + _within(strength, rng))
    return _around_middle(image, (inverse, 0, 0, inverse))


def _around_middle(image: np.ndarray, matrix: tuple[float, float, float, float]) -> np.ndarray:
    """Return an image whose pixel at (x, y) from the middle is pixel (a x + b y, d x + e y), matrix (a, b, d, e)."""
    (a, b, d, e), x, y = matrix, image.shape[1] / 2, image.shape[0] / 2
    full = (a, b, x - a * x - b * y, d, e, y - d * x - e * y)
    return changed(image, lambda picture, _: affine(picture, full), 0)


def _perspective(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Move each corner inwards, across and down, by up to half of the side times `strength`."""
    height, width = image.shape[:2]
    corners = np.array([(0, 0), (width, 0), (width, height), (0, height)], float)
    inwards = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) * rng.random((4, 2)) * strength / 2
    matrix = perspective_matrix(corners, corners + inwards * (width, height))

    def change(picture: Image.Image, _: float) -> Image.Image:
        way, bilinear = Image.Transform.PERSPECTIVE, Image.Resampling.BILINEAR
        return picture.transform(picture.size, way, matrix, resample=bilinear, fillcolor=fill(picture))

    return changed(image, change, 0)


def perspective_matrix(before: np.ndarray, after: np.ndarray) -> list[float]:
    """Return Pillow's eight coefficients of the perspective that moves four points [4, 2] to four others.

    Pixel (x, y) becomes pixel ((a x + b y + c) / (g x + h y + 1), (d x + e y + f) / (g x + h y + 1)) of the image.
    """
    rows = []
    for (u, v), (x, y) in zip(before.tolist(), after.tolist(), strict=True):
        rows += [(x, y, 1, 0, 0, 0, -u * x, -u * y), (0, 0, 0, x, y, 1, -v * x, -v * y)]
    return np.linalg.solve(np.array(rows), before.reshape(-1)).tolist()  # type: ignore[no-any-return]


def _elastic(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Bend an image as rubber: displacements of a coarse grid, of this standard deviation as a share of the sides.

    Between them they are interpolated smoothly (Ronneberger et al. 2015, "U-Net", section 3.1).
    """
    height, width = image.shape[:2]
    coarse = (strength * rng.standard_normal((2, KNOTS, KNOTS))).astype(np.float32)
    fine = (Image.fromarray(one).resize((QUADS + 1, QUADS + 1), Image.Resampling.BICUBIC) for one in coarse)
    across, down = (np.asarray(one) for one in fine)
    x, y = (np.unique(np.rint(np.linspace(0, side, QUADS + 1)).astype(int)) for side in (width, height))
    mesh = []
    for row in range(len(y) - 1):
        for column in range(len(x) - 1):
            corners = [(row, column), (row + 1, column), (row + 1, column + 1), (row, column + 1)]
            moved = [(x[j] + width * across[i, j], y[i] + height * down[i, j]) for i, j in corners]
            box = (int(x[column]), int(y[row]), int(x[column + 1]), int(y[row + 1]))
            mesh.append((box, tuple(float(number) for point in moved for number in point)))

    def change(picture: Image.Image, _: float) -> Image.Image:
        way, bilinear = Image.Transform.MESH, Image.Resampling.BILINEAR
        return picture.transform(picture.size, way, mesh, resample=bilinear, fillcolor=fill(picture))

    return changed(image, change, 0)


def _hue(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Turn the circle of colours by up to this share of it; grey stays grey."""
    colours = np.array(Image.fromarray(image).convert("HSV"))
    colours[..., 0] += np.uint8(int(255 * _within(strength, rng)) % 256)
    return np.array(Image.frombytes("HSV", image.shape[1::-1], colours.tobytes()).convert("RGB"))


def _noise(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Add normal noise with a deviation of up to this share of the range; of other bands, of their deviation."""
    noise = np.float32(strength * rng.random()) * rng.standard_normal(image.shape, np.float32)
    if image.dtype != np.uint8:
        return image + noise
    return np.rint(image + 255 * noise).clip(0, 255).astype(np.uint8)


DRAWN: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "shear": _shear,
    "zoom": _zoom,
    "perspective": _perspective,
    "elastic": _elastic,
    "hue": _hue,
    "noise": _noise,
}
"""Word -> function of (image, strength, random numbers) that returns the changed image."""
