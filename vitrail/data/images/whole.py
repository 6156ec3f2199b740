"""How much of an image a network sees with each way of resizing it, and the choice between these ways."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from vitrail.data.images.geometry import ResizeSmall, Size, largest_inside
from vitrail.data.images.ops import covering
from vitrail.data.settings import ImageResize, Preprocess

MUCH = 1 / 3
"""Share of an image's pixels from which on a run warns that they are cut off."""
CUT_OFF = "an image's pixels are cut off"
"""A part of this warning."""


def choose_resize(sizes: Sequence[Size]) -> tuple[ImageResize, str]:
    """Return how images of these (height, width) are resized if nobody asks for a way, and the reason.

    sizes: Those of a sample of the training images, maybe none.
    """
    if len(set(sizes)) == 1:
        height, width = sizes[0]
        return "squash", f"images of {height} x {width} px"
    return "small", "images differ in size"


def choose_preprocess(image_size: Size, sizes: Sequence[Size]) -> tuple[Preprocess, str]:
    """Return how images of these sizes are prepared in evaluation (`choose_resize`), and the reason."""
    target, (mode, reason) = f"{image_size[0]} x {image_size[1]} px", choose_resize(sizes)
    preprocess = Preprocess(image_size, resize=mode)
    if mode == "small":
        side = min(covering(preprocess))
        return preprocess, f"{reason}: the short side becomes {side} px, the central {target} are used"
    if set(sizes) == {image_size}:
        return preprocess, f"{reason} keep their size"
    changed = any(stretched(size, preprocess) != 1 for size in sizes)
    return preprocess, f"{reason} are resized to {target}{' (squash: their proportions change)' * changed}"


def with_fill(preprocess: Preprocess, mean: tuple[float, ...]) -> Preprocess:
    """Return the preprocessing with the colour around padded images: the mean by which the network normalises."""
    if preprocess.resize != "pad" or preprocess.fill is not None or preprocess.bands is not None:
        return preprocess
    red, green, blue = (round(255 * value) for value in (mean * 3)[:3])
    return replace(preprocess, fill=(red, green, blue))


def share_shown(size: Size, preprocess: Preprocess) -> float:
    """Return the share of the pixels of an image of `size` (height, width) that the network sees."""
    if preprocess.resize == "squash-crop":
        return math.prod(preprocess.image_size) / math.prod(covering(preprocess))
    if preprocess.resize != "small":
        return 1.0
    resize = ResizeSmall(covering(preprocess))
    middle = resize.middle(*size)
    resized = resize.resized(*middle)
    share = 1.0
    for whole, part, pixels, kept in zip(size, middle, resized, preprocess.image_size, strict=True):
        share *= part / whole * kept / pixels
    return share


def filled(size: Size, preprocess: Preprocess) -> float:
    """Return the share of the network's input that shows an image of `size` (height, width) with pad."""
    height, width = largest_inside(*size, preprocess.image_size)
    return height * width / (preprocess.image_size[0] * preprocess.image_size[1])


def stretched(size: Size, preprocess: Preprocess) -> float:
    """Return the factor, at least 1, by which squash changes the proportions of an image of `size` (height, width)."""
    factor = size[0] / size[1] * preprocess.image_size[1] / preprocess.image_size[0]
    return max(factor, 1 / factor)


def parts_shown(sizes: Sequence[Size], preprocess: Preprocess) -> tuple[str, str]:
    """Return what each way of resizing shows of images of these sizes, in words, and a warning; "" for none.

    Both are "" if `preprocess` shows the whole image as it is, or if no size is known.
    """
    if not sizes:
        return "", ""
    small = statistics.median(share_shown(size, replace(preprocess, resize="small")) for size in sizes)
    factor = statistics.median(stretched(size, preprocess) for size in sizes)
    empty = 1 - statistics.median(filled(size, preprocess) for size in sizes)
    kept = {"small": small, "pad": 1 - empty, "native": 1.0}.get(
        preprocess.resize, share_shown(sizes[0], preprocess) / factor
    )
    if kept > 0.99:
        return "", ""
    told = (
        f"small shows {small:.0%} of an image's pixels, squash, pad and native show all; squash changes the "
        f"proportions by a factor of {factor:.2f}, pad leaves {empty:.0%} of the input empty, native neither (medians "
        f"of {len(sizes)} images)"
    )
    if preprocess.resize != "small" or 1 - small < MUCH:
        return told, ""
    return told, (
        f"{1 - small:.0%} of {CUT_OFF} (median of {len(sizes)} images). If what matters can be "
        "near the border, add --preprocess.resize pad, squash or native, or a larger --preprocess.crop"
    )
