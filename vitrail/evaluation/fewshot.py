"""Linear few-shot accuracy: least squares from frozen features to {-1, 1}^K in closed form (paper, section 4.1).

There are two published protocols, named by their source and year (`PROTOCOLS`). Both standardise every feature with
the mean and the population deviation (+ 1e-5) of the shots. Both append a constant 100 as bias, so large that it is
hardly regularised, and predict the class of the largest output. They differ in the choice of shots and in the strength
of the regularisation. Both resize images to 256 x 256 without antialiasing, and take the central 224 x 224.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vitrail.data.images.geometry import CentralCrop, Op, Size
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.evaluation.features import Features, labelled_pair
from vitrail.words import listing

BIAS = 100.0
"""The constant feature."""
EPS = 1e-5
"""Constant added to each deviation."""
SHOTS = (1, 5, 10, 25)
_ROWS = 8192
"""Number of test images classified at a time."""

Form = Literal["auto", "primal", "dual"]


@dataclass(frozen=True)
class Protocol:
    """The settings of a published few-shot evaluation."""

    l2: tuple[float, ...]
    """Regularisation strengths."""
    seeds: int | None
    """Number of random draws of the shots, with seeds 0, 1, ...; None: the first images of each class are its shots."""


PROTOCOLS: dict[str, Protocol] = {
    "big_vision-2023": Protocol((2.0**10,), 3),
    "paper-2020": Protocol(tuple(2.0**power for power in range(-10, 20)), None),
}
"""big_vision's evaluator since 2023 uses one strength. The evaluator of the paper's time uses the strength with the
best mean rank over the evaluated data sets (`best_l2`)."""


def protocol_named(name: str) -> Protocol:
    """Return a protocol. Raises UsageError with the most similar name."""
    if name not in PROTOCOLS:
        raise UsageError(
            f"no few-shot protocol is called {name!r}.{did_you_mean(name, PROTOCOLS)} Valid: {', '.join(PROTOCOLS)}"
        )
    return PROTOCOLS[name]


@dataclass(frozen=True)
class Ridge:
    """Regularised least squares, with one eigendecomposition for all strengths.

    With X [n, d] the standardised features and the constant, and Y [n, K] in {-1, 1}, the weights for strength l2 are

        (X'X + l2 I)^-1 X'Y  =  X' (XX' + l2 I)^-1 Y

    the primal and the dual form. Either matrix is Q diag(e) Q', so both are left (diag(e) + l2 I)^-1 right, with
    left = Q, right = Q'X'Y where n >= d and left = X'Q, right = Q'Y where n < d. All float64.
    """

    mean: np.ndarray
    """[width]"""
    deviation: np.ndarray
    """[width]"""
    eigenvalues: np.ndarray
    """[r]"""
    left: np.ndarray
    """[width + 1, r]"""
    right: np.ndarray
    """[r, K]"""

    @classmethod
    def fit(cls, features: np.ndarray, labels: np.ndarray, classes: int, form: Form = "auto") -> Ridge:
        """Fit to features [n, width] of images with labels [n] in 0..classes - 1.

        `form` "auto" takes the smaller eigenvalue problem. Raises DataError for features that are not finite.
        """
        x = features.astype(np.float64)
        mean = x.mean(axis=0)
        deviation = x.std(axis=0) + EPS
        x = _standardised(x, mean, deviation)
        if not np.isfinite(x).all():
            raise DataError(
                "the features of the few-shot images are not finite. Check that the model's weights are finite"
            )
        y = np.full((len(labels), classes), -1.0)
        y[np.arange(len(labels)), labels] = 1.0
        if form == "primal" or (form == "auto" and len(x) >= x.shape[1]):
            eigenvalues, q = np.linalg.eigh(x.T @ x)
            left, right = q, q.T @ (x.T @ y)
        else:
            eigenvalues, q = np.linalg.eigh(x @ x.T)
            left, right = x.T @ q, q.T @ y
        # neither matrix has a negative eigenvalue; rounding makes some
        return cls(mean, deviation, np.maximum(eigenvalues, 0.0), left, right)

    def weights(self, l2: float) -> np.ndarray:
        """Return [width + 1, K]; the last row belongs to the constant."""
        return self.left @ (self.right / (self.eigenvalues + l2)[:, None])

    def answers(self, features: np.ndarray, l2: Sequence[float]) -> np.ndarray:
        """Return the predicted classes of features [m, width] for each strength: int64 [len(l2), m]."""
        predicted = np.empty((len(l2), len(features)), np.int64)
        for begin in range(0, len(features), _ROWS):
            rows = features[begin : begin + _ROWS].astype(np.float64)
            inner = _standardised(rows, self.mean, self.deviation) @ self.left
            for number, strength in enumerate(l2):
                scores = inner @ (self.right / (self.eigenvalues + strength)[:, None])
                predicted[number, begin : begin + _ROWS] = scores.argmax(axis=1)
        return predicted


def _standardised(x: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """[n, width] -> [n, width + 1], the constant last."""
    return np.concatenate([(x - mean) / deviation, np.full((len(x), 1), BIAS)], axis=1)


def ridge(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    *,
    classes: int,
    l2: Sequence[float],
    form: Form = "auto",
) -> np.ndarray:
    """Return the top-1 accuracy on `test` of least squares fitted to `train`, for each strength: float64 [len(l2)].

    Features are [n, width], labels int [n] in 0..classes - 1. One eigendecomposition serves all strengths, and the
    primal and the dual form agree to rounding. Raises UsageError for a strength that is not above 0.
    """
    _check_strengths(l2)
    answers = Ridge.fit(train, train_labels, classes, form).answers(test, l2)
    return (answers == test_labels).mean(axis=1)


def _check_strengths(l2: Sequence[float]) -> None:
    if wrong := [strength for strength in l2 if not 0 < strength < float("inf")]:
        raise UsageError(f"l2 is {wrong[0]:g}; a strength of regularisation must be above 0 and finite")


def draw_shots(labels: np.ndarray, classes: int, shots: Sequence[int], seed: int | None) -> dict[int, np.ndarray]:
    """Return the numbers of the images that are the shots, class after class, for each of `shots`.

    Each class's images are shuffled with `seed`, as in big_vision (one generator, classes in order); None keeps their
    order. The first k images of a class are its shots, so smaller sets of shots are parts of larger ones. A class with
    fewer than k images gives all its images. Images without a label (-1) are never drawn.
    """
    order = np.argsort(labels, kind="stable")
    order = order[np.searchsorted(labels[order], 0) :]
    ends = np.cumsum(np.bincount(labels[order], minlength=classes))
    rows = np.split(order, ends[:-1])
    if seed is not None:
        generator = np.random.default_rng(seed)
        rows = [generator.permutation(row) for row in rows]
    return {count: np.concatenate([row[:count] for row in rows]) for count in shots}


@dataclass
class ShotSelection:
    """The images that are shots, chosen from the labels, so that only their features need to be computed.

    `shots` are numbers of images per class. `seeds` and `l2` replace the protocol's values. Raises UsageError for
    invalid values, and DataError for a class without images.
    """

    labels: np.ndarray
    """int64 [N]: labels of all training images."""
    class_names: list[str]
    protocol: str = "big_vision-2023"
    shots: tuple[int, ...] = SHOTS
    seeds: int | None = None
    l2: tuple[float, ...] = ()
    draws: list[dict[int, np.ndarray]] = field(init=False)
    """For each seed, the images for each of `shots`."""
    short: dict[int, list[str]] = field(init=False)
    """Shots -> the classes that have fewer images, if there are any. All their images are shots."""

    def __post_init__(self) -> None:
        published = protocol_named(self.protocol)
        if not self.shots or min(self.shots) < 1 or (self.seeds is not None and self.seeds < 1):
            raise UsageError(f"shots are {list(self.shots)} and seeds {self.seeds}; both must be at least 1")
        if published.seeds is None and self.seeds not in (None, 1):
            raise UsageError(
                f"{self.protocol} takes the first of each class as shots and has no seeds. Remove the seeds"
            )
        _check_strengths(self.l2)
        self.shots = tuple(sorted(set(self.shots)))
        self.l2 = tuple(self.l2) or published.l2
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.class_names)).tolist()
        fewer = {
            shots: [name for name, count in zip(self.class_names, counts, strict=True) if count < shots]
            for shots in (1, *self.shots)
        }
        if fewer[1]:
            raise DataError(
                f"no training image of {listing(fewer[1], 5)}: few-shot needs at least one image of every class"
            )
        self.short = {shots: names for shots, names in fewer.items() if names}
        seeds: list[int | None] = [None] if published.seeds is None else list(range(self.seeds or published.seeds))
        self.draws = [draw_shots(self.labels, len(self.class_names), self.shots, seed) for seed in seeds]

    @property
    def rows(self) -> np.ndarray:
        """Return the numbers of all images that are shots in any draw, ascending."""
        return np.unique(np.concatenate([found[self.shots[-1]] for found in self.draws]))


@dataclass(frozen=True)
class FewShot:
    """Few-shot accuracies by number of shots, strength and seed."""

    protocol: str
    shots: tuple[int, ...]
    l2: tuple[float, ...]
    top1: np.ndarray
    """float64 [shots, l2, seeds]: share of correctly classified test images."""
    train_images: int
    """Number of images that are shots in any draw."""
    test_images: int
    short: dict[int, list[str]] = field(default_factory=dict)
    """Shots -> classes that have fewer images."""

    @property
    def mean(self) -> np.ndarray:
        """[shots, l2]: mean over the seeds."""
        return self.top1.mean(axis=2)

    @property
    def std(self) -> np.ndarray:
        """[shots, l2]: deviation over the seeds (n - 1); NaN for one seed."""
        if self.top1.shape[2] == 1:
            return np.full(self.top1.shape[:2], np.nan)
        return self.top1.std(axis=2, ddof=1)


def fewshot(chosen: ShotSelection, train: Features, test: Features) -> FewShot:
    """Return the accuracies on `test` with the shots that are `chosen` from `train`.

    `train.index` holds each row's position in `chosen.labels`. Images without a row, because they are unreadable, are
    skipped. Raises DataError for features that are not finite or have different widths.
    """
    _, _, tested, truth = labelled_pair(train, test)
    top1 = np.empty((len(chosen.shots), len(chosen.l2), len(chosen.draws)))
    for seed, drawn in enumerate(chosen.draws):
        for number, shots in enumerate(chosen.shots):
            rows = np.minimum(np.searchsorted(train.index, drawn[shots]), len(train) - 1)
            rows = rows[train.index[rows] == drawn[shots]]  # without the images that have no row
            x, y = train.features[rows], train.labels[rows]
            top1[number, :, seed] = ridge(x, y, tested, truth, classes=len(chosen.class_names), l2=chosen.l2)
    return FewShot(chosen.protocol, chosen.shots, chosen.l2, top1, len(chosen.rows), len(truth), chosen.short)


def best_l2(accuracies: Sequence[Mapping[tuple[int, float], float]]) -> dict[int, float]:
    """Return, for each number of shots, the strength of the best mean rank over data sets (protocol "paper-2020").

    `accuracies` holds (shots, l2) -> test accuracy for each data set. One strength for all data sets prevents fitting
    it to each of them; with a single data set it is chosen on the test images themselves. Among equal accuracies the
    later strength ranks higher; among equal mean ranks the earlier strength is chosen.
    """
    best = {}
    for shots in sorted({shots for shots, _ in accuracies[0]}):
        strengths = [l2 for at, l2 in accuracies[0] if at == shots]
        values = [np.array([found[shots, l2] for l2 in strengths]) for found in accuracies]
        ranks = [np.argsort(np.argsort(value, kind="stable"), kind="stable") for value in values]
        best[shots] = strengths[int(np.argmax(np.mean(ranks, axis=0)))]
    return best


@dataclass(frozen=True)
class FewShotImages(Op):
    """big_vision's `resize(256)|central_crop(224)`, for training and test images; for other sizes in proportion.

    The resize is TensorFlow's bilinear one between pixel centres. It reads four pixels at any scale and rounds down.
    The network's own normalisation then maps to the range [-1, 1].
    """

    size: Size
    """(height, width) of the network's input."""

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """See Op."""
        height, width = (side * 256 // 224 for side in self.size)
        return CentralCrop(self.size)(bilinear(image, height, width), rng)


def bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 [H, W, C] to [height, width, C] between pixel centres, without antialiasing, rounding down."""
    top, bottom, down = _between(image.shape[0], height)
    left, right, across = _between(image.shape[1], width)
    across, down = across[None, :, None], down[:, None, None]

    def row(number: np.ndarray) -> np.ndarray:
        first = image[number][:, left].astype(np.float32)
        return first + (image[number][:, right] - first) * across

    above = row(top)
    return (above + (row(bottom) - above) * down).astype(np.uint8)


def _between(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two pixels around each target pixel, and its distance from the first, float32 [target]."""
    place = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * np.float32(source / target) - np.float32(0.5)
    first = np.floor(place)
    low = np.clip(first, 0, source - 1).astype(np.int64)
    high = np.clip(first + 1, 0, source - 1).astype(np.int64)
    return low, high, place - first
