"""Find images that probably have a wrong label, and outliers, from the features of a frozen network.

Wrong labels: a linear probe is trained on all folds of the images but one and predicts the classes of that one, so that
no image is judged by a classifier that has seen its label. A weak probe often disagrees with a label that is right. So
the labels are explained by three causes: the probe's probabilities at some temperature; for a share of hard images, its
probabilities at a higher temperature; and a share of labels that are wrong at random. The mixture with the largest
likelihood says how probably each label is wrong, and an image is a suspect if that is at least one in three. The
estimate is for chance: a class that people confuse with another one looks like hard images. A probe that is often wrong
where it is sure cannot tell its own errors from wrong labels, and there are no suspects.

Outliers: images whose mean similarity to their nearest neighbours lies far below that of the others, by Tukey's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from vitrail.data.loading.order import stream
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.knn import neighbours
from vitrail.evaluation.softmax import solve

FOLDS = 5
STRENGTHS = (1.0, 0.1, 1e-2, 1e-3)
"""Of the L2 penalty; the one with the best probabilities out of fold is used."""
NEIGHBOURS = 10
FAR = 3.0
"""Number of interquartile ranges below the first quartile at which an image is an outlier (Tukey 1977)."""
LEAST = 1 / 3
"""Probability of being wrong from which a label is listed."""
SUREST = 5
"""Number of images for each one that counts as one of the surest."""
ABLE = 0.7
"""Share of the labels of the surest images that a probe must predict. With 5 % of the labels flipped, three networks
and eleven sets of images, 33 to 92 % of ten or more suspects were flipped above it, and 9 to 35 % below it."""
TEMPERATURES = tuple(2 ** (place / 4) for place in range(-4, 5))
HARDER = (2, 4)
"""Temperature of hard images, as a multiple of that of the others."""
START, ITERATIONS = (0.85, 0.1, 0.05), 200
"""Shares of the three causes at which expectation maximisation begins, and its number of steps."""
TURNS = 23
"""Purpose of a random stream (the others are in `vitrail.data` and `vitrail.evaluation.linear_probe`)."""


@dataclass(frozen=True)
class Suspects:
    """Images that probably have a wrong label, the most probable first."""

    rows: np.ndarray
    """int64 [S]."""
    suggested: np.ndarray
    """int64 [S]: class that the probe suggests."""
    wrong: np.ndarray
    """float64 [S]: estimated probability that the label is wrong."""


def folds_of(labels: np.ndarray, folds: int = FOLDS, seed: int = 0) -> np.ndarray:
    """Return the fold of each image, int64 [N]: the images of each class are dealt out in random order.

    Raises UsageError for fewer than two folds, and DataError unless two classes have two images or more, which a probe
    needs.
    """
    if folds < 2:
        raise UsageError(f"folds is {folds}; valid is 2 or more")
    found = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = stream(seed, 0, int(label), TURNS).permutation(np.flatnonzero(labels == label))
        found[rows] = (np.arange(len(rows)) + label) % folds
    if np.count_nonzero(np.bincount(labels) > 1) < 2:
        raise DataError("wrong labels are found by comparing classes, so two classes must have two images or more")
    return found


def out_of_fold(
    features: np.ndarray,
    labels: np.ndarray,
    classes: int,
    fold: np.ndarray,
    *,
    strengths: Sequence[float] = STRENGTHS,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Return the probability of each class, float32 [N, K], from a probe that has not seen the image.

    features float32 [N, D], labels int64 [N]; fold int64 [N]: see `folds_of`.
    """
    found = np.zeros((len(strengths), len(labels), classes), np.float32)
    for number in np.unique(fold).tolist():
        rows, out = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        for place, solution in enumerate(solve(features, labels, rows, strengths, classes=classes, device=device)):
            logits = solution.classifier.logits(torch.from_numpy(features[out]))
            found[place, out] = logits.softmax(dim=1).cpu().numpy()
    own = found[:, np.arange(len(labels)), labels].astype(np.float64)
    return found[np.log(own.clip(1e-12)).mean(axis=1).argmax()]


def surest(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of the labels that a probe with probabilities [N, K] predicts where it is surest."""
    order = np.argsort(-probabilities.max(axis=1), kind="stable")[: max(1, len(labels) // SUREST)]
    return float((probabilities[order].argmax(axis=1) == labels[order]).mean())


def suspects(probabilities: np.ndarray, labels: np.ndarray) -> Suspects:
    """Return the images whose label is probably wrong, by probabilities [N, K] of a probe that has not seen them.

    There are none if the probe predicts less than `ABLE` of the labels where it is surest.
    """
    able = surest(probabilities, labels) >= ABLE
    wrong = _wrong(probabilities, labels) if able else np.zeros(len(labels))
    others = np.where(np.arange(probabilities.shape[1]) == labels[:, None], -1, probabilities)
    rows = np.flatnonzero(wrong >= LEAST)
    rows = rows[np.lexsort((-others[rows].max(axis=1), -wrong[rows]))]
    return Suspects(rows, others.argmax(axis=1)[rows], wrong[rows])


def _wrong(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probability that each label is wrong, float64 [N].

    Of the mixtures of the three causes, that with the largest likelihood is used. Expectation maximisation finds its
    weights for each pair of temperatures.
    """
    logits = np.log(probabilities.clip(1e-12))
    logits -= logits.max(axis=1, keepdims=True)

    def own(temperature: float) -> np.ndarray:
        scaled = np.exp(logits / temperature)
        return scaled[np.arange(len(labels)), labels].astype(np.float64) / scaled.sum(axis=1)

    most, found = -np.inf, np.zeros(len(labels))
    for temperature, times in product(TEMPERATURES, HARDER):
        sure = own(temperature)
        causes = np.stack([sure, own(times * temperature), (1 - sure) / (probabilities.shape[1] - 1)]).clip(1e-12)
        weights = np.array(START)
        for _ in range(ITERATIONS):
            shares = weights[:, None] * causes
            together = shares.sum(axis=0)
            weights = (shares / together).mean(axis=1)
        likelihood = float(np.log(together).sum())
        if likelihood > most:
            most, found = likelihood, shares[2] / together
    return found


def outliers(features: np.ndarray, device: torch.device | str = "cpu") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of outliers among features [N, D], the farthest first, and of all images two arrays [N].

    These are the row of the nearest other image, and the mean cosine to the `NEIGHBOURS` nearest other images.
    """
    count = min(NEIGHBOURS + 1, len(features))
    blocks = [(near.cpu().numpy(), row.cpu().numpy()) for near, row in neighbours(features, features, count, device)]
    near, row = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    # an image is the nearest to itself, unless another one equals it
    nearest = np.where(row[:, 0] == np.arange(len(row)), row[:, min(1, count - 1)], row[:, 0])
    similarity = near[:, 1:].mean(axis=1) if count > 1 else near[:, 0]
    low, high = np.quantile(similarity, [0.25, 0.75])
    rows = np.flatnonzero(similarity < low - FAR * (high - low))
    return rows[np.argsort(similarity[rows], kind="stable")], nearest, similarity
