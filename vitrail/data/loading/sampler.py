"""How often each class is shown in an epoch: as often as it occurs, equally often, or in between.

An epoch has as many places as there are images. `uniform` shows every image once. The others give each class a number
of places that is proportional to its number of images to the power `POWER`: the square root of it (Mahajan et al. 2018,
"Exploring the limits of weakly supervised pretraining"), or the same for all classes (Kang et al. 2020, "Decoupling
representation and classifier", class-balanced sampling).
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from vitrail.errors import UsageError

Sampling = Literal["uniform", "balanced", "sqrt"]
POWER: dict[Sampling, float] = {"uniform": 1.0, "sqrt": 0.5, "balanced": 0.0}
"""Exponent of the number of images of a class in its share of an epoch."""


def class_shares(counts: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the share of an epoch that each class gets, float64 [classes]; 0 for a class without images."""
    weights = np.where(counts > 0, np.asarray(counts, dtype=np.float64) ** POWER[sampling], 0.0)
    return weights / max(weights.sum(), 1.0)


def places_per_class(labels: np.ndarray, classes: int, sampling: Sampling) -> np.ndarray:
    """Return the mean number of places that each class gets in an epoch, float64 [classes].

    labels: int64 [images], below 0 for an unknown class.
    """
    known = labels[labels >= 0]
    return class_shares(np.bincount(known, minlength=classes), sampling) * len(known)


class ClassSampler:
    """Draws the images of an epoch by their classes. Images without a known class are not drawn.

    Within a class the numbers of times that images are shown differ by at most one. An epoch is a function of the
    random generator alone. labels: int64 [images]. Raises UsageError if no image has a label.
    """

    def __init__(self, labels: np.ndarray, sampling: Sampling) -> None:
        self._labels = labels
        self._known = np.flatnonzero(labels >= 0)
        if not len(self._known):
            raise UsageError(
                f"data.sampler {sampling} counts the images of each class, and these images have no labels"
            )
        self._counts = np.bincount(labels[self._known])
        self._shares = class_shares(self._counts, sampling)

    @cached_property
    def most(self) -> int:
        """Largest number of times that an image can be shown in an epoch."""
        places = np.ceil(self._shares * len(self._labels)) + 1
        return int(np.ceil(places / np.maximum(self._counts, 1)).max())

    def draw(self, random: np.random.Generator) -> np.ndarray:
        """Return the images of an epoch in order, int64 [images]: index + images * (how often it came before)."""
        images = len(self._labels)
        quota = self._quota(images, random)
        mixed = self._known[random.permutation(len(self._known))]
        mixed = mixed[np.argsort(self._labels[mixed], kind="stable")]  # by class, in random order within a class
        first = np.cumsum(self._counts) - self._counts
        of_class = np.repeat(np.arange(len(quota)), quota)
        number = np.arange(images) - np.repeat(np.cumsum(quota) - quota, quota)
        before, place = np.divmod(number, self._counts[of_class])
        shown = mixed[first[of_class] + place] + images * before
        return random.permutation(shown)  # type: ignore[no-any-return]

    def _quota(self, images: int, random: np.random.Generator) -> np.ndarray:
        """Return the number of places of each class: its share, rounded up or down at random, `images` in all."""
        ends = np.floor(np.cumsum(self._shares) * images + random.random()).astype(np.int64)
        ends[np.flatnonzero(self._counts)[-1] :] = images  # whatever the rounding of the sum
        return np.diff(ends, prepend=0)
