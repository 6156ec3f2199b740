"""The solver of the linear probe finds the optimum that scikit-learn's LogisticRegression finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from vitrail.evaluation.softmax import Images, Solution, solve

Problem = tuple[np.ndarray, np.ndarray]


def clouds(images: int, width: int, classes: int, *, seed: int = 0, noise: float = 1.0) -> Problem:
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    x = rng.normal(size=(classes, width))[labels] + noise * rng.normal(size=(images, width))
    return (3 * x + 7).astype(np.float32), labels


def ill_conditioned() -> Problem:
    """Features whose variances along the principal directions span ten powers of ten."""
    x, labels = clouds(400, 30, 5, noise=3.0)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(30, 30)))[0]
    return ((x - 7) @ (rotation * np.logspace(0, -5, 30)) @ rotation.T).astype(np.float32), labels


def duplicated() -> Problem:
    """Three copies of each feature and two constants, one of them 0."""
    x, labels = clouds(300, 10, 4, noise=2.0)
    return np.hstack([x, x, 100 * x, np.full((300, 1), 0.1), np.zeros((300, 1))]).astype(np.float32), labels


def imbalanced() -> Problem:
    x, _ = clouds(600, 12, 3, noise=2.0)
    labels = np.repeat([0, 1, 2], [580, 17, 3])
    x[labels == 1] += 2.0
    return x, labels


def few() -> Problem:
    """Fewer images than features, with duplicates of images and features."""
    x, labels = clouds(24, 40, 3, noise=3.0)
    return np.hstack([x, x])[[*range(24), 0, 3, 5]], labels[[*range(24), 0, 3, 5]]


def far() -> Problem:
    """Features whose mean is ten thousand times their deviation."""
    x, labels = clouds(200, 8, 3, noise=2.0)
    return x + np.float32(50_000), labels


PROBLEMS: dict[str, Any] = {
    "clouds": lambda: clouds(300, 20, 6, noise=2.0),
    "two classes": lambda: clouds(200, 9, 2, noise=3.0),
    "separable": lambda: clouds(120, 30, 4, noise=0.1),
    **{make.__name__: make for make in (ill_conditioned, duplicated, imbalanced, few, far)},
}
STRENGTHS = (1.0, 1e-2, 1e-4)


def standard(x: np.ndarray) -> np.ndarray:
    return StandardScaler().fit_transform(x.astype(np.float64))


def value(problem: Problem, logits: np.ndarray, weight: np.ndarray, l2: float) -> float:
    """Return the objective in float64: mean cross-entropy and penalty."""
    return log_loss(problem[1], special.softmax(logits, axis=1)) + l2 / 2 * float(np.square(weight).sum())


def optimum(problem: Problem, l2: float, **how: Any) -> tuple[np.ndarray, float]:
    """Return scikit-learn's logits, centred, and objective.

    For two classes it has one vector of weights, the difference of two opposite ones with half the penalty.
    """
    x, labels = problem
    two = labels.max() == 1
    peer = LogisticRegression(C=(2 if two else 1) / (len(x) * l2), max_iter=10_000, **how).fit(standard(x), labels)
    logits, weight = peer.decision_function(standard(x)), peer.coef_
    if two:
        logits, weight = np.stack([-logits / 2, logits / 2], axis=1), np.vstack([-weight / 2, weight / 2])
    return logits - logits.mean(axis=1, keepdims=True), value(problem, logits, weight, l2)


def ours(problem: Problem, **how: Any) -> list[tuple[Solution, np.ndarray, float]]:
    """Return each solution with its logits, centred, and its objective in float64."""
    x, labels = problem
    found = []
    for one in solve(x, labels, np.arange(len(x)), STRENGTHS, classes=int(labels.max()) + 1, **how):
        weight, bias, mean = (
            part.double().numpy() for part in (one.classifier.weight, one.classifier.bias, one.classifier.mean)
        )
        logits = (x - mean) @ weight.T + bias
        logits -= logits.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(
            one.classifier.logits(torch.from_numpy(x)).double(), (x - mean) @ weight.T + bias, atol=2e-3
        )
        found.append(
            (one, logits, value(problem, logits, weight * StandardScaler().fit(x.astype(float)).scale_, one.l2))
        )
    assert [one.l2 for one, _, _ in found] == sorted(STRENGTHS, reverse=True)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_optimum_is_scikit_learns(name: str) -> None:
    problem = PROBLEMS[name]()
    for one, logits, objective in ours(problem, tolerance=1e-7):
        expected, best = optimum(problem, one.l2, solver="newton-cholesky", tol=1e-10)
        np.testing.assert_allclose(special.softmax(logits, axis=1), special.softmax(expected, axis=1), atol=2e-4)
        assert objective == pytest.approx(best, abs=1e-7) and one.objective == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_default_tolerance_comes_as_near_as_scikit_learns_default(name: str) -> None:
    problem = PROBLEMS[name]()
    for one, _, objective in ours(problem):
        _, best = optimum(problem, one.l2, solver="newton-cholesky", tol=1e-10)
        _, usual = optimum(problem, one.l2)
        assert one.converged and objective - best < max(2 * (usual - best), 1e-4), (
            one.l2,
            objective - best,
            usual - best,
        )


def test_ill_conditioned_features_need_few_iterations() -> None:
    problem = clouds(400, 30, 5, noise=3.0)
    problem = ((problem[0] - 7) @ np.random.default_rng(1).normal(size=(30, 30)).astype(np.float32), problem[1])
    (peer,) = LogisticRegression(C=1 / (400 * 1e-4)).fit(standard(problem[0]), problem[1]).n_iter_
    assert max(one.iterations for one, _, _ in ours(problem)) < peer / 2


def test_rows_are_the_only_images_that_count() -> None:
    """Held-out rows have no say, and a start elsewhere ends at the same optimum."""
    for width in (10, 60):
        x, labels = clouds(80, width, 4, noise=2.0)
        rows = np.random.default_rng(0).permutation(80)[:50]
        how: dict[str, Any] = dict(classes=4, tolerance=1e-6)
        (alone,) = solve(x[rows], labels[rows], np.arange(50), [0.01], **how)
        spoilt = x.copy()
        spoilt[np.setdiff1d(np.arange(80), rows)] = 1e6
        (start,) = solve(x, labels, np.arange(80), [0.1], **how)
        for begin in (None, start.classifier):
            (among,) = solve(spoilt, labels, rows, [0.01], start=begin, **how)
            asked = torch.from_numpy(x)
            torch.testing.assert_close(
                among.classifier.logits(asked).softmax(1),
                alone.classifier.logits(asked).softmax(1),
                rtol=1e-3,
                atol=1e-4,
            )


def test_a_near_start_takes_fewer_iterations() -> None:
    x, labels = clouds(300, 20, 5, noise=2.0)
    how: dict[str, Any] = dict(classes=5)
    (first,) = solve(x, labels, np.arange(270), [1e-4], **how)
    (cold,) = solve(x, labels, np.arange(300), [1e-4], **how)
    (warm,) = solve(x, labels, np.arange(300), [1e-4], start=first.classifier, **how)
    assert warm.iterations < cold.iterations


def test_too_few_iterations_have_not_converged() -> None:
    x, labels = clouds(300, 20, 5, noise=2.0)
    (found,) = solve(x, labels, np.arange(300), [1e-4], classes=5, iterations=3)
    assert found.iterations == 3 and not found.converged


@pytest.mark.parametrize("images", [8, 40])
def test_constant_features_give_the_shares_of_the_classes(images: int) -> None:
    x, labels = np.full((images, 20), 3.0, np.float32), np.arange(images) // (3 * images // 4)
    (found,) = solve(x, labels, np.arange(images), [0.01], classes=2, tolerance=1e-6)
    shares = found.classifier.logits(torch.from_numpy(x[:1])).softmax(1)[0]
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.25]), rtol=1e-4, atol=1e-5)


def test_a_class_without_training_images_is_unlikely() -> None:
    x, labels = clouds(90, 5, 3)
    (found,) = solve(x, labels, np.arange(90), [0.01], classes=4)
    logits = found.classifier.logits(torch.from_numpy(x))
    assert logits.isfinite().all() and logits.softmax(1)[:, 3].mean() < 1e-2


def test_features_are_not_copied_unless_their_images_are_few() -> None:
    x, labels = clouds(200, 100, 4)
    images = Images.of(x, labels, np.arange(180), 4, torch.device("cpu"))
    assert images.features.data_ptr() == torch.from_numpy(x).data_ptr()
    few = Images.of(x, labels, np.arange(20), 4, torch.device("cpu"))
    assert few.features.shape == (20, 19)  # centring takes one direction
