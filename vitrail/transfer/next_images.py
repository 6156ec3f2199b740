"""Choose which unlabelled images to label next: those that a network is least sure about, and that differ.

Uncertainty alone chooses many images of one kind, and coverage alone many that the network knows. Here the least sure
images are candidates, and among them those are taken one after the other that are farthest from all that have a label
or are chosen already (farthest-first, or k-centre: Sener and Savarese 2018). Citovsky et al. 2021 also take candidates
by the margin and then spread them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

By = Literal["both", "uncertainty", "coverage"]
CANDIDATES = 4
"""Number of candidates for each image to choose, by uncertainty."""
COVERED = 50_000
"""Maximum number of candidates if only coverage counts, which limits the memory of their features."""


def uncertainty(probabilities: np.ndarray, thresholds: Sequence[float] = ()) -> np.ndarray:
    """Return how unsure a network is about each image, float64 [N], 1 for the least sure.

    probabilities: [N, classes]. With one label this is 1 minus the gap between the two most probable classes (margin).
    thresholds: Those of a network for several labels; then it is 1 minus the distance of the label that is nearest to
    its threshold.
    """
    values = probabilities.astype(np.float64)
    if len(thresholds):
        found: np.ndarray = 1 - np.abs(values - np.array(thresholds)).min(axis=1)
        return found
    if values.shape[1] < 2:
        return np.zeros(len(values))
    best = np.partition(values, -2, axis=1)[:, -2:]
    return 1 - (best[:, 1] - best[:, 0])


def least_sure(unsure: np.ndarray, count: int, by: By, width: int = CANDIDATES) -> np.ndarray:
    """Return the rows to choose among, int64, the least sure first; equal rows in their order.

    by: "uncertainty" gives the `count` least sure, "both" `width` times as many. "coverage" gives all images, or
    `COVERED` of them, evenly spaced.
    """
    order = np.argsort(-unsure, kind="stable")
    if by == "coverage":
        rows = np.linspace(0, len(order) - 1, min(len(order), max(COVERED, count))).round().astype(np.int64)
        return order[np.isin(order, rows)]
    return order[: count if by == "uncertainty" else width * count]


class Coverage:
    """Similarity of candidates to what is covered: images with a label, and candidates that are chosen.

    features: float32 [candidates, width].
    """

    def __init__(self, features: np.ndarray) -> None:
        self._unit = _unit(features)
        self.similarity = np.full(len(features), -np.inf, dtype=np.float32)
        """float32 [candidates]: cosine similarity to the nearest covered image; -inf while there is none."""

    def cover(self, features: np.ndarray) -> None:
        """Add covered images, float32 [images, width]."""
        np.maximum(self.similarity, (self._unit @ _unit(features).T).max(axis=1), out=self.similarity)

    def farthest(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` candidates in the order they are chosen, and the similarity of each to what was covered then.

        Of equally far candidates the first one is chosen.
        """
        chosen, similarity = [], []
        left = np.ones(len(self._unit), dtype=bool)
        for _ in range(min(count, len(self._unit))):
            row = int(np.where(left, self.similarity, np.inf).argmin())
            chosen.append(row)
            similarity.append(self.similarity[row])
            left[row] = False
            np.maximum(self.similarity, self._unit @ self._unit[row], out=self.similarity)
        return np.array(chosen, dtype=np.int64), np.array(similarity)


def _unit(features: np.ndarray) -> np.ndarray:
    from vitrail.evaluation.features import unit_rows  # imports torch, which a verb's flags must not wait for

    return unit_rows(features)


def choose_images(
    unsure: np.ndarray,
    count: int,
    by: By,
    features: Callable[[np.ndarray], np.ndarray],
    cover: Callable[[Coverage], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the images to label next, int64, and their similarity to the nearest covered image.

    unsure: See `uncertainty`. features: Function of rows that returns their features, called once. cover: Function that
    adds the images with a label. With "uncertainty" both are not called, and similarities are NaN.
    """
    rows = least_sure(unsure, count, by)
    if by == "uncertainty":
        return rows, np.full(len(rows), np.nan)
    coverage = Coverage(features(rows))
    cover(coverage)
    chosen, similarity = coverage.farthest(count)
    return rows[chosen], similarity
