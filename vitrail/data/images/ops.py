"""From a decoded image to the network's input: the transforms of training and of evaluation.

Both are made of small callable values (geometry.py, augment.py), which are also to be had from here. They take
and return uint8 [H, W, 3]; nothing is normalised, since the model does that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.data.images.augment import ColorJitter, RandAugment, RandomErasing, ThreeAugment
from vitrail.data.images.geometry import (
    CentralCrop,
    Compose,
    Flip,
    InceptionCrop,
    Op,
    PadShift,
    RandomCrop,
    ResizeSmall,
    Size,
    Squash,
    resize,
)
from vitrail.data.settings import Augment, Preprocess
from vitrail.errors import UsageError

__all__ = [
    "CentralCrop",
    "ColorJitter",
    "Compose",
    "Flip",
    "InceptionCrop",
    "Op",
    "PadShift",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "ResizeSmall",
    "Squash",
    "ThreeAugment",
    "covering",
    "eval_transform",
    "resize",
    "train_transform",
    "transform_batch",
]


def train_transform(augment: Augment, preprocess: Preprocess) -> Op:
    """Return the transform of a training image; its result is exactly `preprocess.image_size`.

    In order: crop, flip, 3-Augment, RandAugment, colour jitter, erasing. Mixup and CutMix come later, on
    batches (mix.py). Raises UsageError for an impossible setting.
    """
    ops = _crop(augment, preprocess)
    if augment.flip:
        ops.append(Flip())
    if augment.three_augment:
        ops.append(ThreeAugment())
    if augment.randaugment is not None:
        ops.append(RandAugment(*augment.randaugment))
    if augment.color_jitter:
        ops.append(ColorJitter(augment.color_jitter))
    if augment.erasing:
        ops.append(RandomErasing(augment.erasing))
    return Compose(tuple(ops))


def eval_transform(preprocess: Preprocess) -> Op:
    """Return the transform of an image in evaluation; its result is exactly `preprocess.image_size`.

    "squash" resizes to it. "small" resizes to the smallest picture that covers image_size / crop and cuts the
    middle out: 224 with crop 0.875 makes the short side 256. Raises UsageError for an impossible setting.
    """
    size = preprocess.image_size
    if min(size) < 1:
        raise UsageError(f"preprocess.image_size is {size}; both sides must be at least 1 pixel")
    if preprocess.resize == "squash":
        return Squash(size, preprocess.interpolation)
    return Compose((ResizeSmall(covering(preprocess), preprocess.interpolation), CentralCrop(size)))


def transform_batch(op: Op, images: np.ndarray, rngs: Sequence[np.random.Generator]) -> np.ndarray:
    """Apply `op` to uint8 [n, H, W, 3] with one generator each: the same bits as `op(image, rng)` one by one.

    Shifting and mirroring work on the whole array, for small images held in memory; other operations loop.
    """
    return op.batch(images, rngs)


def _crop(augment: Augment, preprocess: Preprocess) -> list[Op]:
    size = preprocess.image_size
    as_evaluated = eval_transform(preprocess)  # also where it is not used: it checks the setting
    if augment.crop == "inception":
        return [InceptionCrop(size, augment.scale, augment.ratio, preprocess.interpolation)]
    if augment.crop == "random":
        size_before, interpolation = covering(preprocess), preprocess.interpolation
        if preprocess.resize == "squash":
            return [Squash(size_before, interpolation), RandomCrop(size)]
        return [ResizeSmall(size_before, interpolation), RandomCrop(size)]
    if augment.crop == "pad":
        return [as_evaluated, PadShift(augment.pad)]
    return [as_evaluated]


def covering(preprocess: Preprocess) -> Size:
    """Return the (height, width) that is covered before it is cropped: image_size / crop, rounded."""
    if not 0 < preprocess.crop <= 1:
        raise UsageError(f"preprocess.crop is {preprocess.crop}; it must be above 0 and at most 1")
    height, width = (round(side / preprocess.crop) for side in preprocess.image_size)
    return height, width
