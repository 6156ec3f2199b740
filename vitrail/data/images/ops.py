"""The transforms of training and of evaluation, from a decoded image to the network's input.

Both consist of the operations in `geometry.py` and `augment.py`, which take and return uint8 [H, W, 3]. Nothing is
normalised here, because the model does that.

`views` makes several views of one image: as it is and mirrored, or ten crops, one above the other in one array.
`SeveralInputs` is the preprocessing of several networks that see one image, each in its own way (`Stacked`).
`ModelInput` is the preprocessing of a network as a callable for images of Pillow, as torchvision's transforms are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.images import worded
from vitrail.data.images.augment import (
    FULL,
    BigVisionRandAugment,
    ColorJitter,
    ErasingBands,
    MovingAugment,
    RandAugment,
    RandomErasing,
    ThreeAugment,
)
from vitrail.data.images.decode import pillow_pixels
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
)
from vitrail.data.images.native import NativeCrop, NativeResize, Patches, Strip
from vitrail.data.images.own import OwnOp
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels, pixels_of
from vitrail.data.settings import GREY, Augment, Preprocess
from vitrail.errors import UsageError


def train_transform(augment: Augment, preprocess: Preprocess) -> Op:
    """Return the transform of training images; its result has exactly the size `preprocess.size`."""
    pixels = pixels_of(preprocess.bands)
    ops = [op if isinstance(op, Op) else OwnOp(op, pixels) for op in augment.operations(preprocess)]
    return Compose((*ops, *_cut(preprocess)), pixels)


def operations(augment: Augment, preprocess: Preprocess) -> list[Op]:
    """Return the built-in operations on a training image (see `Augment.operations`).

    The order is crop, flip, those in words, 3-Augment, RandAugment, colour jitter, erasing. Mixup and CutMix come
    later, on batches (mix.py). Images of other bands than RGB get the operations that move pixels;
    `colour_changes_left_out` names the others. Raises UsageError for an impossible setting.
    """
    ops = _crop(augment, preprocess)
    if augment.flip:
        ops.append(Flip())
    ops += worded.operations(augment, preprocess, pixels_of(preprocess.bands))
    if preprocess.bands is not None:
        if augment.randaugment is not None:
            ops.append(MovingAugment(*augment.randaugment))
        return [*ops, ErasingBands(augment.erasing)] if augment.erasing else ops
    if augment.three_augment:
        ops.append(ThreeAugment())
    if augment.randaugment is not None:
        ops.append(_randaugment(augment, *augment.randaugment))
    if augment.color_jitter:
        ops.append(ColorJitter(augment.color_jitter))
    if augment.erasing:
        ops.append(RandomErasing(augment.erasing))
    return ops


def _randaugment(augment: Augment, operations: int, magnitude: float) -> Op:
    form = augment.randaugment_form or ("timm" if magnitude <= FULL else "big_vision")
    if form == "timm" and magnitude > FULL:
        raise UsageError(
            f"augment.randaugment has magnitude {magnitude:g}, and timm's goes to {FULL:g}: choose a smaller one, or "
            "augment.randaugment_form big_vision"
        )
    return (RandAugment if form == "timm" else BigVisionRandAugment)(operations, magnitude)


def colour_changes_left_out(augment: Augment, preprocess: Preprocess) -> str:
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
    """Return the transform of images in evaluation; its result has exactly the size `preprocess.size`.

    "squash" resizes to image_size, and "pad" to the largest picture of the same aspect ratio that fits into it, and
    fills the rest. "small" resizes to the smallest picture that covers image_size / crop, "squash-crop" to image_size /
    crop itself, and both cut out the middle: 224 with crop 0.875 makes the short side 256. "native" makes a strip of
    what `shown_transform` shows.
    """
    if isinstance(preprocess, SeveralInputs):
        return Stacked(tuple(map(eval_transform, preprocess.each)))
    shown = shown_transform(preprocess)
    return Compose((shown, *cut), shown.pixels) if (cut := _cut(preprocess)) else shown


def shown_transform(preprocess: Preprocess) -> Op:
    """Return `eval_transform` without the last step of "native": what it returns is a picture, maybe of any shape."""
    size = preprocess.image_size
    pixels = pixels_of(preprocess.bands)
    if preprocess.resize in CROPPED:
        return Compose((larger(preprocess), CentralCrop(size)), pixels)
    whole = _whole(preprocess, size)
    return whole if preprocess.bands is None else Compose((whole,), pixels)


def tile_transform(preprocess: Preprocess) -> Op:
    """Return the transform of tiles; its result has exactly the size `preprocess.size`."""
    if isinstance(preprocess, SeveralInputs):
        return Stacked(tuple(map(tile_transform, preprocess.each)))
    squash = Squash(preprocess.image_size, preprocess.interpolation)
    return Compose((squash, *_cut(preprocess)), pixels_of(preprocess.bands))


def _cut(preprocess: Preprocess) -> tuple[Strip, ...]:
    """Return the operation that makes strips of the images of "native"; no other way of resizing has one."""
    return (Strip(Patches.of(preprocess)),) if preprocess.resize == "native" else ()


CROPPED = ("small", "squash-crop")
"""The ways to resize of which evaluation shows the middle."""


def larger(preprocess: Preprocess) -> Op:
    """Return the resize to image_size / crop, from which a crop of image_size is cut."""
    if preprocess.resize == "small":
        return ResizeSmall(covering(preprocess), preprocess.interpolation)
    return _whole(preprocess, covering(preprocess))


def _whole(preprocess: Preprocess, size: Size) -> Op:
    """Return the resize to `size` that cuts nothing off."""
    if preprocess.resize == "native":
        return NativeResize(Patches.of(preprocess), preprocess.interpolation)
    if preprocess.resize == "pad":
        return Letterbox(size, preprocess.interpolation, preprocess.fill or GREY)
    return Squash(size, preprocess.interpolation)


def _crop(augment: Augment, preprocess: Preprocess) -> list[Op]:
    """Return the operations that bring a training image to its size."""
    size, interpolation, resize = preprocess.image_size, preprocess.interpolation, preprocess.resize
    as_evaluated = shown_transform(preprocess)
    if augment.crop == "inception":
        part = (size, augment.scale, augment.ratio, interpolation)
        if resize == "native":
            return [NativeCrop(InceptionCrop(*part, whole=True), Patches.of(preprocess))]
        if resize == "pad":
            return [LetterboxedCrop(*part, fill=preprocess.fill or GREY)]
        return [InceptionCrop(*part, whole=resize != "small")]
    if augment.crop == "random":
        if resize == "native":
            raise UsageError(
                "augment.crop random cuts one size out of all images, and with preprocess.resize native each has its "
                "own: use augment.crop inception, pad or center"
            )
        return [larger(preprocess), RandomCrop(size)]
    if augment.crop == "pad":
        return [as_evaluated, PadShift(augment.pad)]
    return [as_evaluated]


def covering(preprocess: Preprocess) -> Size:
    """Return the (height, width) before the crop: image_size / crop, rounded down as timm and DeiT's code do."""
    # a crop may be the quotient of two sides, such as 384 / 448, which floating-point numbers do not hold exactly
    height, width = (math.floor(side / preprocess.crop + 1e-6) for side in preprocess.image_size)
    return height, width


