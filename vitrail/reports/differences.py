"""Where two runs disagree: the classes that gain and lose, and the images that only one run gets right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.images.pixels import picture
from vitrail.reports.compare import Against, Comparison
from vitrail.reports.gallery import Exhibit, decoded_image, guesses, true_class

MOST_EACH, MOST_TOTAL = 12, 96
"""Maximum number of images in one gallery, and on the page."""


@dataclass(frozen=True)
class ClassShift:
    """The accuracy of one class in several runs."""

    name: str
    images: int
    accuracy: list[float]


@dataclass(frozen=True)
class Disagreement:
    """Images that run `better` gets right and run `worse` gets wrong."""

    better: int
    worse: int
    images: int
    runs: tuple[int, int]
    """The numbers of the runs whose guesses the exhibits hold."""
    shown: list[Exhibit]


def class_shifts(found: Comparison) -> list[ClassShift]:
    """Return every class that all compared runs know, the largest difference first."""
    numbers = [0, *(one.number for one in found.against)]
    evaluations = [one for one in (found.runs[number].evaluation for number in numbers) if one is not None]
    if len(numbers) < 2:
        return []
    accuracy = np.stack([one.class_accuracy for one in evaluations], axis=1)
    known = np.flatnonzero(~np.isnan(accuracy).any(axis=1))
    gap = np.ptp(accuracy[known], axis=1)
    first = evaluations[0]
    return [
        ClassShift(first.class_names[k], int(first.class_count[k]), accuracy[k].tolist())
        for k in known[np.argsort(-gap, kind="stable")].tolist()
    ]


def disagreements(found: Comparison, source: Any) -> list[Disagreement]:
    """Return the images that only one of two runs gets right. `source` holds the validation images."""
    most = min(MOST_EACH, max(1, MOST_TOTAL // (2 * max(len(found.against), 1))))
    both = []
    for one in found.against:
        first, second = one.pair.first_right, one.pair.second_right
        both.append(_disagreement(found, one, (one.number, 0), second & ~first, source, most))
        both.append(_disagreement(found, one, (0, one.number), first & ~second, source, most))
    return [gallery for gallery in both if gallery.shown]


def _disagreement(
    found: Comparison, one: Against, order: tuple[int, int], differ: np.ndarray, source: Any, most: int
) -> Disagreement:
    """Collect the images where bool [n] `differ` is true, those with the largest difference in loss first."""
    first, second = found.runs[0].evaluation, found.runs[one.number].evaluation
    assert first is not None and second is not None
    rows = np.stack([one.pair.first_rows, one.pair.second_rows], axis=1)[differ]
    gap = np.abs(first.loss[rows[:, 0]] - second.loss[rows[:, 1]])
    gap = np.nan_to_num(gap, nan=np.inf, posinf=np.inf)
    shown: list[Exhibit] = []
    for a, b in rows[np.argsort(-gap, kind="stable")].tolist():
        if len(shown) == most:
            break
        if (decoded := decoded_image(source, int(first.index[a]), picture)) is not None:
            guessed = [guesses(first, a, 1), guesses(second, b, 1)]
            shown.append(Exhibit(*decoded, true_class(first, a), guessed))
    return Disagreement(*order, len(rows), (0, one.number), shown)
