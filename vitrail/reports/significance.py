"""How certain an accuracy is, and whether one network is better than another on the same images.

McNemar's test (1947) compares two networks on the same images. Only images count that one network gets right and the
other wrong. Dietterich recommends it where each network is trained once ("Approximate Statistical Tests for Comparing
Supervised Classification Learning Algorithms", 1998). The p-value is exact: if both networks were equally good, each
of these images would be the throw of a fair coin. The interval of the difference is that of Bonett and Price (2012),
which adds one image to each side and is valid for few images, too.

These numbers measure the uncertainty from the choice of images. They do not measure what another seed would change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.errors import DataError
from vitrail.evaluation.classify import Classification


@dataclass(frozen=True)
class Pair:
    """The predictions of two networks for the labelled images that both were evaluated on."""

    first_rows: np.ndarray
    """int64 [n]: row of each shared image in the first classification."""
    second_rows: np.ndarray
    """int64 [n]: row of each shared image in the second classification."""
    first_right: np.ndarray
    """bool [n]: whether the first network is right."""
    second_right: np.ndarray
    """bool [n]: whether the second network is right."""

    @property
    def count(self) -> int:
        """Number of shared images."""
        return len(self.first_right)

    @property
    def only_first(self) -> int:
        """Number of images that the first network gets right and the second wrong."""
        return int((self.first_right & ~self.second_right).sum())

    @property
    def only_second(self) -> int:
        """Number of images that the second network gets right and the first wrong."""
        return int((self.second_right & ~self.first_right).sum())

    @property
    def difference(self) -> float:
        """Accuracy of the second network minus that of the first."""
        return (self.only_second - self.only_first) / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of `difference`."""
        return paired_interval(self.only_first, self.only_second, self.count)

    @property
    def p(self) -> float:
        """McNemar's exact two-sided p-value."""
        return mcnemar(self.only_first, self.only_second)


def pair_predictions(first: Classification, second: Classification) -> Pair:
    """Match two classifications of the same images by the images' numbers.

    Raises DataError if they are evidently not of the same images: other classes, other labels, or no common image.
    """
    if first.class_names != second.class_names:
        raise DataError("the two networks have different classes")
    a, b = np.flatnonzero(first.known), np.flatnonzero(second.known)
    shared, in_a, in_b = np.intersect1d(first.index[a], second.index[b], assume_unique=True, return_indices=True)
    if not len(shared):
        raise DataError("the two networks were evaluated on no image in common")
    a, b = a[in_a], b[in_b]
    if (first.label[a] != second.label[b]).any():
        raise DataError("the same image has different classes, so the networks were evaluated on different images")
    return Pair(a, b, first.correct[a], second.correct[b])


def mcnemar(only_first: int, only_second: int) -> float:
    """Return McNemar's exact two-sided p-value.

    It is the p-value of `only_first` heads in `only_first + only_second` throws of a fair coin.
    """
    throws, fewer = only_first + only_second, min(only_first, only_second)
    ways = term = 1
    for heads in range(fewer):
        term = term * (throws - heads) // (heads + 1)
        ways += term
    return min(1.0, 2 * ways / 2**throws)  # integers of any size, so it is rounded only once


def paired_interval(only_first: int, only_second: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of the second's accuracy minus the first's (Bonett and Price, 2012)."""
    gain, loss = (only_second + 1) / (count + 2), (only_first + 1) / (count + 2)
    half = z * math.sqrt((gain + loss - (gain - loss) ** 2) / (count + 2))
    return max(gain - loss - half, -1.0), min(gain - loss + half, 1.0)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for several comparisons (Holm, 1979), in the given order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[place]))
        corrected[place] = largest
    return corrected
