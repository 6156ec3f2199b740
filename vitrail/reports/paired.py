"""Two networks on the same images: is one better, or is it chance?

Both answered the same images, so only those count that one gets right and the other wrong (McNemar, 1947: the test
Dietterich recommends in "Approximate Statistical Tests for Comparing Supervised Classification Learning
Algorithms", 1998, where each network is trained once). The p-value is exact: if both were equally good, each of these
images would be a fair coin. The interval of the difference is Bonett and Price's (2012), which adds one image to
each side and holds for few images too.

Like every number of one run each, they are about the choice of images, not about what another seed would have given.
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
    """The answers of two networks to the images that both have answered and whose class is known."""

    first_rows: np.ndarray
    """int64 [n]: of each shared image, the row in the first classification."""
    second_rows: np.ndarray
    """int64 [n]: and in the second."""
    first_right: np.ndarray
    """bool [n]."""
    second_right: np.ndarray
    """bool [n]."""

    @property
    def count(self) -> int:
        """Images that both have answered."""
        return len(self.first_right)

    @property
    def only_first(self) -> int:
        """Images that the first gets right and the second wrong."""
        return int((self.first_right & ~self.second_right).sum())

    @property
    def only_second(self) -> int:
        """Images that the second gets right and the first wrong."""
        return int((self.second_right & ~self.first_right).sum())

    @property
    def both(self) -> int:
        """Images that both get right."""
        return int((self.first_right & self.second_right).sum())

    @property
    def difference(self) -> float:
        """Accuracy of the second minus that of the first."""
        return (self.only_second - self.only_first) / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of `difference`."""
        return paired_interval(self.only_first, self.only_second, self.count)

    @property
    def p(self) -> float:
        """McNemar's exact two-sided p-value."""
        return mcnemar(self.only_first, self.only_second)


def pair(first: Classification, second: Classification) -> Pair:
    """Match two classifications of one source by the images' numbers in it.

    Raises DataError where that shows that it was not one source: other classes, other labels, nothing in common.
    """
    if first.class_names != second.class_names:
        raise DataError("they tell different classes apart")
    a, b = np.flatnonzero(first.known), np.flatnonzero(second.known)
    shared, in_a, in_b = np.intersect1d(first.index[a], second.index[b], assume_unique=True, return_indices=True)
    if not len(shared):
        raise DataError("they answered no image in common")
    a, b = a[in_a], b[in_b]
    if (first.label[a] != second.label[b]).any():
        raise DataError("the same image has different classes: they were evaluated on different images")
    return Pair(a, b, first.correct[a], second.correct[b])


def mcnemar(only_first: int, only_second: int) -> float:
    """Return McNemar's exact two-sided p-value: that of `only_first` heads in so many throws of a fair coin."""
    throws, fewer = only_first + only_second, min(only_first, only_second)
    ways = term = 1
    for heads in range(fewer):
        term = term * (throws - heads) // (heads + 1)
        ways += term
    return min(1.0, 2 * ways / 2**throws)  # of whole numbers, however large: rounded once


def paired_interval(only_first: int, only_second: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of the second's accuracy minus the first's (Bonett and Price, 2012)."""
    gain, loss = (only_second + 1) / (count + 2), (only_first + 1) / (count + 2)
    half = z * math.sqrt((gain + loss - (gain - loss) ** 2) / (count + 2))
    return max(gain - loss - half, -1.0), min(gain - loss + half, 1.0)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for being several (Holm, 1979), in the order given."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[place]))
        corrected[place] = largest
    return corrected
