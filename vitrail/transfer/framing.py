"""Which part of a photograph a pretrained network should see, tried on training images before a fine-tuning.

No one way of bringing photographs to a square is the best for all. Of clothes the central square is best, because a
squashed shirt is no shirt that the network knows; of magnetic tiles it cuts off 42 % of the defects. So each way is
tried with the frozen network: least squares on its features, with each image left out in turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vitrail.data.check import IMBALANCED, imbalance
from vitrail.data.images.bands import layouts
from vitrail.data.images.geometry import Size
from vitrail.data.images.whole import stretched, with_fill
from vitrail.data.item import IndexedSource, Subset, evenly_spaced
from vitrail.data.roles import Splits
from vitrail.data.settings import Preparation, Preprocess
from vitrail.durations import Epochs
from vitrail.ranges import height_width
from vitrail.training.assemble import Setup, set_up
from vitrail.training.probe_head import frozen_features
from vitrail.training.run import Run
from vitrail.weights.load import read_card

WAYS = {
    "the central square": Preparation(resize="small", crop=1.0),
    "the whole image, squashed": Preparation(resize="squash"),
    "the whole image, padded": Preparation(resize="pad"),
}
ROUND, MOST = 200, 600
"""Number of images with which all ways are tried at a time, and their maximum number in all."""
SHARE = 0.05
"""Share of the time limit after which no further round begins."""
ALIKE = 1.05
"""Proportions of the images up to which all ways show nearly the same."""
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths of the regularisation, in units of the variance of the features."""


def leave_one_out_accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy of regularised least squares on images [N, D] that are left out of it, one at a time.

    The best of `STRENGTHS` counts. With skewed classes it is the mean of the classes' accuracies. Leaving out row i
    changes its residual by 1 / (1 - h), h being the i-th diagonal entry of the hat matrix (Allen 1974, PRESS).
    """
    names, numbers = np.unique(labels, return_inverse=True)
    x = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    x /= x.std(0) + 1e-9
    wanted = np.eye(len(names))[numbers]
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    share, projected = wanted.mean(0), u.T @ (wanted - wanted.mean(0))
    skewed = imbalance(np.bincount(numbers)) >= IMBALANCED
    best = 0.0
    for strength in STRENGTHS:
        kept = s**2 / (s**2 + strength * len(x))
        fitted = u @ (kept[:, None] * projected) + share
        hat = np.clip((u**2) @ kept + 1 / len(x), None, 1 - 1e-9)[:, None]
        right = (wanted - (wanted - fitted) / (1 - hat)).argmax(1) == numbers
        found = np.mean([right[numbers == one].mean() for one in range(len(names))]) if skewed else right.mean()
        best = max(best, float(found))
    return best


def hardly_stretched(sizes: Sequence[Size], image_size: Size) -> bool:
    """Return whether no image of these (height, width) looks much different if it is squashed to `image_size`."""
    return all(stretched(size, Preprocess(image_size)) <= ALIKE for size in sizes)


def framing(run: Run, splits: Splits) -> tuple[Preparation, str] | None:
    """Return how images are best prepared for the weights of `run`, and the reason; None if nothing needs trying.

    Each image has one class. Raises what `set_up` raises.
    """
    train, labels = splits.train, np.asarray(splits.train.labels)
    rows = np.flatnonzero(labels >= 0)
    if len(np.unique(labels[rows])) < 2:
        return None
    assert run.weights is not None
    sizes = [(one.height, one.width) for one in layouts(train, run.data.channels)]
    card = read_card(run.weights)
    if card.preprocess.resize == "native":  # the network is for whole images
        return None
    if hardly_stretched(sizes, height_width(run.image_size) if run.image_size else card.config.image_size):
        return None
    with set_up(replace(run, duration=Epochs(1)), splits) as setup:
        if setup.decision.preprocess.bands is not None:
            return None
        rows = np.random.default_rng(run.seed).permutation(rows[evenly_spaced(len(rows), MOST)])
        began = time.monotonic()
        found = [_round(setup, train, rows[:ROUND])]
        for start in range(ROUND, len(rows), ROUND):
            if run.time_limit is not None and time.monotonic() - began > SHARE * 60 * run.time_limit:
                break
            found.append(_round(setup, train, rows[start : start + ROUND]))
    reached = {
        name: leave_one_out_accuracy(*map(np.concatenate, zip(*(one[name] for one in found), strict=True)))
        for name in WAYS
    }
    best = max(reached, key=reached.__getitem__)
    others = ", ".join(f"{value:.1%} with {name}" for name, value in reached.items() if name != best)
    count = sum(len(one[best][1]) for one in found)
    return WAYS[best], f"{best}: a linear probe gets {reached[best]:.1%} of {count} training images right, {others}"


def _round(setup: Setup, train: IndexedSource, rows: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the features and labels of the training images `rows` for each way."""
    part, found = Subset(train, np.sort(rows)), {}
    for name, way in WAYS.items():
        prepared = with_fill(way.completed(setup.decision.preprocess), setup.decision.config.mean)
        found[name] = frozen_features(setup, replace(setup.run, preprocess=prepared), part)
    return found
