"""Which patches are hidden: functions of (seed, step, example) and nothing else.

An example is an image of the source, by its index there. So its mask is the same in one process and in several,
in any place of a batch, however the batch is cut, and after a resume. Copies of an image in one batch (repeated
augmentation) share a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vitrail.data.stream import stream
from vitrail.errors import UsageError
from vitrail.objective.config import MaskedPatch

CORRUPT = 24
"""Purpose of the streams drawn from here (the others are in `vitrail.data.stream` and its users)."""
VALIDATION = -1
"""The step whose masks validation images get, at every evaluation the same."""


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


def _each(
    draw: Callable[[np.random.Generator], np.ndarray], seed: int, step: int, index: Sequence[int], purpose: int
) -> np.ndarray:
    return np.stack([draw(stream(seed, step, int(example), purpose)) for example in index])
