"""Temperature scaling and rejection: against scipy, scikit-learn and numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, logit, softmax
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitrail.evaluation import confidence
from vitrail.evaluation.calibration import before_scaling, calibration
from vitrail.evaluation.classify import classify
from vitrail.evaluation.confidence import (
    KeptLogits,
    at_temperature,
    counts_at,
    fit_if_better,
    fit_temperature,
    risk_coverage_curve,
)
from vitrail.evaluation.label_scores import score_labels
from vitrail.tasks.catalog import load_results, save_results
from vitrail.weights.confidence import Confidence


class Rows:
    """A loader whose "images" are the logits themselves, in batches of seven, the last images first."""

    def __init__(self, logits: np.ndarray, labels: np.ndarray) -> None:
        self.logits, self.labels = torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)
        self.bad: list[tuple[str, str]] = []

    def epoch(self, epoch: int) -> Any:
        for index in torch.arange(len(self.labels)).flip(0).split(7):
            yield type("Batch", (), {"images": self.logits[index], "labels": self.labels[index], "index": index})


def same(images: Tensor) -> Tensor:
    return images


def scores(images: int = 300, classes: int = 6, sure: float = 3.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [images, classes] that are `sure` times as large as those that the labels are drawn from."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(images, classes))
    labels = [rng.choice(classes, p=softmax(row)) for row in logits]
    return (sure * logits).astype(np.float32), np.array(labels)


def by_scipy(loss: Any) -> float:
    """The temperature with the lowest loss, by Brent's method on its logarithm."""
    return float(np.exp(minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9}).x))


@pytest.mark.parametrize("sure", [0.2, 1.0, 7.0])
def test_the_temperature_is_that_of_scipy(sure: float) -> None:
    logits, labels = scores(sure=sure)

    def loss(log: float) -> float:
        return float(-log_softmax(logits.astype(np.float64) / np.exp(log), axis=1)[range(300), labels].mean())

    found = fit_temperature(logits, labels)
    assert found == pytest.approx(by_scipy(loss), rel=1e-5)
    assert found == pytest.approx(sure, rel=0.2)  # what the labels were drawn with


def test_the_temperature_of_several_labels_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(200, 5)) - 1
    labels = (rng.random((200, 5)) < expit(logits)).astype(np.int8)
    shown = (4 * logits).astype(np.float32)

    def loss(log: float) -> float:
        z = shown.astype(np.float64) / np.exp(log)
        return float((np.logaddexp(0, z) - labels * z).mean())

    assert fit_temperature(shown, labels) == pytest.approx(by_scipy(loss), rel=1e-5)


def test_the_temperature_is_that_of_scikit_learn_on_real_digits() -> None:
    images, labels = load_digits(return_X_y=True)
    network = LogisticRegression(C=100, max_iter=200).fit(images[:300], labels[:300])
    theirs = CalibratedClassifierCV(FrozenEstimator(network), method="temperature", ensemble=False)
    theirs.fit(images[300:1000], labels[300:1000])
    found = fit_temperature(network.decision_function(images[300:1000]).astype(np.float32), labels[300:1000])
    assert found is not None and found > 1.5  # a regression on few images is too sure
    ours = softmax(network.decision_function(images[1000:]) / found, axis=1)
    np.testing.assert_allclose(ours, theirs.predict_proba(images[1000:]), atol=2e-4)


