"""Imbalanced classes: noticing them, and the flags that make training fair to rare classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.words import shown

IMBALANCED = 10
"""Images of the largest class per image of the smallest one from which a data set counts as imbalanced."""
FLAGS = "--objective.logit-adjustment 1 --metric.name balanced_accuracy"
"""Flags of `vitrail train` for rare classes. Logit adjustment needs no further setting, and is consistent for the
balanced error (Menon et al. 2021, theorem 1). `benchmarks/long_tail.py` compares it with the others."""
OTHER_LOSSES = "--data.sampler sqrt --metric.name balanced_accuracy"
"""The flags for a loss other than softmax, for which logit adjustment is not defined."""


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
