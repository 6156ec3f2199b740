"""Settings that depend on the training images: the recipe if none is named, and a warmup that fits the run's length.

Each decision comes with its reason in words, so that the user can correct it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vitrail.durations import Percent
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.item import Listed

TINY = 16
"""Largest side in pixels of an image that is treated as a glyph."""
SMALL = 96
"""Largest side in pixels of images that are not resized for training."""
LONGEST_WARMUP = 20.0
"""Longest published warmup, in percent of the run (100 of 500 steps, big_vision and BiT)."""
USUAL_WARMUP = 10.0
"""The paper's warmup on ImageNet, in percent of the run (10,000 of 93,800 steps)."""
LARGEST_BATCH = 512
"""Images per step if the run does not set the batch size (`vitrail.training.batch_size`)."""


@dataclass(frozen=True)
class Facts:
    """The properties of a training set on which recipes depend."""

    images: int
    """Number of training images."""
    side: int
    """Median of the shorter side in pixels, over a sample of the images."""


def facts_of(train: Listed) -> Facts:
    """Return the properties of these training images. The side is measured on a few of them."""
    from vitrail.training.resolve import image_sizes

    sizes = image_sizes(train)
    return Facts(len(train), round(statistics.median(map(min, sizes))) if sizes else 0)


def choose(facts: Facts) -> tuple[str, str]:
    """Return the name of the recipe for training from scratch on such data, and the reason in words."""
    seen = f"{facts.images:,} training images of about {facts.side} pixels"
    if facts.side <= TINY:
        return "digits", f"{seen}: one token for every 2 x 2 pixels"
    if facts.side <= SMALL:
        return "scratch-small", seen
    better = "`vitrail finetune DIR --from RUN` is better if pretrained weights are available"
    return "scratch-photos", f"{seen}; {better}"


def has_absolute_warmup(run: Run) -> bool:
    """Return whether the warmup is in steps, epochs or examples. Such a warmup may be too long for a small data set."""
    return not isinstance(run.schedule.warmup, Percent)


def fitted(run: Run, facts: Facts) -> tuple[Run, str]:
    """Return `run` with a warmup that fits the number of images, and the change in words ("" if nothing changed).

    A warmup longer than a fifth of the run becomes a tenth of it. Published warmups suit large data: 10,000 steps are a
    tenth of 300 epochs on ImageNet, but more than all steps of 300 epochs on 10,000 images.
    """
    if not has_absolute_warmup(run):
        return run, ""
    images = max(facts.images, 1)
    batch = min(run.batch_size or LARGEST_BATCH, images)
    units = {"per_epoch": max(images // batch, 1), "batch_size": batch}
    total = run.duration.steps(**units)
    warmup = run.schedule.warmup.steps(**units, total=total)
    if total < 1 or warmup <= LONGEST_WARMUP / 100 * total:
        return run, ""
    schedule = replace(run.schedule, warmup=Percent(USUAL_WARMUP))
    change = f"warmup: {USUAL_WARMUP:g} % of the run, not {run.schedule.warmup}, because it has {total:,} steps here"
    return replace(run, schedule=schedule), change
