"""What a classifier must beat: the most frequent class, and a linear classifier of simple features.

Both are measured on the images of a run's headline. The features are histograms of oriented gradients (Dalal and Triggs
2005) of the whole image, squashed to 64 pixels. The classifier is regularised least squares to one output per class; a
tenth of its training images chooses the strength. It sees at most `MOST` training images, drawn at random, as many as
the seconds that are `allowed` suffice for, and is not computed if these are too few.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.check import IMBALANCED, imbalance
from vitrail.data.images.decode import decode
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.item import IndexedSource
from vitrail.errors import VitrailError

FREQUENT, LINEAR = "the most frequent class", "a linear classifier"
SCORES = ("top1", "balanced_accuracy")
"""Numbers that are compared."""
MOST = 4000
"""Maximum number of training images of the linear classifier."""
FEWEST = 200
"""Number of training images below which the time is too short, if there are more."""
SHARE, SECONDS = 0.05, 2.0
"""Share of the seconds of a run that the linear classifier may take, and how many it may always take."""
SIDE, CELL, BINS = 64, 8, 9
"""Side of the squashed image and of a cell in pixels, and number of orientations."""
CHUNK = 256
"""Number of images that are read at a time."""
HELD_OUT = 10
"""Number of training images per image that chooses the strength."""
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths of the regularisation, in units of the variance of the features."""
_SOLVING = 30
"""Time of solving, in units of the time that the products of a chunk take. Each image is multiplied twice."""


def gradients(images: Tensor) -> Tensor:
    """Return the histograms of oriented gradients of grey images [B, SIDE, SIDE] between 0 and 1, float32 [B, width].

    Each block of 2 x 2 cells is normalised, cut at 0.2, and normalised again.
    """
    grey = images.sqrt()
    down, right = torch.gradient(grey, dim=1)[0], torch.gradient(grey, dim=2)[0]
    angle = torch.atan2(down, right).remainder(torch.pi) * (BINS / torch.pi)
    length, low = torch.hypot(down, right), angle.floor()
    bins = torch.zeros(len(images), BINS, SIDE, SIDE)
    for number, part in ((low, 1 - angle + low), (low + 1, angle - low)):
        bins.scatter_add_(1, number.long().remainder(BINS)[:, None], (length * part)[:, None])
    cells = F.avg_pool2d(bins, CELL)
    corners = (cells[:, :, :-1, :-1], cells[:, :, 1:, :-1], cells[:, :, :-1, 1:], cells[:, :, 1:, 1:])
    blocks = F.normalize(torch.cat(corners, 1) + 1e-6, dim=1).clamp(max=0.2)
    return F.normalize(blocks, dim=1).flatten(1)


def _grey(source: IndexedSource, pixels: Pixels, index: int) -> Tensor | None:
    """Return an image as grey [SIDE, SIDE] between 0 and 1; None if it cannot be read."""
    try:
        stored = source[index].image
        if isinstance(stored, bytes) and pixels is EIGHT_BIT_RGB:
            image = decode(stored, short_side=SIDE)
        else:
            image = pixels.values(stored)
    except VitrailError:
        return None
    whole = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
    small = F.interpolate(whole, (SIDE, SIDE), mode="bilinear", antialias=True)[0].mean(0)
    small = small.nan_to_num()
    small = small / 255 if image.dtype == np.uint8 else (small - small.min()) / (small.max() - small.min() + 1e-6)
    return small.clamp(0, 1)


def _chunks(source: IndexedSource, rows: np.ndarray, pixels: Pixels) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield the readable images among `rows`, and their features, chunk by chunk."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for begin in range(0, len(rows), CHUNK):
            part = rows[begin : begin + CHUNK]
            images = list(pool.map(partial(_grey, source, pixels), part.tolist()))
            read = [image for image in images if image is not None]
            if read:
                yield part[[image is not None for image in images]], gradients(torch.stack(read))


class _LeastSquares:
    """Regularised least squares of classes from standardised features; of few images, by their products."""

    def __init__(self, features: Tensor, labels: np.ndarray, classes: int) -> None:
        """Take in images [N, width] with their classes."""
        marks = F.one_hot(torch.from_numpy(labels), classes).float()
        self.deviation, self.mean = torch.std_mean(features, 0, correction=0)
        self.deviation.clamp_(min=1e-5)
        self.share = marks.mean(0)
        self.rows, self.marks = (features - self.mean) / self.deviation, marks - self.share
        self.dual = len(features) < features.shape[1]
        self.products = (self.rows @ self.rows.T if self.dual else self.rows.T @ self.rows).double()

    def solved(self, strength: float) -> Tensor:
        """Return weights [width + 1, classes] for the features as they were; the last row is the bias."""
        scaled = self.products.clone()
        scaled.diagonal().add_(strength * len(self.rows))
        wanted = (self.marks if self.dual else self.rows.T @ self.marks).double()
        found = torch.cholesky_solve(wanted, torch.linalg.cholesky(scaled)).float()
        weight = (self.rows.T @ found if self.dual else found) / self.deviation[:, None]
        return torch.cat([weight, (self.share - self.mean @ weight)[None]])


def _answers(features: Tensor, weight: Tensor) -> np.ndarray:
    """Return the predicted classes of features [B, width]."""
    return torch.addmm(weight[-1], features, weight[:-1]).argmax(1).numpy()


