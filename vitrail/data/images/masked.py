"""What the transform of an image does to its mask: pixels move alike, with the same random numbers, and colours stay.

Values of a mask are classes, so nothing is interpolated: a pixel takes the value at its centre. What comes from outside
the picture, and what was erased, does not count (`IGNORED`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitrail.data.images.augment import MOVES, TURNS, DrawnSteps, RandomErasing, changed
from vitrail.data.images.geometry import (
    CentralCrop,
    Compose,
    CropBorder,
    Flip,
    InceptionCrop,
    Op,
    PadShift,
    RandomCrop,
    ResizeSmall,
    Squash,
)
from vitrail.data.images.worded import DRAWN, OnBands, WordedChange
from vitrail.data.settings import IGNORED
from vitrail.errors import UsageError

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Mask uint8 [H, W] and random numbers -> the mask of the transformed image."""
PLACED = (CentralCrop, CropBorder, Flip, PadShift, RandomCrop)
"""Operations that only choose and copy pixels, whatever their number of channels."""
MOVING = ("shear", "zoom", "perspective", "elastic")
"""Those of `DRAWN` that move pixels."""


def nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a mask [H, W] resized to [height, width]: each pixel takes the value at its centre."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64)
        for new, old in zip((height, width), mask.shape, strict=True)
    )
    return mask[rows[:, None], columns]


@dataclass(frozen=True)
class MaskTransform:
    """The counterpart of the transform of an image: uint8 [H, W] -> uint8 [h, w].

    It must get random numbers equal to those of the image. Raises UsageError for an operation of which it is not known
    where it moves pixels.
    """

    op: Op

    def __post_init__(self) -> None:
        for op in _parts(self.op):
            _counterpart(op, self.op.pixels.channels)

    def __call__(self, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See the class."""
        for op in _parts(self.op):
            mask = _counterpart(op, self.op.pixels.channels)(mask, rng)
        return mask


def _parts(op: Op) -> tuple[Op, ...]:
    return tuple(part for one in op.ops for part in _parts(one)) if isinstance(op, Compose) else (op,)


def _counterpart(op: Op, channels: int) -> Change:
    """Return what an operation on images of so many channels does to a mask. Raises UsageError."""
    if isinstance(op, PLACED):
        return lambda mask, rng: op(mask[:, :, None], rng)[:, :, 0]
    if isinstance(op, Squash):
        return lambda mask, rng: nearest(mask, *op.size)
    if isinstance(op, ResizeSmall):
        return lambda mask, rng: _small(op, mask)
    if type(op) is InceptionCrop:
        return lambda mask, rng: _cropped(op, mask, rng)
    if isinstance(op, DrawnSteps):
        return lambda mask, rng: _moved(op, mask, rng)
    if isinstance(op, OnBands):
        return lambda mask, rng: _moved(op.moves, mask, rng)
    if isinstance(op, RandomErasing):
        return lambda mask, rng: _erased(op, mask, rng, channels)
    if isinstance(op, WordedChange):
        return lambda mask, rng: _worded(op, mask, rng, channels)
    raise UsageError(
        f"{type(op).__name__} does not say where it moves the pixels of a mask. Valid with masks are augment.crop, "
        "augment.flip, RandAugment, colours, erasing and the words of augment.also, without transforms of your "
        "own, and preprocess.resize squash"
    )


def _small(op: ResizeSmall, mask: np.ndarray) -> np.ndarray:
    height, width = op.middle(*mask.shape)  # type: ignore[misc]
    top, left = (mask.shape[0] - height) // 2, (mask.shape[1] - width) // 2
    return nearest(mask[top : top + height, left : left + width], *op.resized(height, width))


def _cropped(op: InceptionCrop, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    top, left, height, width = op.box(mask.shape[0], mask.shape[1], rng)
    return nearest(mask[top : top + height, left : left + width], *op.size)


def _moved(op: DrawnSteps, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    for name, value in op.steps(rng):
        if (change := MOVES.get(name) or TURNS.get(name)) is not None:
            mask = changed(mask, change, value)
    return mask


def _erased(op: RandomErasing, mask: np.ndarray, rng: np.random.Generator, channels: int) -> np.ndarray:
    top, left, height, width = op.box(mask.shape[0], mask.shape[1], rng)
    if not height:
        return mask
    op.noise((height, width, channels), rng)  # later operations draw after it
    erased = mask.copy()
    erased[top : top + height, left : left + width] = IGNORED
    return erased


def _worded(op: WordedChange, mask: np.ndarray, rng: np.random.Generator, channels: int) -> np.ndarray:
    if op.name in MOVING:
        return DRAWN[op.name](mask, op.strength, rng) if rng.random() < op.share else mask
    op(np.zeros((*mask.shape, channels), np.uint8), rng)  # later operations draw after it
    return mask
