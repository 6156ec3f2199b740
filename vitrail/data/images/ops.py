"""The transforms of training and of evaluation, from a decoded image to the network's input.

Both consist of the operations in `geometry.py` and `augment.py`, which take and return uint8 [H, W, 3]. Nothing is
normalised here, because the model does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitrail.data.bands.pixels import EIGHT_BIT_RGB, Pixels, pixels_of
from vitrail.data.images.augment import ColorJitter, RandAugment, RandomErasing, ThreeAugment
from vitrail.data.images.band_augment import ErasingBands, MovingAugment
from vitrail.data.images.geometry import (
    CentralCrop,
    Compose,
    Flip,
    InceptionCrop,
    Letterbox,
    LetterboxedCrop,
    Op,
    PadShift,
    RandomCrop,
    ResizeSmall,
    Size,
    Squash,
    ToSize,
)
from vitrail.data.settings import GREY, Augment, Preprocess
from vitrail.errors import UsageError
from vitrail.words import shown


def train_transform(augment: Augment, preprocess: Preprocess) -> Op:
    """Return the transform of training images; its result has exactly the size `preprocess.image_size`."""
    pixels = pixels_of(preprocess.bands)
    ops = [op if isinstance(op, Op) else OwnOp(op, pixels) for op in augment.operations(preprocess)]
    return Compose(tuple(ops), pixels)


@dataclass(frozen=True)
class OwnOp(Op):
    """A function of the user's own as an operation."""

    function: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    pixels: Pixels = EIGHT_BIT_RGB

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op. Raises UsageError if the function returns another kind of image."""
        result = self.function(image, rng)
        channels, dtype = self.pixels.channels, np.dtype(self.pixels.dtype)
        wanted = (dtype, 3, (channels,))
        if not isinstance(result, np.ndarray) or (result.dtype, result.ndim, result.shape[2:]) != wanted:
            kind = f"{result.dtype} {result.shape}" if isinstance(result, np.ndarray) else shown(result)
            raise UsageError(
                f"{self.function} returned {kind}; an operation returns an image, {dtype} [H, W, {channels}]"
            )
        return result


def operations(augment: Augment, preprocess: Preprocess) -> list[Op]:
    """Return the built-in operations on a training image (see `Augment.operations`).

    The order is crop, flip, 3-Augment, RandAugment, colour jitter, erasing. Mixup and CutMix come later, on batches
    (mix.py). Images of other bands than RGB get the operations that move pixels; `left_out` names the others. Raises
    UsageError for an impossible setting.
    """
    ops = _crop(augment, preprocess)
    if augment.flip:
        ops.append(Flip())
    if preprocess.bands is not None:
        if augment.randaugment is not None:
            ops.append(MovingAugment(*augment.randaugment))
        return [*ops, ErasingBands(augment.erasing)] if augment.erasing else ops
    if augment.three_augment:
        ops.append(ThreeAugment())
    if augment.randaugment is not None:
        ops.append(RandAugment(*augment.randaugment))
    if augment.color_jitter:
        ops.append(ColorJitter(augment.color_jitter))
    if augment.erasing:
        ops.append(RandomErasing(augment.erasing))
    return ops


def left_out(augment: Augment, preprocess: Preprocess) -> str:
    """Return the augmentations that `operations` leaves out because they change colours; "" if there are none."""
    if preprocess.bands is None:
        return ""
    colours = {
        "randaugment": "the operations of RandAugment that change colours" if augment.randaugment is not None else "",
        "three_augment": "3-Augment" if augment.three_augment else "",
        "color_jitter": "colour jitter" if augment.color_jitter else "",
    }
    return ", ".join(filter(None, colours.values()))


def eval_transform(preprocess: Preprocess) -> Op:
    """Return the transform of images in evaluation; its result has exactly the size `preprocess.image_size`.

    "squash" resizes to this size, and "pad" to the largest picture of the same aspect ratio that fits into it, and
    fills the rest. "small" resizes to the smallest picture that covers image_size / crop, "squash-crop" to image_size /
    crop itself, and both cut out the middle: 224 with crop 0.875 makes the short side 256.
    """
    size = preprocess.image_size
    pixels = pixels_of(preprocess.bands)
    if preprocess.resize in CROPPED:
        return Compose((larger(preprocess), CentralCrop(size)), pixels)
    whole = _whole(preprocess, size)
    return whole if preprocess.bands is None else Compose((whole,), pixels)


CROPPED = ("small", "squash-crop")
"""The ways to resize of which evaluation shows the middle."""


def larger(preprocess: Preprocess) -> ToSize:
    """Return the resize to image_size / crop, from which a crop of image_size is cut."""
    if preprocess.resize == "small":
        return ResizeSmall(covering(preprocess), preprocess.interpolation)
    return _whole(preprocess, covering(preprocess))


def _whole(preprocess: Preprocess, size: Size) -> ToSize:
    """Return the resize to `size` that cuts nothing off."""
    if preprocess.resize == "pad":
        return Letterbox(size, preprocess.interpolation, preprocess.fill or GREY)
    return Squash(size, preprocess.interpolation)


def _crop(augment: Augment, preprocess: Preprocess) -> list[Op]:
    """Return the operations that bring a training image to its size."""
    size, interpolation, resize = preprocess.image_size, preprocess.interpolation, preprocess.resize
    as_evaluated = eval_transform(preprocess)
    if augment.crop == "inception":
        part = (size, augment.scale, augment.ratio, interpolation)
        if resize == "pad":
            return [LetterboxedCrop(*part, fill=preprocess.fill or GREY)]
        return [InceptionCrop(*part, whole=resize != "small")]
    if augment.crop == "random":
        return [larger(preprocess), RandomCrop(size)]
    if augment.crop == "pad":
        return [as_evaluated, PadShift(augment.pad)]
    return [as_evaluated]


def covering(preprocess: Preprocess) -> Size:
    """Return the (height, width) before the crop: image_size / crop, rounded down as timm and DeiT's code do."""
    # a crop may be the quotient of two sides, such as 384 / 448, which floating-point numbers do not hold exactly
    height, width = (math.floor(side / preprocess.crop + 1e-6) for side in preprocess.image_size)
    return height, width
