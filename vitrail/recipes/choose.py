"""Which recipe suits these images, where none was named; and why, for a guess without a reason cannot be
corrected.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from vitrail.data.settings import Data

TINY = 16
"""Pixels up to which an image is a glyph."""
SMALL = 96
"""Pixels up to which images are trained on as they are."""


@dataclass(frozen=True)
class Facts:
    """What a look at a data set shows."""

    images: int
    """In the training split."""
    side: int
    """Median of the shorter side, in pixels, of a sample."""


def look(data: Data, seed: int = 0, *, labels: bool = True) -> Facts:
    """Open the data and look at the sizes of a few images. Raises DataError where there are none."""
    from vitrail.data.sources.open import open_data
    from vitrail.training.resolve import image_sizes

    train = open_data(data, seed=seed, labels=labels).train
    sizes = image_sizes(train)
    return Facts(len(train), round(statistics.median(map(min, sizes))) if sizes else 0)


def choose(facts: Facts) -> tuple[str, str]:
    """Return the name of the recipe for training from scratch on such data, and the reason in a sentence."""
    seen = f"{facts.images:,} training images of about {facts.side} pixels"
    if facts.side <= TINY:
        return "digits", f"{seen}: a token for every 2x2 of them"
    if facts.side <= SMALL:
        return "scratch-small", f"{seen}: trained on as they are"
    better = "`vitrail finetune DIR --from RUN` does better where there are weights to start from"
    return "scratch-photos", f"{seen}: shrunk to 96; {better}"
