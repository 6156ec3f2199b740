"""Measures of several labels agree with scikit-learn's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import calibration as sklearn_calibration
from sklearn import metrics

from vitrail.errors import DataError
from vitrail.evaluation import label_scores as scores
from vitrail.evaluation.label_scores import (
    LabelScores,
    best_threshold,
    best_thresholds,
    label_calibration,
    score_labels,
)
from vitrail.evaluation.ranked import ranked
from vitrail.reports.tables import wrong_beside
from vitrail.tasks.catalog import load_results, save_results

NAMES = ["a", "b", "c", "d", "e"]


@dataclass
class Batch:
    images: torch.Tensor
    labels: torch.Tensor
    index: torch.Tensor


class Batches:
    """Batches whose images are logits; images arrive in another order, and one of them twice."""

    bad: list[Any]

    def __init__(self, logits: np.ndarray, target: np.ndarray, order: np.ndarray) -> None:
        self.logits, self.target, self.order = torch.from_numpy(logits), torch.from_numpy(target), order
        self.bad = [("lost.png", "corrupt")]

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for rows in np.array_split(self.order, 7):
            yield Batch(self.logits[rows], self.target[rows], torch.from_numpy(rows))


def case(seed: int = 0, count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """(logits, labels): better than chance, with images without a label, and a label that is never there."""
    rng = np.random.default_rng(seed)
    target = (rng.random((count, 5)) < [0.5, 0.3, 0.1, 0.03, 0.0]).astype(np.int8)
    target[:10] = 0
    target[10, 3] = 1
    logits = (1.5 * target - 1.5 + rng.normal(size=(count, 5))).astype(np.float32)
    return np.round(logits, 1), target  # with ties


def scored(thresholds: list[float] | None = None) -> tuple[LabelScores, np.ndarray, np.ndarray]:
    logits, target = case()
    order = np.append(np.random.default_rng(1).permutation(len(logits)), 5)
    found = score_labels(lambda images: images, Batches(logits, target, order), NAMES, thresholds)
    return found, 1 / (1 + np.exp(-logits.astype(np.float64))), target.astype(bool)


def test_every_number_is_that_of_scikit_learn() -> None:
    found, p, y = scored([0.5, 0.4, 0.3, 0.2, 0.1])
    chosen = p >= [0.5, 0.4, 0.3, 0.2, 0.1]
    there = y.any(axis=0)
    ap = [metrics.average_precision_score(y[:, k], p[:, k]) for k in range(4)]
    np.testing.assert_allclose(found.average_precision[:4], ap, rtol=1e-6)
    assert np.isnan(found.average_precision[4]) and found.map == pytest.approx(np.mean(ap))
    assert found.micro_f1 == pytest.approx(metrics.f1_score(y, chosen, average="micro"))
    each = metrics.f1_score(y, chosen, average=None, zero_division=0)
    np.testing.assert_allclose(found.class_f1[there], each[there])
    assert found.macro_f1 == pytest.approx(metrics.f1_score(y[:, there], chosen[:, there], average="macro"))
    np.testing.assert_allclose(found.recall[:4], metrics.recall_score(y, chosen, average=None, zero_division=0)[:4])
    precision = metrics.precision_score(y, chosen, average=None, zero_division=np.nan)
    np.testing.assert_allclose(found.precision, precision)
    assert found.exact == pytest.approx(metrics.accuracy_score(y, chosen))
    matrices = metrics.multilabel_confusion_matrix(y, chosen)
    assert found.class_correct.tolist() == matrices[:, 1, 1].tolist()
    losses = [metrics.log_loss(y[:, k], p[:, k], labels=[False, True]) for k in range(5)]
    assert found.nll == pytest.approx(sum(losses), rel=1e-5)
    assert found.chance == pytest.approx(y[:, there].mean())
    assert found.bad == [("lost.png", "corrupt")] and found.count == 120


def test_cooccurrence_counts_pairs() -> None:
    found, p, y = scored([0.5] * 5)
    chosen = p >= 0.5
    for i in range(5):
        for j in range(5):
            assert found.cooccurrence[i, j] == sum(y[:, i] & y[:, j])
            assert found.predicted_together[i, j] == sum(y[:, i] & chosen[:, j])


def test_calibration_of_each_label() -> None:
    found, p, y = scored()
    ours = label_calibration(found, bins=8)
    for k in range(4):
        assert ours.brier[k] == pytest.approx(metrics.brier_score_loss(y[:, k], p[:, k]), rel=1e-5)
        there, predicted = sklearn_calibration.calibration_curve(y[:, k], found.probability[:, k], n_bins=8)
        counts = np.bincount(np.searchsorted(np.linspace(0, 1, 9)[1:-1], found.probability[:, k]), minlength=8)
        assert ours.ece[k] == pytest.approx((counts[counts > 0] * abs(there - predicted)).sum() / 120, abs=1e-6)
    assert ours.mean_ece == pytest.approx(np.mean(ours.ece[:4]))
    there, predicted = sklearn_calibration.calibration_curve(y.ravel(), found.probability.ravel(), n_bins=8)
    filled = ours.together.bin_count > 0
    np.testing.assert_allclose(ours.together.bin_accuracy[filled], there)
    np.testing.assert_allclose(ours.together.bin_confidence[filled], predicted, rtol=1e-5)


def test_thresholds_have_the_best_f1_of_all() -> None:
    logits, target = case(3)
    target[np.flatnonzero(target[:, 3])[4:], 3] = 0  # four images: too few for a threshold of its own
    p, y = 1 / (1 + np.exp(-logits)), target.astype(bool)
    chosen = best_thresholds(y, p)
    for k in range(3):  # each with five images or more
        candidates = [metrics.f1_score(y[:, k], p[:, k] >= at) for at in np.unique(p[:, k])]
        assert metrics.f1_score(y[:, k], p[:, k] >= chosen[k]) == pytest.approx(max(candidates))
        assert not np.isin(chosen[k], p[:, k])  # between two probabilities, so rounding does not matter
    shared = [metrics.f1_score(y.ravel(), (p >= at).ravel()) for at in np.unique(p)]
    assert chosen[3] == chosen[4] == best_threshold(y.ravel(), p.ravel())
    assert metrics.f1_score(y.ravel(), (p >= chosen[4]).ravel()) == pytest.approx(max(shared))
    assert best_thresholds(y, np.full_like(p, np.nan)).tolist() == [0.5] * 5


def test_images_with_unknown_labels_do_not_count(tmp_path: Path) -> None:
    logits, target = case()
    target[20:] = -1
    found = score_labels(lambda images: images, Batches(logits, target, np.arange(120)), NAMES)
    first = score_labels(lambda images: images, Batches(logits[:20], target[:20], np.arange(20)), NAMES)
    assert found.metrics() == first.metrics() and found.count == 20
    assert not found.correct[20:].any()
    save_results(tmp_path / "a.npz", found)
    read = load_results(tmp_path / "a.npz", NAMES)
    assert isinstance(read, LabelScores) and read.metrics() == found.metrics() and read.bad == found.bad
    with pytest.raises(DataError, match="there are 4 classes"):
        load_results(tmp_path / "a.npz", NAMES[:4])


def test_nothing_to_measure_is_an_error() -> None:
    logits, target = case()
    with pytest.raises(DataError, match="none of the 120 images has any of the 5 labels"):
        score_labels(lambda images: images, Batches(logits, 0 * target, np.arange(120)), NAMES)
    with pytest.raises(DataError, match="the model has 5 outputs"):
        score_labels(lambda images: images, Batches(logits, target, np.arange(120)), NAMES[:4])


def test_outputs_that_are_not_finite_have_no_precision() -> None:
    found, _, _ = scored([0.5] * 5)
    broken = replace(found, probability=np.full_like(found.probability, np.nan))
    assert (
        np.isnan(broken.map)
        and broken.micro_f1 == 0
        and broken.exact == pytest.approx(found.truth[:10].mean() + (~found.truth.any(axis=1)).mean())
    )


def test_answers_are_those_above_their_thresholds() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, -3.0, -3.0]])
    one = ranked(logits, 2)
    np.testing.assert_allclose(one.probabilities[0], np.exp([2, 0.5]) / np.exp([2, -1, 0.5]).sum(), rtol=1e-6)
    assert one.classes[0].tolist() == [0, 2] and one.predicted is None
    several = ranked(logits, 2, [0.9, 0.2, 0.5])
    assert several.predicted is not None
    named = [several.classes[row][several.predicted[row]].tolist() for row in range(2)]
    assert named == [[2, 1], []]  # sigmoid(2) = 0.88, sigmoid(-1) = 0.27, sigmoid(0.5) = 0.62


@pytest.mark.parametrize("values", [1, 50, 1 << 21])
def test_average_precision_with_equal_scores_is_scikit_learns(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "VALUES", values)
    rng = np.random.default_rng(0)
    for images, levels in ((1, 1), (7, 2), (40, 5), (40, 1)):
        y = rng.integers(0, 2, (images, 9)).astype(np.int8)
        y[0] = 1  # every label is there
        p = (rng.integers(0, levels, (images, 9)) / 8).astype(np.float32)
        names = [str(number) for number in range(9)]
        found = LabelScores(names, np.arange(images), y, p, np.zeros(images), np.full(9, 0.5))
        expected = [metrics.average_precision_score(y[:, label], p[:, label]) for label in range(9)]
        np.testing.assert_allclose(found.average_precision, expected, rtol=1e-12)


def test_pairs_of_very_many_labels_are_those_of_the_most_frequent() -> None:
    """All pairs of 100,000 labels would be 80 GB."""
    classes = 100_000
    y = np.zeros((6, classes), dtype=np.int8)
    y[:, 7::200] = 1  # 500 labels of all images
    y[0, 3] = 1
    names = [str(number) for number in range(classes)]
    found = LabelScores(names, np.arange(6), y, np.full(y.shape, 0.7, np.float32), np.zeros(6), np.full(classes, 0.5))
    assert (
        found.paired[:3].tolist() == [0, 1, 2]
        and len(found.paired) == 1000
        and set(range(7, classes, 200)) <= {*found.paired.tolist()}
    )
    assert found.cooccurrence.shape == found.predicted_together.shape == (1000, 1000)
    assert wrong_beside(found)[0].images == 6
