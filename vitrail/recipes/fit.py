"""A recipe meets the data: what it says in absolute numbers is for the data set that it was published with."""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import Percent
from vitrail.recipes.choose import Facts
from vitrail.training.run import Run

LONGEST_WARMUP = 20.0
"""Percent of the run: the longest that is published (100 of 500 steps, big_vision and BiT)."""
USUAL_WARMUP = 10.0
"""Percent of the run: the paper's on ImageNet (10,000 of 93,800 steps)."""
LARGEST_BATCH = 512
"""Images per step where the run leaves that open (`vitrail.training.batch_size`)."""


def absolute(run: Run) -> bool:
    """Can the warmup be too long for a small data set?"""
    return not isinstance(run.schedule.warmup, Percent)


def fitted(run: Run, facts: Facts) -> tuple[Run, str]:
    """Return `run` with a warmup that fits a run on these images, and what was changed in words ("" if nothing).

    10,000 steps of warmup are a tenth of 300 epochs of ImageNet, and more than there are in 300 epochs of 10,000
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
    told = f"warmup: {USUAL_WARMUP:g} % of the run, as it has {total:,} steps here, not {run.schedule.warmup}"
    return replace(run, schedule=schedule), told
