"""Linear probe: softmax regression on frozen features, with several strengths of L2 regularisation.

Each strength is solved to its optimum (`vitrail.evaluation.softmax`). The strength is chosen on held-out training
images, and then solved again on all training images (as the paper does with learning rates, appendix B.1.1); the test
images are not used for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from vitrail.data.loading.order import stream
from vitrail.device import fast_float32
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import Features, labelled_pair
from vitrail.evaluation.softmax import ITERATIONS, Classifier, Solution, row_blocks, solve

STRENGTHS = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)
"""For standardised features. Each one is ten times the next."""
HOLDOUT = 0.1
HELD_OUT = 17
"""Purpose of a random stream (the others are in `vitrail.data`)."""


@dataclass(frozen=True)
class Setting:
    """One strength of the regularisation, and the metrics of its optimum on the held-out images."""

    l2: float
    top1: float
    nll: float
    """Mean cross-entropy in nats."""
    converged: bool
    """Whether the solver reached the optimum within its maximum number of iterations."""


@dataclass(frozen=True)
class LinearProbe:
    """The result of a linear probe."""

    settings: list[Setting]
    """From the largest strength to the smallest."""
    chosen: Setting
    grid_end: Literal["largest", "smallest"] | None
    """Which of several strengths is chosen, if it is the largest or the smallest: another one may be better."""
    converged: bool
    """Whether the solver reached the optimum of the chosen strength on all training images."""
    top1: float
    """On the test images, trained with the chosen strength on all training images."""
    top5: float
    """With fewer than five classes, it is 1."""
    nll: float
    train_images: int
    held_out_images: int
    test_images: int


def linear_probe(
    train: Features,
    test: Features,
    *,
    l2: Sequence[float] = STRENGTHS,
    seed: int = 0,
    iterations: int = ITERATIONS,
    device: torch.device | str = "cpu",
) -> LinearProbe:
    """Fit a linear classifier to `train` for each strength in `l2`, and measure the best on `test`.

    The best has the highest top-1, then the lowest loss, on a held-out tenth of each class, which is a function of
    `seed`. Images without a known class are ignored. Raises UsageError for invalid settings, DataError for features
    that are not finite or do not match.
    """
    if not l2 or min(l2) <= 0 or iterations < 1:
        raise UsageError(
            f"Invalid: l2 {list(l2)}, {iterations} iterations. Valid: at least one strength, each above 0, and at "
            "least 1 iteration."
        )
    features, labels, asked, truth = labelled_pair(train, test)
    settings, chosen, final, held = fit_probe(
        features, labels, len(train.class_names), l2=l2, seed=seed, iterations=iterations, device=device
    )
    top1, top5, nll = score_classifier(final.classifier, asked, truth, np.arange(len(truth)))
    sizes = (len(labels), held, len(truth))
    return LinearProbe(settings, chosen, _grid_end(settings, chosen), final.converged, top1, top5, nll, *sizes)


def fit_probe(
    features: np.ndarray,
    labels: np.ndarray,
    classes: int,
    *,
    l2: Sequence[float] = STRENGTHS,
    seed: int = 0,
    iterations: int = ITERATIONS,
    device: torch.device | str = "cpu",
) -> tuple[list[Setting], Setting, Solution, int]:
    """Return each strength with its metrics, the best one, its solution on all images, and the number held out.

    features: float32 [N, D]; labels: int64 [N]. The best has the highest top-1, then the lowest loss, on a held-out
    tenth of each class. Raises DataError if no image can be held out.
    """
    fit = partial(solve, features, labels, classes=classes, iterations=iterations, device=torch.device(device))
    others, held = held_out(labels, seed)
    settings: list[Setting] = []
    for one in fit(others, sorted(set(l2))):
        top1, _, nll = score_classifier(one.classifier, features, labels, held)
        settings.append(Setting(one.l2, top1, nll, one.converged))
        if settings[-1] is (chosen := max(settings, key=lambda setting: (setting.top1, -setting.nll))):
            start = one.classifier
    (final,) = fit(np.arange(len(labels)), [chosen.l2], start=start)
    return settings, chosen, final, len(held)


def _grid_end(settings: list[Setting], chosen: Setting) -> Literal["largest", "smallest"] | None:
    if len(settings) == 1 or chosen not in (settings[0], settings[-1]):
        return None
    return "largest" if chosen is settings[0] else "smallest"


def held_out(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows to train on, held-out rows), both ascending; held out is a random tenth of each class.

    Of a class with two or more images at least one is held out and at least one is not. Raises DataError if no image
    can be held out.
    """
    out = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = min(max(round(HOLDOUT * len(rows)), 1), len(rows) - 1)
        out.append(stream(seed, 0, int(label), HELD_OUT).permutation(rows)[:count])
    held = np.sort(np.concatenate(out))
    if not len(held):
        raise DataError("no class has two training images, so none can be held out to choose the regularisation by")
    return np.setdiff1d(np.arange(len(labels)), held, assume_unique=True), held


@torch.no_grad()
@fast_float32()
def score_classifier(
    classifier: Classifier, features: np.ndarray, labels: np.ndarray, rows: np.ndarray
) -> tuple[float, float, float]:
    """Return top-1, top-5 and mean cross-entropy of a classifier on the images `rows`."""
    x, y = torch.from_numpy(features), torch.from_numpy(labels)
    classes, width = classifier.weight.shape
    sums = np.zeros(3)
    for part in row_blocks(torch.from_numpy(rows), max(classes, width)):
        logits = classifier.logits(x[part])
        label = y[part].to(logits.device)[:, None]
        right = logits.topk(min(5, classes), dim=1).indices == label
        loss = -logits.log_softmax(dim=1).gather(1, label)
        sums += [right[:, 0].sum().item(), right.sum().item(), loss.sum().item()]
    top1, top5, nll = (sums / len(rows)).tolist()
    return top1, top5, nll
