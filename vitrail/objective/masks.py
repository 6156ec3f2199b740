"""Draw the patches to hide, as a function of (seed, step, example) only.

An example is the index of an image in its source. So its mask does not depend on the number of processes, its place in
the batch, how the batch is cut, or a resume. Copies of an image in one batch (repeated augmentation) share a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vitrail.data.loading.order import stream
from vitrail.errors import UsageError
from vitrail.objective.settings import BEiT, MaskedPatch

CORRUPT, VISIBLE, BLOCKS = 24, 25, 26
"""Purposes of the random streams used here (the others are in `vitrail.data.loading.order` and its users)."""
VALIDATION = -1
"""The step number for validation images, so that every evaluation has the same masks."""

ATTEMPTS = 10
"""Failed attempts to place a block before the rest is masked patch by patch."""


def hidden_count(patches: int, share: float) -> int:
    """Return the number of `patches` to hide: the share, rounded, but at least one hidden and one visible patch.

    Raises UsageError for an image of a single patch.
    """
    if patches < 2:
        raise UsageError(
            "an image of one patch leaves no visible patch to predict from: use a smaller patch or larger images"
        )
    return min(max(round(share * patches), 1), patches - 1)


def corruption(seed: int, step: int, index: Sequence[int], patches: int, config: MaskedPatch) -> np.ndarray:
    """Return int64 [batch, 2, corrupted]: the corrupted patches in raster order, and what replaces each.

    The second row is the patch's own number (unchanged), another patch's number, or `patches` for the [mask] embedding.
    The number of corrupted patches is the same for every image. The replacement of each is drawn independently.
    """
    count = hidden_count(patches, config.corrupt)

    def draw(rng: np.random.Generator) -> np.ndarray:
        places = np.sort(rng.permutation(patches)[:count])
        action = rng.random(count)
        others = (places + rng.integers(1, patches, count)) % patches
        shown = np.where(action < config.mask + config.other, others, places)
        return np.stack([places, np.where(action < config.mask, patches, shown)])

    return _each(draw, seed, step, index, CORRUPT)


def visible(seed: int, step: int, index: Sequence[int], patches: int, ratio: float) -> np.ndarray:
    """Return int64 [batch, visible]: the patches that are not masked, in raster order, drawn uniformly (MAE)."""
    kept = patches - hidden_count(patches, ratio)
    return _each(lambda rng: np.sort(rng.permutation(patches)[:kept]), seed, step, index, VISIBLE)


def blocks(seed: int, step: int, index: Sequence[int], grid: tuple[int, int], config: BEiT) -> np.ndarray:
    """Return bool [batch, rows * columns]: True where masked, in rectangles (BEiT, algorithm 1).

    The area of a rectangle is uniform between the smallest block and the number of patches left to mask, and the
    logarithm of its aspect ratio is uniform. A rectangle that would mask too many or no new patches is drawn again.
    After `ATTEMPTS` failures single patches are masked, so the number is the same for every image (in BEiT's code it
    may be smaller).
    """
    count = hidden_count(grid[0] * grid[1], config.ratio)
    return _each(lambda rng: _blocks(rng, grid, count, config), seed, step, index, BLOCKS)


def _blocks(rng: np.random.Generator, grid: tuple[int, int], count: int, config: BEiT) -> np.ndarray:
    mask = np.zeros(grid, dtype=bool)
    failed = 0
    while (left := count - int(mask.sum())) and failed < ATTEMPTS:
        area = rng.uniform(min(config.smallest_block, left), left)
        aspect = math.exp(rng.uniform(math.log(config.aspect), -math.log(config.aspect)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        failed += 1
        if not (0 < height <= grid[0] and 0 < width <= grid[1]):
            continue
        top, start = rng.integers(grid[0] - height + 1), rng.integers(grid[1] - width + 1)
        block = mask[top : top + height, start : start + width]
        if 0 < int((~block).sum()) <= left:
            block[:] = True
            failed = 0
    flat = mask.ravel()
    missing = count - int(flat.sum())
    flat[rng.permutation(np.flatnonzero(~flat))[:missing]] = True
    return flat


def _each(
    draw: Callable[[np.random.Generator], np.ndarray], seed: int, step: int, index: Sequence[int], purpose: int
) -> np.ndarray:
    return np.stack([draw(stream(seed, step, int(example), purpose)) for example in index])