def loss(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """Mean cross-entropy in nats."""
    return float(-log_softmax(logits / temperature, axis=1)[range(len(labels)), labels].mean())


@pytest.mark.full_size
def test_a_temperature_that_follows_the_accidents_of_few_images_is_not_used() -> None:
    others, truth = scores(images=20_000, sure=1.0, seed=1000)
    harm = []
    for seed in range(20):
        logits, labels = scores(images=40, sure=1.0, seed=seed)
        fitted, used = fit_temperature(logits, labels), fit_if_better(logits, labels)
        assert fitted is not None and used in (None, fitted)
        assert loss(others, truth, used or 1.0) <= loss(others, truth, fitted)
        harm.append((used is None, loss(others, truth, fitted) - loss(others, truth, 1.0)))
    assert sum(unused for unused, _ in harm) >= 14  # a likelihood ratio above 2 has a probability of 16 %
    assert np.mean([worse for unused, worse in harm if unused]) > 0


@pytest.mark.full_size
@pytest.mark.parametrize("sure", [0.3, 3.0])
def test_a_temperature_that_helps_other_images_is_used(sure: float) -> None:
    others, truth = scores(images=20_000, sure=sure, seed=1000)
    for seed in range(10):
        logits, labels = scores(images=65, sure=sure, seed=seed)
        used = fit_if_better(logits, labels)
        assert used is not None and used == fit_temperature(logits, labels)
        assert loss(others, truth, used) < loss(others, truth, 1.0)


def test_a_temperature_that_makes_the_calibration_error_larger_is_not_used() -> None:
    """The network is calibrated for two thirds of the images, and too sure of the others: the loss asks for more."""
    rng = np.random.default_rng(0)
    sure = np.repeat([0.93, 0.93, 0.99], 300)
    right = np.concatenate([np.tile(np.arange(300) % 100 < 93, 2), np.arange(300) % 100 < 93])
    labels = np.where(right, 0, 1)
    logits = np.stack([logit(sure), np.zeros(900)], axis=1).astype(np.float32)
    order = rng.permutation(900)
    temperature = fit_temperature(logits[order], labels[order])
    assert temperature is not None and temperature > 1
    before, after = (calibration_error(logits, labels, one) for one in (1.0, temperature))
    assert loss(logits, labels, temperature) < loss(logits, labels, 1.0) - 1 / 900 and after > before
    assert fit_if_better(logits[order], labels[order]) is None


def calibration_error(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """The two kinds of images lie in two bins: the mean of |accuracy - confidence|, weighted by their images."""
    share = softmax(logits / temperature, axis=1)[:, 0]
    kinds = [share == value for value in np.unique(share)]
    return float(sum(abs((labels[kind] == 0).mean() - share[kind].mean()) * kind.mean() for kind in kinds))


def test_several_labels_decide_in_the_same_way() -> None:
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(40, 5))
    labels = (rng.random((40, 5)) < expit(logits)).astype(np.int8)
    assert fit_if_better(logits.astype(np.float32), labels) is None
    sure = (4 * logits).astype(np.float32)
    assert fit_if_better(sure, labels) == fit_temperature(sure, labels)


def test_a_temperature_of_1_has_its_reason() -> None:
    text = str(Confidence(temperature=1.0, images=65, ece_before=0.0127, ece=0.0127))
    assert text == (
        "temperature 1, because no other one makes both the loss and the calibration error of 65 validation images "
        "smaller; calibration error 1.27%"
    )


def test_without_an_optimum_there_is_no_temperature() -> None:
    logits, labels = scores()
    right = np.eye(6, dtype=np.float32)[labels]
    assert fit_temperature(right, labels) is None  # always right: the surer, the better
    assert fit_temperature(-right, labels) is None  # always wrong
    assert fit_temperature(np.zeros_like(logits), labels) is None
    assert fit_temperature(np.where(labels[:, None] == 2, np.nan, logits), labels) is None
    assert fit_temperature(logits, np.full(300, -1)) is None
    assert fit_temperature(logits[:0], labels[:0]) is None


def test_images_without_a_label_do_not_count() -> None:
    logits, labels = scores()
    some = np.where(np.arange(300) % 3 == 0, -1, labels)
    assert fit_temperature(logits, some) == pytest.approx(
        fit_temperature(logits[some >= 0], labels[some >= 0]), rel=1e-9
    )


def test_kept_logits_are_those_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = scores()
    asked: list[int] = []

    def network(images: torch.Tensor) -> torch.Tensor:
        asked.append(len(images))
        return same(images)

    kept = KeptLogits(network, Rows(logits, labels), 300)
    found = classify(kept, kept, list("abcdef"))
    assert (
        fit_if_better(*kept.rows()) == pytest.approx(fit_temperature(logits, labels), rel=1e-9) and found.count == 300
    )
    # another pass gives the same without the network
    again = classify(*kept.again(), list("abcdef"), temperature=2.0)
    assert sum(asked) == 300
    expected = classify(same, Rows(logits, labels), list("abcdef"), temperature=2.0)
    for name in ("index", "label", "top", "probability", "loss"):
        np.testing.assert_array_equal(getattr(again, name), getattr(expected, name))
    # of more logits than are kept, those of evenly spaced images
    monkeypatch.setattr(confidence, "LOGITS", 6 * 100)
    kept = KeptLogits(network, Rows(logits, labels), 300)
    classify(kept, kept, list("abcdef"))
    assert classify(*kept.again(), list("abcdef")).count == 300 and sum(asked) == 3 * 300
    assert fit_if_better(*kept.rows()) == pytest.approx(fit_temperature(logits[::3], labels[::3]), rel=1e-9)


def test_an_evaluation_knows_its_calibration_before_and_after(tmp_path: Path) -> None:
    logits, labels = scores(sure=4.0)
    raw = classify(same, Rows(logits, labels), list("abcdef"))
    found = classify(same, Rows(logits, labels), list("abcdef"), temperature=4.0)
    np.testing.assert_array_equal(found.top, raw.top)
    np.testing.assert_allclose(found.probability, -np.sort(-softmax(logits / 4.0, axis=1))[:, :5], rtol=1e-5)
    assert found.nll == pytest.approx(-log_softmax(logits / 4.0, axis=1)[range(300), labels].mean(), rel=1e-5)
    assert before_scaling(found).ece == pytest.approx(calibration(raw).ece, rel=1e-6)
    assert calibration(found).ece < before_scaling(found).ece
    save_results(tmp_path / "a.npz", found)
    again = load_results(tmp_path / "a.npz", list("abcdef"))
    assert before_scaling(again).ece == before_scaling(found).ece


def test_labels_know_their_probabilities_before(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logits, labels = 5 * rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, (40, 3)).astype(np.int8)
    found = score_labels(same, Rows(logits, labels), list("abc"), [0.5] * 3, temperature=2.5)
    np.testing.assert_allclose(found.probability, expit(logits / 2.5), rtol=1e-5)
    np.testing.assert_allclose(found.uncalibrated, expit(logits), rtol=1e-4)
    save_results(tmp_path / "a.npz", found)
    again = load_results(tmp_path / "a.npz", list("abc"))
    np.testing.assert_array_equal(again.uncalibrated, found.uncalibrated)  # type: ignore[union-attr]


def test_probabilities_at_another_temperature() -> None:
    p = np.array([0.0, 1e-30, 0.2, 0.5, 1.0])
    np.testing.assert_allclose(at_temperature(p, 2.0), [0, 1e-15, 1 / 3, 0.5, 1], rtol=1e-12)  # odds 1/4 become 1/2


def test_coverage_and_risk_worked_by_hand() -> None:
    rows = np.log([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4], [0.2, 0.8], [0.55, 0.45]])
    found = classify(same, Rows(rows, np.array([0, 1, 0, 0, -1])), ["a", "b"])
    # of four images with a class: 0.9 right, 0.8 wrong, 0.6 wrong and right
    assert counts_at(found, [0.0, 0.6, 0.61, 0.85, 0.95]) == ((4, 4, 2, 1, 0), (2, 2, 1, 0, 0))
    coverage, risk = risk_coverage_curve(found)
    np.testing.assert_allclose(coverage, [0.25, 0.5, 1.0])
    np.testing.assert_allclose(risk, [0.0, 0.5, 0.5])
