"""The probability from which a label is predicted, chosen for each class on validation images.

A threshold of 0.5 is seldom the best for F1: labels are rare, so probabilities are low ("Optimal Thresholding of
Classifiers to Maximize F1 Measure", Lipton, Elkan and Naryanaswamy 2014).
"""

from __future__ import annotations

import numpy as np

UNCHOSEN = 0.5
"""Threshold of a class before any validation."""
FEWEST = 5
"""Number of images with a label from which its threshold is chosen by its own F1. Labels with fewer share one."""


def best_thresholds(target: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Return the threshold of each class with the best F1 on these images, float64 [classes].

    target: bool [N, classes]; probability: [N, classes]. Labels that fewer than `FEWEST` images have share the
    threshold with the best F1 of all labels together, because one of their own would fit only these few images.
    Thresholds are 0.5 if a probability is not finite.
    """
    if not np.isfinite(probability).all() or not target.any():
        return np.full(target.shape[1], UNCHOSEN)
    shared = best_threshold(target.reshape(-1), probability.reshape(-1))
    counts = target.sum(axis=0)
    return np.array(
        [
            best_threshold(target[:, label], probability[:, label]) if counts[label] >= FEWEST else shared
            for label in range(target.shape[1])
        ]
    )


def best_threshold(target: np.ndarray, probability: np.ndarray) -> float:
    """Return the threshold with the best F1 for one class: halfway between two probabilities.

    target: bool [N], with at least one image of the class; probability: [N]. Of equal F1, the highest threshold.
    """
    order = np.argsort(-probability, kind="stable")
    scores, hits = probability[order].astype(np.float64), np.cumsum(target[order])
    f1 = 2 * hits / (np.arange(1, len(hits) + 1) + hits[-1])
    next_score = np.append(scores[1:], 0.0)
    f1[scores == next_score] = -1.0  # images with equal probabilities are predicted together
    cut = int(f1.argmax())
    return float((scores[cut] + next_score[cut]) / 2)
