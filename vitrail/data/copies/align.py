"""Whether two small grey pictures show the same picture: one is laid over the other, and their details are correlated.

A copy may be cropped, resized, squashed, brighter or grey. So the transformation has four parameters, a scale and a
shift in each direction, and brightness and contrast are free. It is found by least squares on the pixels (Lucas and
Kanade 1981), on a blurred picture first.

Pictures of one kind, such as scans of one organ, are alike in most of their pixels. So two things are taken off before
the pictures are correlated: their blurred selves, and the part that they share with the mean picture of the data set
(the correlation is partial). Measured on dark grey scans, the correlation without the mean picture is above 0.9 for all
pairs of different scans; with it, below 0.5 (`python -m benchmarks.dedup`).
"""

from __future__ import annotations

from functools import cache

import numpy as np

SIDE = 64
"""Side in pixels of the pictures that are compared."""
BLURS = (6.0, 3.0, 1.5)
"""Standard deviation in pixels of the blur of each level of the search."""
STEPS = 6
"""Number of steps of the search on each level."""
SMALLEST = 0.7
"""Smallest scale in one direction, so that a copy may be cropped by 30 %; the largest scale is its inverse."""
COARSE = 3.0
"""Standard deviation in pixels of the blurred picture that is taken off."""
FINE = 0.7
"""Standard deviation in pixels of the blur of details, which removes most of the noise of compression."""
SOFT = 0.5
"""The same in pixels of the smaller stored image, if its side is below `SIDE`: what it cannot show is not compared."""
LONGEST_STEP = 0.2
"""Largest change of a parameter in one step, in units of half a picture."""


@cache
def _blur(deviation: float) -> np.ndarray:
    """Return float32 [SIDE, SIDE] that blurs the columns of a picture by a product from the left."""
    apart = np.subtract.outer(np.arange(SIDE), np.arange(SIDE))
    weights = np.exp(-np.square(apart / deviation) / 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


_GRID = np.linspace(-1, 1, SIDE, dtype=np.float32)
_LEVELS = [_blur(deviation) for deviation in BLURS]


def details(pictures: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return pictures float32 [P, SIDE, SIDE] without their blurred selves, and without what `sides` cannot show.

    sides: int64 [P], shorter side in pixels of the smaller image that each one is compared with, or is; at most SIDE.
    """
    scales = (SIDE / sides).tolist()
    fine = np.stack([_blur(max(FINE, SOFT * scale)) for scale in scales])
    coarse = np.stack([_blur(COARSE * scale) for scale in scales])
    return fine @ pictures @ fine.transpose(0, 2, 1) - coarse @ pictures @ coarse.transpose(0, 2, 1)


def correlations(left: np.ndarray, right: np.ndarray, common: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return the correlation, -1 to 1, of the details of each left picture, laid over its right one; float32 [P].

    The pictures are float32 [P, SIDE, SIDE]. `common` float32 [SIDE, SIDE] is a mean picture; what the details of the
    pictures share with its details does not count. `sides` are those of `details`.
    """
    moved = np.tile(np.array([1, 0, 1, 0], np.float32), (len(left), 1))  # scale and shift of columns, then of rows
    left, right = _standardised(left), _standardised(right)
    for blur in _LEVELS:
        ours, theirs = blur @ left @ blur.T, blur @ right @ blur.T
        for _ in range(STEPS):
            moved = _step(ours, theirs, moved)
    warped, mask = _warped(left, moved)
    shared = details(np.broadcast_to(common, right.shape), sides)
    one, two = (_without(details(pictures, sides), shared, mask) for pictures in (warped, right))
    size = np.sqrt((one**2).sum(axis=(1, 2)) * (two**2).sum(axis=(1, 2)))
    return (one * two).sum(axis=(1, 2)) / (size + 1e-6)


def _standardised(pictures: np.ndarray) -> np.ndarray:
    """Return pictures of mean 0 and standard deviation 1, or 0 for a flat one: least squares are well-conditioned."""
    deviation = pictures.std(axis=(1, 2), keepdims=True)
    return (pictures - pictures.mean(axis=(1, 2), keepdims=True)) / np.maximum(deviation, 0.1)


def _step(left: np.ndarray, right: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return the transformations [P, 4] after one step of least squares."""
    warped, mask = _warped(left, moved)
    down, across = np.gradient(warped, 2 / (SIDE - 1), axis=(1, 2))
    columns = [across * _GRID, across, down * _GRID[:, None], down, warped, np.ones_like(warped)]
    design = np.stack(columns, axis=-1).reshape(len(left), SIDE * SIDE, 6)
    weighed = (design * mask.reshape(len(left), -1, 1)).transpose(0, 2, 1)
    normal, asked = weighed @ design, weighed @ right.reshape(len(left), -1, 1)
    damping = 1e-3 * np.eye(6, dtype=np.float32) * (normal + 1e-6)
    found = np.linalg.solve(normal + damping, asked)[..., 0]
    contrast = np.where(np.abs(found[:, 4:5]) > 0.1, found[:, 4:5], 1)
    change = np.clip(found[:, :4] / contrast, -LONGEST_STEP, LONGEST_STEP)
    scales, shifts = moved[:, ::2], moved[:, 1::2]
    new = np.empty_like(moved)
    new[:, ::2] = np.clip(scales * (1 + change[:, ::2]), SMALLEST, 1 / SMALLEST)
    new[:, 1::2] = np.clip(shifts + scales * change[:, 1::2], SMALLEST - 1, 1 - SMALLEST)
    return new


def _warped(pictures: np.ndarray, moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the transformed pictures, and 1 where a pixel comes from inside the picture, else 0."""
    columns, inside_columns = _resampling(moved[:, 0], moved[:, 1])
    rows, inside_rows = _resampling(moved[:, 2], moved[:, 3])
    return rows @ pictures @ columns.transpose(0, 2, 1), inside_rows[:, :, None] * inside_columns[:, None, :]


def _resampling(scale: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [P, SIDE, SIDE] that resamples linearly by a product from the left, and [P, SIDE]: 1 inside, else 0."""
    place = (scale[:, None] * _GRID + shift[:, None] + 1) * ((SIDE - 1) / 2)
    inside = (place > -0.5) & (place < SIDE - 0.5)
    weights = 1 - np.abs(place.clip(0, SIDE - 1)[:, :, None] - np.arange(SIDE, dtype=np.float32))
    return weights.clip(min=0), inside.astype(np.float32)


def _without(pictures: np.ndarray, common: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the masked pictures without their mean, and without what they share with `common` or its mirror image."""
    one, two, found = (_centred(part, mask) for part in (common, common[..., ::-1], pictures))
    two = two - _share(two, one)
    return found - _share(found, one) - _share(found, two)


def _centred(pictures: np.ndarray, mask: np.ndarray) -> np.ndarray:
    count = np.maximum(mask.sum(axis=(1, 2), keepdims=True), 1)
    return mask * (pictures - (mask * pictures).sum(axis=(1, 2), keepdims=True) / count)


def _share(pictures: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the part of each picture that is a multiple of the other one."""
    product, size = ((other * part).sum(axis=(1, 2), keepdims=True) for part in (pictures, other))
    return product / (size + 1e-6) * other
