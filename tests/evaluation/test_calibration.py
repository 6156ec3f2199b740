from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from vitrail.errors import UsageError
from vitrail.evaluation.calibration import Calibration, calibration, draw_reliability, plot, write_bins
from vitrail.evaluation.classify import Classification, classify


class Rows:
    """A loader whose "images" are the logits themselves, in batches of seven."""

    def __init__(self, logits: np.ndarray, labels: np.ndarray) -> None:
        self.logits, self.labels = torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)
        self.bad: list[tuple[str, str]] = []

    def epoch(self, epoch: int):
        for index in torch.arange(len(self.labels)).split(7):
            yield type("Batch", (), {"images": self.logits[index], "labels": self.labels[index], "index": index})


def answers(probabilities: np.ndarray, labels: list[int] | np.ndarray) -> Classification:
    """What a network with these probabilities [N, K] answers."""
    logits = np.log(np.asarray(probabilities, dtype=np.float64))
    names = [str(k) for k in range(logits.shape[1])]
    return classify(lambda images: images, Rows(logits, np.asarray(labels)), names)


def two(*confidences: float) -> np.ndarray:
    """Rows of two classes, the first one with this probability."""
    return np.array([(p, 1 - p) for p in confidences])


def draw_probabilities(images: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    score = np.exp(2 * rng.normal(size=(images, classes)))
    return score / score.sum(1, keepdims=True), rng.integers(0, classes, images)


def test_a_case_worked_by_hand() -> None:
    rows = np.array([[0.3, 0.25, 0.25, 0.2], [0.5, 0.2, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1], [0.9, 0.05, 0.03, 0.02]])
    found = calibration(answers(rows, [0, 3, 0, 0]), bins=5)
    # (0.2, 0.4]: one image, right, sure to 0.3; (0.4, 0.6]: two, one right, 0.5; (0.8, 1]: one, right, 0.9
    assert found.bin_count.tolist() == [0, 1, 2, 0, 1]
    np.testing.assert_allclose(found.bin_accuracy, [np.nan, 1, 0.5, np.nan, 1])
    np.testing.assert_allclose(found.bin_confidence, [np.nan, 0.3, 0.5, np.nan, 0.9], rtol=1e-6)
    assert found.ece == pytest.approx((0.7 + 0 + 0 + 0.1) / 4, rel=1e-6)
    assert (found.accuracy, found.count) == (0.75, 4)
    assert found.confidence == pytest.approx(0.55, rel=1e-6)


def test_a_network_that_is_as_sure_as_it_is_right_has_no_calibration_error() -> None:
    found = calibration(answers(two(*[0.7] * 10), [0] * 7 + [1] * 3))
    assert found.ece == pytest.approx(0, abs=1e-6)
    assert found.brier == pytest.approx(2 * 0.7 * 0.3, rel=1e-6)
    assert found.nll == pytest.approx(-0.7 * math.log(0.7) - 0.3 * math.log(0.3), rel=1e-6)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_a_network_that_knows_nothing(classes: int) -> None:
    found = calibration(answers(np.full((3, classes), 1 / classes), [0, 1, 1]))
    assert found.brier == pytest.approx(1 - 1 / classes, rel=1e-5)
    assert found.nll == pytest.approx(math.log(classes), rel=1e-6)
    assert found.confidence == pytest.approx(1 / classes, rel=1e-5)


def test_a_bin_holds_its_upper_edge() -> None:
    found = calibration(answers(two(0.6, 0.60001, 0.999), [0, 0, 0]))
    # 9/15 is 0.6: the last of the ninth bin
    assert np.flatnonzero(found.bin_count).tolist() == [8, 9, 14]


@pytest.mark.full_size
@given(images=st.integers(1, 60), classes=st.integers(2, 12), seed=st.integers(0, 10**6), bins=st.integers(1, 30))
def test_numbers_agree_with_scikit_learn_and_a_plain_loop(images: int, classes: int, seed: int, bins: int) -> None:
    rows, labels = draw_probabilities(images, classes, seed)
    found = calibration(answers(rows, labels), bins)
    every = list(range(classes))
    brier = sklearn.metrics.brier_score_loss(labels, rows, labels=every, scale_by_half=False)
    assert found.brier == pytest.approx(brier, rel=1e-4, abs=1e-6)
    assert found.nll == pytest.approx(sklearn.metrics.log_loss(labels, rows, labels=every), rel=1e-5)
    sure, right = rows.max(1), rows.argmax(1) == labels
    expected = 0.0
    for number in range(bins):
        inside = (sure > number / bins) & (sure <= (number + 1) / bins)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
        assert found.bin_count[number] == inside.sum()
    assert found.ece == pytest.approx(expected, abs=1e-6)
    assert found.count == images


def test_images_without_a_known_class_count_for_nothing() -> None:
    rows, labels = draw_probabilities(30, 4, 0)
    labels[5:12] = -1
    known = labels >= 0
    found, expected = calibration(answers(rows, labels)), calibration(answers(rows[known], labels[known]))
    assert (found.ece, found.brier, found.nll, found.count) == (expected.ece, expected.brier, expected.nll, 23)


def test_an_answer_that_is_not_finite_makes_no_number() -> None:
    found = calibration(answers(np.array([[0.5, 0.5], [np.nan, 0.5]]), [0, 0]))
    assert np.isnan([found.ece, found.brier, found.nll, found.confidence]).all()
    assert found.count == 2


def test_fewer_than_one_bin_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 bin, not 0"):
        calibration(answers(two(0.5), [0]), 0)


@pytest.fixture(scope="module")
def some() -> Calibration:
    return calibration(answers(*draw_probabilities(200, 5, 1)))


def test_bins_as_a_table(some: Calibration, tmp_path: Path) -> None:
    write_bins(tmp_path / "bins.csv", some)
    with open(tmp_path / "bins.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15 and sum(int(row["images"]) for row in rows) == 200
    gaps = [int(r["images"]) * abs(float(r["accuracy"]) - float(r["confidence"])) for r in rows if int(r["images"])]
    assert sum(gaps) / 200 == pytest.approx(some.ece, abs=1e-5)
    assert {row["accuracy"] for row in rows if row["images"] == "0"} == {""}


def test_the_diagram_shows_the_bins(some: Calibration, tmp_path: Path) -> None:
    figure = Figure()
    plot(figure, some)
    upper, lower = figure.axes
    filled = some.bin_count > 0
    bars = upper.containers[0]
    np.testing.assert_allclose([bar.get_x() for bar in bars], some.edges[:-1][filled])
    np.testing.assert_allclose([bar.get_height() for bar in bars], some.bin_accuracy[filled])
    strokes = np.array(upper.collections[0].get_segments())
    np.testing.assert_allclose(strokes[:, :, 1].T, [some.bin_confidence[filled]] * 2)
    assert sum(bar.get_height() for bar in lower.containers[0]) == pytest.approx(1)
    assert f"{some.ece:.2%}" in upper.get_title()
    draw_reliability(some, tmp_path / "reliability.png")
    with Image.open(tmp_path / "reliability.png") as image:
        assert image.size == (691, 691)
