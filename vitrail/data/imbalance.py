"""Imbalanced classes: noticing them, and the flags that make training fair to rare classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.words import shown

IMBALANCED = 10
"""Images of the largest class per image of the smallest one from which a data set counts as imbalanced."""
FAIR = "--metric.name balanced_accuracy"
"""The flag of `vitrail train` that chooses the model for which every class counts the same. It changes no training."""
EVERY_CLASS = ("balanced_accuracy", "macro_f1")
"""Metrics for which every class counts the same."""
ADJUSTED = f"--objective.logit-adjustment 1 {FAIR}"
"""Flags for rare classes. Logit adjustment needs no further setting, and is consistent for the balanced error (Menon et
al. 2021, theorem 1). `benchmarks/long_tail.py` compares it with the others."""
ENOUGH_IMAGES, ENOUGH_STEPS = 10_000, 800
"""Training images and steps from which logit adjustment was measured to help: 10,847 images, 840 steps of 256 images. A
network that has learned little takes everything for the rare classes: magnetic tiles, 1,210 images in three minutes,
fell from 70.9 to 6.0 %."""


def flags(images: int, steps: float, loss: str = "softmax") -> str:
    """Return the flags of `vitrail train` that help rare classes in a run with these training images and steps.

    Logit adjustment is defined for softmax alone.
    """
    return ADJUSTED if loss == "softmax" and images >= ENOUGH_IMAGES and steps >= ENOUGH_STEPS else FAIR


def imbalance(counts: Sequence[int] | np.ndarray) -> float:
    """Return the number of images of the largest class per image of the smallest one; classes without images aside."""
    there = [int(count) for count in counts if count]
    return max(there) / min(there) if there else 1.0


def described(names: Sequence[str], counts: Sequence[int] | np.ndarray) -> str:
    """Return how imbalanced the classes are, as a clause: "the largest class ('a', 200 images) has ..."."""
    there = sorted((int(count), number) for number, count in enumerate(counts) if count)
    (fewest, least), (most, largest) = there[0], there[-1]
    return (
        f"the largest class ({shown(names[largest])}, {most:,} images) has {most / fewest:.0f} times the images of the "
        f"smallest ({shown(names[least])}, {fewest:,})"
    )