def allowed(seconds: float) -> float:
    """Return the seconds that the linear classifier may take after a run of `seconds`."""
    return max(SHARE * seconds, SECONDS)


def _affordable(train: IndexedSource, rows: np.ndarray, measured: int, pixels: Pixels, seconds: float) -> int:
    """Return how many training images can be used, besides the `measured` images, within `seconds`."""
    start = time.monotonic()
    for index, features in _chunks(train, rows[:CHUNK], pixels):
        image = (time.monotonic() - start) / len(index)
        start = time.monotonic()
        _ = features.T @ features
        product = (time.monotonic() - start) / len(index)
        solving = _SOLVING * CHUNK * product * min(len(rows) / features.shape[1], 1) ** 3
        return int((seconds - measured * image - solving) / (image + 2 * product))
    return 0


def _linear(train: IndexedSource, rows: np.ndarray, pixels: Pixels) -> Tensor:
    """Return the weights of a linear classifier that learns from the training images `rows`."""
    read, parts = zip(*_chunks(train, rows, pixels), strict=True)
    labels, features, classes = np.asarray(train.labels)[np.concatenate(read)], torch.cat(parts), len(train.class_names)
    out = np.arange(len(labels)) % HELD_OUT == 0
    squares = _LeastSquares(features[~out], labels[~out], classes)
    best = max(STRENGTHS, key=lambda one: (_answers(features[out], squares.solved(one)) == labels[out]).mean())
    return _LeastSquares(features, labels, classes).solved(best)


def unbeaten(numbers: Mapping[str, float], found: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return the floor that a network with these numbers does not exceed, LINEAR first; None if it exceeds all."""
    for name in (LINEAR, FREQUENT):
        known = {key: value for key, value in found.get(name, {}).items() if key in SCORES and key in numbers}
        if any(numbers[key] <= value for key, value in known.items()):
            return name
    return None


def shortfall(numbers: Mapping[str, float], found: Mapping[str, Mapping[str, float]]) -> str:
    """Return what it means that a network does not exceed a floor, as a clause without its subject; "" if it does.

    A network that is below a linear classifier by less than the standard error of the difference is as good.
    """
    if (name := unbeaten(numbers, found)) is None:
        return ""
    count = max(numbers.get("count", 1), 1)
    for key in SCORES:
        if key in numbers and (floor := found[name].get(key)) is not None:
            error = math.sqrt(max(sum(share * (1 - share) for share in (floor, numbers[key])), 0) / count)
            if name == FREQUENT or floor - numbers[key] > error:
                return "has not learned enough"
    return f"is not better than {name}"


def floors_in_words(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the floors as a clause: "a linear classifier reaches 67.20%, the most frequent class 19.62%"."""
    texts: list[str] = []
    for name in (LINEAR, FREQUENT):
        if SCORES[0] in (numbers := found.get(name, {})):
            balanced = f" (balanced accuracy {numbers[SCORES[1]]:.2%})" if SCORES[1] in numbers else ""
            some = numbers.get("train", 0) < numbers.get("of", 0)
            part = f" of {numbers['train']:,.0f} training images" if some else ""
            texts.append(f"{name}{part} {'' if texts else 'reaches '}{numbers[SCORES[0]]:.2%}{balanced}")
    return ", ".join(texts)


class Floors(NamedTuple):
    """The floors of a run."""

    found: dict[str, dict[str, float]]
    """FREQUENT and LINEAR -> top1, and balanced_accuracy where the classes of the measured images are skewed. LINEAR
    also has `train` and `of`: from how many of the training images it learned, within its share of the time."""
    skipped: str = ""
    """Why there is no linear classifier."""


@torch.no_grad()
def floors(train: IndexedSource, measured: IndexedSource, *, seconds: float, pixels: Pixels = EIGHT_BIT_RGB) -> Floors:
    """Return the floors of a run that took `seconds`, on the images `measured`. All labels are classes.

    pixels: How stored images are read. Images that cannot be read are left out.
    """
    truth, rows = np.asarray(measured.labels), np.flatnonzero(np.asarray(train.labels) >= 0)
    known = np.flatnonzero(truth >= 0)
    skewed = imbalance(np.bincount(truth[known])) >= IMBALANCED

    def scores(right: np.ndarray, answers: np.ndarray) -> dict[str, float]:
        balanced = np.mean([right[answers == one].mean() for one in np.unique(answers)])
        return {"top1": float(right.mean())} | ({"balanced_accuracy": float(balanced)} if skewed else {})

    found = {FREQUENT: scores(truth[known] == np.bincount(truth[known]).argmax(), truth[known])}
    rows = np.random.default_rng(0).permutation(rows)
    count = min(len(rows), MOST, _affordable(train, rows, len(known), pixels, allowed(seconds)))
    if count < min(len(rows), FEWEST):
        return Floors(found, f"it would take more than {allowed(seconds):.0f} s")
    weight, right, answers = _linear(train, np.sort(rows[:count]), pixels), [], []
    for index, features in _chunks(measured, known, pixels):
        answers.append(truth[index])
        right.append(_answers(features, weight) == answers[-1])
    if not right:
        return Floors(found, "no image could be read")
    linear = scores(np.concatenate(right), np.concatenate(answers))
    return Floors({**found, LINEAR: {**linear, "train": float(count), "of": float(len(rows))}})
