"""Rejection: images whose best class has a low probability get no class, which costs coverage and saves mistakes.

Coverage is the share of images that still get a class, and risk the share of wrong ones among these ("Selective
Classification for Deep Neural Networks", Geifman and El-Yaniv 2017).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.evaluation.classify import Classification

NONE = "none of these"
"""What an image that is rejected is called in place of a class."""
SHOWN = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Thresholds in tables."""


def counts_at(found: Classification, thresholds: Sequence[float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many images have at least the confidence of each threshold, and how many of these are wrong."""
    sure, wrong = found.probability[found.known, 0], ~found.correct[found.known]
    enough = [sure >= threshold for threshold in np.array(thresholds, sure.dtype)]
    return tuple(int(one.sum()) for one in enough), tuple(int((one & wrong).sum()) for one in enough)


def curve(found: Classification) -> tuple[np.ndarray, np.ndarray]:
    """Return coverage and risk after each image, the surest first: float64 [n], one value for equal confidences."""
    sure, wrong = found.probability[found.known, 0], ~found.correct[found.known]
    order = np.argsort(-sure, kind="stable")
    named = np.arange(1, len(order) + 1)
    last = np.append(np.diff(sure[order]) != 0, True)
    return (named / len(order))[last], (np.cumsum(wrong[order]) / named)[last]
