"""Results of a network that predicts several labels for an image: mean average precision, F1, exact matches.

Every probability of every image is stored, [images, classes], because a ranking of all images by each class is needed.

A label is predicted from a probability that is chosen for each class on validation images. 0.5 is seldom the best for
F1: labels are rare, so probabilities are low ("Optimal Thresholding of Classifiers to Maximize F1 Measure", Lipton,
Elkan and Naryanaswamy 2014). For calibration each label is a yes-or-no question: of all labels with a probability of
80 %, 80 % should be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.device import to_device
from vitrail.errors import DataError
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.calibration import BINS, Calibration, binned
from vitrail.evaluation.classify import Batches, Predict, gather_rows
from vitrail.evaluation.confidence import at_temperature
from vitrail.evaluation.results import Guess, Results

STORED = {
    "index": "index",
    "targets": "target",
    "probabilities": "probability",
    "loss": "loss",
    "thresholds": "thresholds",
}
"""Array in a file -> field of `LabelScores`."""
PAIRED = 1000
"""Maximum number of labels whose pairs are counted, because the number of pairs is the square."""
VALUES = 1 << 21
"""Probabilities that are ranked at a time."""


@dataclass(frozen=True)
class LabelScores(Results):
    """The probabilities of a network, one row per image, sorted by `index`, and the numbers computed from them.

    Numbers of a class are NaN if no image has the label, and means over classes leave such classes out.
    """

    task = "labels"
    headline = "map"
    class_names: list[str]
    index: np.ndarray
    target: np.ndarray
    """int8 [N, classes]: 1 for a label, 0 for none; -1 in the row of an image without known labels, which does not
    count."""
    probability: np.ndarray
    """float32 [N, classes]: sigmoid of each output."""
    loss: np.ndarray
    """float64 [N]: binary cross-entropy in nats, summed over classes; NaN for an image without known labels."""
    thresholds: np.ndarray
    """float64 [classes]: the probability from which a class is predicted."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    temperature: float = 1.0
    """The logits were divided by it."""

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether the labels are known."""
        return self.target[:, 0] >= 0

    @property
    def measurable(self) -> bool:
        """See `Results`: an image that has a label."""
        return bool((self.target == 1).any())

    @property
    def uncalibrated(self) -> np.ndarray:
        """float64 [N, classes]: the probabilities with temperature 1."""
        return at_temperature(self.probability, 1 / self.temperature)

    @cached_property
    def truth(self) -> np.ndarray:
        """bool [count, classes]: the labels of the images that count."""
        return self.target[self.known] == 1

    @cached_property
    def predicted(self) -> np.ndarray:
        """bool [N, classes]: the labels that are predicted."""
        return self.probability >= self.thresholds

    @property
    def correct(self) -> np.ndarray:
        """bool [N]: whether exactly the labels of an image are predicted."""
        return self.known & (self.predicted == (self.target == 1)).all(axis=1)

    @property
    def exact(self) -> float:
        """Share of images for which exactly their labels are predicted."""
        return float(self.correct.sum()) / self.count

    @cached_property
    def average_precision(self) -> np.ndarray:
        """float64 [classes]: area under the precision-recall curve, as scikit-learn computes it."""
        scores, found = self.probability[self.known], np.full(len(self.class_names), np.nan)
        if np.isfinite(scores).all():
            labels = np.flatnonzero(self.class_count)
            for part in np.array_split(labels, 1 + self.truth[:, labels].size // VALUES):
                found[part] = _average_precision(self.truth[:, part], scores[:, part])
        return found

    @property
    def map(self) -> float:
        """Mean over classes of the average precision."""
        return _mean(self.average_precision)

    @property
    def chance(self) -> float:
        """Mean average precision of a random ranking: the mean share of images that have a label."""
        return _mean(np.where(self.class_count > 0, self.class_count / max(self.count, 1), np.nan))

    @property
    def class_count(self) -> np.ndarray:
        """int64 [classes]: number of images with each label."""
        return self.truth.sum(axis=0)

    @property
    def class_predicted(self) -> np.ndarray:
        """int64 [classes]: number of images for which each label is predicted."""
        return self.predicted[self.known].sum(axis=0)

    @property
    def class_correct(self) -> np.ndarray:
        """int64 [classes]: number of images that have a label for which it is predicted."""
        return (self.predicted[self.known] & self.truth).sum(axis=0)

    @property
    def precision(self) -> np.ndarray:
        """float64 [classes]: share of the predictions of a label that are right; NaN if it is never predicted."""
        return _ratio(self.class_correct, self.class_predicted)

    @property
    def recall(self) -> np.ndarray:
        """float64 [classes]: share of the images with a label for which it is predicted."""
        return _ratio(self.class_correct, self.class_count)

    @property
    def class_f1(self) -> np.ndarray:
        """float64 [classes]: harmonic mean of precision and recall; 0 for a label that is never predicted."""
        f1 = _ratio(2 * self.class_correct, self.class_count + self.class_predicted)
        return np.where(self.class_count > 0, f1, np.nan)

    @property
    def macro_f1(self) -> float:
        """Mean over classes of F1."""
        return _mean(self.class_f1)

    @property
    def micro_f1(self) -> float:
        """F1 of all labels of all images together; 0 if no label is predicted."""
        all_labels = self.class_count.sum() + self.class_predicted.sum()
        return float(2 * self.class_correct.sum() / all_labels) if all_labels else 0.0

    @property
    def nll(self) -> float:
        """Mean loss over images, in nats."""
        return float(self.loss[self.known].mean())

    @cached_property
    def paired(self) -> np.ndarray:
        """int64 [pairs]: the labels whose pairs are counted: all, or the `PAIRED` that most images have, ascending."""
        return np.sort(np.argsort(-self.class_count, kind="stable")[:PAIRED])

    @cached_property
    def cooccurrence(self) -> np.ndarray:
        """int64 [pairs, pairs]: number of images with both labels; on the diagonal, with the label."""
        marks = self.truth[:, self.paired].astype(np.float32)  # exact up to 16 million images
        return (marks.T @ marks).astype(np.int64)

    @cached_property
    def predicted_together(self) -> np.ndarray:
        """int64 [pairs, pairs]: number of images with label (row) for which label (column) is predicted."""
        there, predicted = self.truth[:, self.paired], self.predicted[self.known][:, self.paired]
        return (there.T.astype(np.float32) @ predicted.astype(np.float32)).astype(np.int64)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log: map, micro_f1, macro_f1, exact, nll, count."""
        names = ("map", "micro_f1", "macro_f1", "exact", "nll", "count")
        return {name: getattr(self, name) for name in names}

    def in_words(self) -> str:
        """See `Results`."""
        return f"mAP {self.map:.2%}"

    def worst(self, most: int) -> np.ndarray:
        """See `Results`: those with the largest loss."""
        wrong = np.flatnonzero(self.known & ~self.correct & np.isfinite(self.probability).all(axis=1))
        return wrong[np.argsort(-self.loss[wrong], kind="stable")][:most]

    def true_names(self, row: int) -> list[str] | None:
        """See `Results`."""
        return [self.class_names[k] for k in np.flatnonzero(self.target[row] == 1)] if self.known[row] else None

    def guesses(self, row: int, most: int) -> list[Guess]:
        """See `Results`: all predicted labels, the most probable first."""
        chosen = np.flatnonzero(self.predicted[row])
        chosen = chosen[np.argsort(-self.probability[row, chosen], kind="stable")]
        there = self.target[row] == 1
        return [Guess(self.class_names[k], float(self.probability[row, k]), bool(there[k])) for k in chosen]

    def cells(self, row: int) -> tuple[list[str], list[str], list[str]]:
        """See `Results`."""
        there, best = np.flatnonzero(self.target[row] == 1), np.flatnonzero(self.predicted[row])
        names = [[self.class_names[k] for k in part] for part in (there, best)]
        return names[0], names[1], [f"{chance:.6f}" for chance in self.probability[row, best].tolist()]

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Results`."""
        found: dict[str, np.ndarray] = {name: getattr(self, field) for name, field in STORED.items()}
        return {**found, "temperature": np.array([self.temperature])}


def _average_precision(truth: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the area under the precision-recall curve of each column, float64 [columns], as scikit-learn defines it.

    truth: bool [N, columns], with an image of each; scores: [N, columns]. Each image with the label adds the precision
    at its own score, where images with equal scores are predicted together.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    scores, truth = np.take_along_axis(scores, order, 0), np.take_along_axis(truth, order, 0)
    place = np.arange(len(scores))[:, None]
    last = np.where(np.diff(scores, axis=0, append=np.inf) != 0, place, len(scores) - 1)
    last = np.minimum.accumulate(last[::-1], axis=0)[::-1]  # of the images with an equal score
    precision = np.cumsum(truth, axis=0) / (place + 1)
    found: np.ndarray = (np.take_along_axis(precision, last, 0) * truth).sum(axis=0) / truth.sum(axis=0)
    return found


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def score_labels(
    predict: Predict,
    loader: Batches,
    class_names: Sequence[str],
    thresholds: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> LabelScores:
    """Run `predict` over one epoch of `loader` and return the probabilities of all processes, on every process.

    Batches have labels int8 [batch, classes]. thresholds: One per class; None chooses those with the best F1 on these
    images (`best_thresholds`). temperature: Divides the logits. An image that arrives twice counts once. Raises
    DataError if outputs and classes do not fit, if no image could be read, and if no image has any of the labels.
    """

    def launch(batch: Any) -> tuple[Tensor, Tensor]:
        logits = predict(batch.images).float()
        if logits.shape[1] != len(class_names) or batch.labels.shape != logits.shape:
            raise DataError(
                f"the model has {logits.shape[1]} outputs and the labels are {list(batch.labels.shape)}, but the data "
                f"have {len(class_names)} classes"
            )
        logits, labels = logits / temperature, to_device(batch.labels, logits.device)
        losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).float(), reduction="none").sum(1)
        return logits.sigmoid(), losses.masked_fill(labels[:, 0] < 0, torch.nan)

    rows = [(batch.index, batch.labels, *found) for batch, found in ahead(loader.epoch(0), launch)]
    (index, target, probability, loss), bad = gather_rows(rows, loader)
    index, first = np.unique(index, return_index=True)
    target, probability = target[first], probability[first]
    if not (target == 1).any():
        raise DataError(
            f"none of the {len(index)} images has any of the {len(class_names)} labels, so nothing can be measured. "
            "Evaluation needs images with labels"
        )
    known = target[:, 0] >= 0
    chosen = best_thresholds(target[known] == 1, probability[known]) if thresholds is None else np.array(thresholds)
    loss = loss[first].astype(np.float64)
    return LabelScores(list(class_names), index, target, probability, loss, chosen, bad, temperature)


@dataclass(frozen=True)
class LabelCalibration:
    """Agreement of probabilities and frequencies, over images with known labels."""

    ece: np.ndarray
    """float64 [classes]: expected calibration error of each label: mean over images of |frequency - probability| of
    their bin; NaN for a label without images."""
    brier: np.ndarray
    """float64 [classes]: mean squared distance of the probability from 1 (the image has the label) or 0."""
    together: Calibration
    """All labels of all images in one diagram: `accuracy` is the share of labels that are there, `confidence` the mean
    probability."""

    @property
    def mean_ece(self) -> float:
        """Mean over labels of the calibration error."""
        return float(np.nanmean(self.ece))

    @property
    def mean_brier(self) -> float:
        """Mean over labels of the Brier score."""
        return float(self.brier.mean())


def label_calibration(found: LabelScores, bins: int = BINS) -> LabelCalibration:
    """Return the calibration of each label, and of all together. Raises UsageError for fewer than one bin."""
    probability, truth = found.probability[found.known], found.truth
    ece = _each_ece(found, probability, bins)
    return LabelCalibration(
        ece=ece,
        brier=np.square(probability.astype(np.float64) - truth).mean(axis=0),
        together=binned(probability.reshape(-1), truth.reshape(-1), bins, nll=found.nll),
    )


def labels_before_scaling(found: LabelScores, bins: int = BINS) -> float:
    """Return the mean over labels of the calibration error with temperature 1."""
    return float(np.nanmean(_each_ece(found, found.uncalibrated[found.known], bins)))


def _each_ece(found: LabelScores, probability: np.ndarray, bins: int) -> np.ndarray:
    """Return the calibration error of each label for probabilities [count, classes]."""
    each = [binned(column, truth, bins).ece for column, truth in zip(probability.T, found.truth.T, strict=True)]
    return np.where(found.class_count > 0, each, np.nan)


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