ViewKind = Literal["flip", "crops"]
VIEWS: dict[ViewKind, int] = {"flip": 2, "crops": 10}
"""Number of views of an image."""


@dataclass(frozen=True)
class Mirrored(Op):
    """The result of `shown`, and below it its mirror image: uint8 [2 * height, width, 3], or two strips."""

    shown: Op
    cut: tuple[Strip, ...] = ()
    """What makes a strip of each, with `preprocess.resize` native."""

    @property
    def pixels(self) -> Pixels:  # type: ignore[override]
        """See Op."""
        return self.shown.pixels

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        seen = self.shown(image, rng)
        return np.concatenate([Compose(self.cut)(view, rng) for view in (seen, seen[:, ::-1])])


@dataclass(frozen=True)
class TenCrops(Op):
    """Four corners and the middle of the result of `resize`, and their mirror images: uint8 [10 * height, width, 3].

    These are the ten patches of Krizhevsky et al. (2012, section 4.1).
    """

    resize: Op
    size: Size
    pixels: Pixels = EIGHT_BIT_RGB

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        seen, (height, width) = self.resize(image, rng), self.size
        bottom, right = seen.shape[0] - height, seen.shape[1] - width
        corners = ((0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2))
        crops = [seen[top : top + height, left : left + width] for top, left in corners]
        return np.concatenate([*crops, *(crop[:, ::-1] for crop in crops)])


