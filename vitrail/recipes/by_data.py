"""What a look at the images decides: the recipe if none is named, and a warmup that fits the length of the run.

Each decision comes with its reason in words, so that it can be corrected.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vitrail.config import Percent
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.item import Listed

TINY = 16
"""Side in pixels up to which an image is a glyph."""
SMALL = 96
"""Side in pixels up to which images are not resized for training."""
LONGEST_WARMUP = 20.0
"""Longest published warmup, in percent of the run (100 of 500 steps, big_vision and BiT)."""
USUAL_WARMUP = 10.0
"""The paper's warmup on ImageNet, in percent of the run (10,000 of 93,800 steps)."""
LARGEST_BATCH = 512
"""Images per step if the run does not set the batch size (`vitrail.training.batch_size`)."""


@dataclass(frozen=True)
class Facts:
    """Facts about a training set that decide on a recipe."""

    images: int
    """In the training split."""
    side: int
    """Median of the shorter side, in pixels, of a sample."""


def facts_of(train: Listed) -> Facts:
    """Return the facts about these training images, from the sizes of a few of them."""
    from vitrail.training.resolve import image_sizes

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


def absolute(run: Run) -> bool:
    """Return whether the warmup is in steps, epochs or examples, which may be too long for a small data set."""
    return not isinstance(run.schedule.warmup, Percent)


def fitted(run: Run, facts: Facts) -> tuple[Run, str]:
    """Return `run` with a warmup that fits the number of images, and the change in words ("" without a change).

    10,000 steps of warmup are a tenth of 300 epochs of ImageNet, but more than all steps in 300 epochs of 10,000
    images. A warmup of more than a fifth of the run becomes a tenth of it.
    """
    if not absolute(run):
        return run, ""
    images = max(facts.images, 1)
    batch = min(run.batch_size or LARGEST_BATCH, images)
    units = {"per_epoch": max(images // batch, 1), "batch_size": batch}
    total = run.duration.steps(**units)
    warmup = run.schedule.warmup.steps(**units, total=total)
    if total < 1 or warmup <= LONGEST_WARMUP / 100 * total:
        return run, ""
    schedule = replace(run.schedule, warmup=Percent(USUAL_WARMUP))
    change = f"warmup: {USUAL_WARMUP:g} % of the run, as it has {total:,} steps here, not {run.schedule.warmup}"
    return replace(run, schedule=schedule), change
