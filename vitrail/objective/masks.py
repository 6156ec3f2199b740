"""Which patches are hidden: functions of (seed, step, example) and nothing else.

An example is an image of the source, by its index there. So its mask is the same in one process and in several,
in any place of a batch, however the batch is cut, and after a resume. Copies of an image in one batch (repeated
augmentation) share a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vitrail.data.loading.stream import stream
from vitrail.errors import UsageError
from vitrail.objective.settings import BEiT, MaskedPatch

CORRUPT, VISIBLE, BLOCKS = 24, 25, 26
"""Purposes of the streams drawn from here (the others are in `vitrail.data.loading.stream` and its users)."""
VALIDATION = -1
"""The step whose masks validation images get, at every evaluation the same."""

ATTEMPTS = 10
"""To place a block, before the rest is masked patch by patch."""


def check_share(name: str, value: float) -> None:
    """Raise UsageError unless `value` of the setting `name` can be a share of patches to hide."""
    if not 0 < value < 1:
        raise UsageError(f"objective.{name} is {value}; it is a share of the patches, above 0 and below 1")


def hidden_count(patches: int, share: float) -> int:
    """Return how many of `patches` are hidden: the share, rounded, but at least one patch on either side.

    Raises UsageError for an image of a single patch.
    """
    if patches < 2:
        raise UsageError("an image of one patch has nothing to predict it from: use a smaller patch or larger images")
    return min(max(round(share * patches), 1), patches - 1)


def corruption(seed: int, step: int, index: Sequence[int], patches: int, config: MaskedPatch) -> np.ndarray:
    """Return int64 [batch, 2, corrupted]: which patches are corrupted, in raster order, and what takes their place.

    The second row is a patch's own number where it is kept, another's where that is shown instead, and `patches`
    for the [mask] embedding. How many are corrupted is the same for every image; what happens to each of them is
    drawn on its own.
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

    A rectangle has an area uniform between the smallest block and what is left to mask, and the logarithm of its
    aspect uniform. One that would mask too much, or nothing new, is drawn again; when `ATTEMPTS` in a row fail,
    single patches make up the number, which is therefore the same for every image (in BEiT's code it may fall short).
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