def views(kind: ViewKind, preprocess: Preprocess, shown: Op) -> Op:
    """Return the transform that makes all views of an image. `shown` is that of one view (`eval_transform`).

    Raises UsageError for crops if one view shows the whole image.
    """
    if isinstance(preprocess, SeveralInputs):
        assert isinstance(shown, Stacked)
        parts = zip(preprocess.each, shown.each, strict=True)
        return Stacked(tuple(views(kind, own, part) for own, part in parts), VIEWS[kind])
    if kind == "flip":
        return Mirrored(shown_transform(preprocess), cut) if (cut := _cut(preprocess)) else Mirrored(shown)
    if preprocess.resize not in CROPPED or preprocess.crop == 1:
        whole = {"squash": "images are resized to its size", "pad": "images are padded to its size"}
        whole["native"] = "images keep their proportions"
        why = whole.get(preprocess.resize, "its crop is 1")
        raise UsageError(
            f"--tta crops cuts ten views out of the image, but this network sees the whole image ({why}). "
            "Use --tta flip"
        )
    return TenCrops(larger(preprocess), preprocess.image_size, shown.pixels)


@dataclass(frozen=True)
class SeveralInputs(Preprocess):
    """The preprocessing of several networks that see one image. The other fields are those of the first."""

    each: tuple[Preprocess, ...] = ()

    @classmethod
    def of(cls, each: Sequence[Preprocess]) -> Preprocess:
        """Return the preprocessing of networks with these; a plain one if all are equal."""
        different = tuple(dict.fromkeys(each))
        return each[0] if len(different) == 1 else cls(**vars(each[0]), each=different)

    @property
    def size(self) -> Size:
        """See `Preprocess.size`."""
        return sum(math.prod(one.size) for one in self.each), 1


@dataclass(frozen=True)
class Stacked(Op):
    """The results of several transforms of one image, as one column of pixels: uint8 [all pixels, 1, 3].

    Each result consists of `count` views, one above the other. In the column all first views come first.
    """

    each: tuple[Op, ...]
    count: int = 1

    @property
    def pixels(self) -> Pixels:  # type: ignore[override]
        """See Op."""
        return self.each[0].pixels

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        seen = [op(image, rng) for op in self.each]
        columns = [part.reshape(self.count, -1, 1, part.shape[-1]) for part in seen]
        return np.concatenate(columns, axis=1).reshape(-1, 1, seen[0].shape[-1])


@dataclass(frozen=True)
class ModelInput:
    """Image of Pillow's -> the network's input, float32 [3, height, width]: upright, RGB, resized, cropped, normalised.

    The result for `PIL.Image.open(file)` is to the bit what `predict` computes from the file. It can be pickled, for
    the workers of a DataLoader. A conversion before it (`image.convert("RGB")`, which torchvision's ImageFolder does
    unless it gets `loader=PIL.Image.open`) is Pillow's own, which differs for CMYK, 16 bits and transparency.

    Raises DecodeError for a damaged image, and UsageError for anything that is not an image of Pillow's.
    """

    preprocess: Preprocess
    normalise: Callable[[Tensor], Tensor]
    """uint8 [3, height, width] -> float32."""

    @cached_property
    def _prepare(self) -> Op:
        return eval_transform(self.preprocess)

    def __call__(self, image: Image.Image) -> Tensor:
        """See the class."""
        if not isinstance(image, Image.Image):
            kind = type(image).__name__
            raise UsageError(f"expected an image of Pillow's, not {kind}: open a file with PIL.Image.open(file)")
        pixels = self._prepare(pillow_pixels(image), np.random.default_rng(0))  # nothing is random in evaluation
        return self.normalise(torch.from_numpy(pixels).permute(2, 0, 1)).contiguous()
