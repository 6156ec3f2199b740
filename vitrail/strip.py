"""Images of any shape in one batch: each is a strip, its patches one below the other, after one that names its grid.

A strip is an array [(1 + tokens) * patch, patch, channels]. `tokens` is the most patches that an image may have. The
first patch is the head: in its first channel it holds the number of rows of the grid, then that of its columns, with
`BITS` bits each. The image's patches follow in raster order, and the rest is 0. So images of all shapes have arrays of
one shape, and everything that takes images takes strips. `vitrail.data.images.native` writes them, and
`vitrail.model.native` reads them.
"""

from __future__ import annotations

import math

from vitrail.errors import UsageError

BITS = 8
"""Bits for each of the two numbers. They survive a normalisation of the pixels, and bfloat16."""
SMALLEST_PATCH = 4
"""Pixels. A smaller patch has no room for the head."""
LONGEST_SHAPE = 8
"""Longer side over shorter side from which on a picture's proportions change. Tables of positions grow with it."""


def longest_side(tokens: int) -> int:
    """Return the most rows or columns of a grid of at most `tokens` patches."""
    return min(tokens, math.isqrt(LONGEST_SHAPE * tokens))


def strip_size(image_size: tuple[int, int], patch: int) -> tuple[int, int]:
    """Return height and width of a strip with as many patches as an image of `image_size` has.

    Raises UsageError for a patch that is too small, and for more patches than a head can name.
    """
    if patch < SMALLEST_PATCH:
        raise UsageError(
            f"images of any shape (preprocess.resize native) need patches of {SMALLEST_PATCH} pixels or more, and the "
            f"network's have {patch}"
        )
    tokens = (image_size[0] // patch) * (image_size[1] // patch)
    if longest_side(tokens) >= 2**BITS:
        most = (2**BITS - 1) ** 2 // LONGEST_SHAPE
        raise UsageError(
            f"images of any shape (preprocess.resize native) have at most {most:,} patches, and {image_size[0]} x "
            f"{image_size[1]} pixels are {tokens:,} patches of {patch} pixels. Choose a smaller image size"
        )
    return (1 + tokens) * patch, patch
