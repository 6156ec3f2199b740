from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import Features
from vitrail.evaluation.linear_probe import held_out, linear_probe, score_classifier
from vitrail.evaluation.softmax import Classifier, solve

STRENGTHS = (1.0, 0.1, 1e-3)


def features(images: int = 60, width: int = 6, classes: int = 3, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(images) % classes)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    x = (centres[labels] + rng.normal(size=(images, width))) * 3 + 7
    return Features(x.astype(np.float32), labels, np.arange(images), [str(name) for name in range(classes)])


def solved(data: Features, l2: float, rows: np.ndarray | None = None) -> Classifier:
    rows = np.arange(len(data)) if rows is None else rows
    (found,) = solve(data.features, data.labels, rows, [l2], classes=len(data.class_names))
    return found.classifier


def test_measures_are_scikit_learns() -> None:
    train, test = features(classes=8, images=80), features(classes=8, images=70, seed=1)
    for l2 in STRENGTHS:
        classifier = solved(train, l2)
        shares = classifier.logits(torch.from_numpy(test.features)).double().softmax(dim=1).numpy()
        top1, top5, nll = score_classifier(classifier, test.features, test.labels, np.arange(70))
        assert top1 == pytest.approx(sklearn.metrics.accuracy_score(test.labels, shares.argmax(1)))
        assert top5 == pytest.approx(sklearn.metrics.top_k_accuracy_score(test.labels, shares, k=5, labels=range(8)))
        assert nll == pytest.approx(sklearn.metrics.log_loss(test.labels, shares, labels=range(8)), rel=1e-5)


def test_the_result_is_scikit_learns() -> None:
    """The held-out choice among the strengths, and the test of the best one, by scikit-learn alone."""
    train, test = features(images=200, width=12, classes=5), features(images=300, width=12, classes=5, seed=1)
    found = linear_probe(train, test, l2=STRENGTHS, seed=3)
    kept, held = held_out(train.labels, 3)
    for one in found.settings:
        peer = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (len(kept) * one.l2), tol=1e-8, max_iter=1000))
        shares = peer.fit(train.features[kept], train.labels[kept]).predict_proba(train.features[held])
        assert one.top1 == pytest.approx((shares.argmax(1) == train.labels[held]).mean())
        assert one.nll == pytest.approx(sklearn.metrics.log_loss(train.labels[held], shares), abs=2e-3)
    peer = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (200 * found.chosen.l2), tol=1e-8, max_iter=1000))
    shares = peer.fit(train.features, train.labels).predict_proba(test.features)
    assert found.nll == pytest.approx(sklearn.metrics.log_loss(test.labels, shares), abs=2e-3)
    assert found.top1 == pytest.approx((shares.argmax(1) == test.labels).mean(), abs=1.5 / 300)


def test_the_best_on_held_out_images_is_chosen_and_solved_again_on_all() -> None:
    train, test = features(images=100), features(images=60, seed=1)
    found = linear_probe(train, test, l2=STRENGTHS, seed=3)
    assert [one.l2 for one in found.settings] == sorted(STRENGTHS, reverse=True)
    kept, held = held_out(train.labels, 3)
    for one in found.settings:
        top1, _, nll = score_classifier(solved(train, one.l2, kept), train.features, train.labels, held)
        assert (one.top1, one.nll, one.converged) == (pytest.approx(top1), pytest.approx(nll, abs=2e-3), True)
    assert found.chosen.top1 == max(one.top1 for one in found.settings)
    assert found.chosen.nll == min(one.nll for one in found.settings if one.top1 == found.chosen.top1)
    top1, top5, nll = score_classifier(solved(train, found.chosen.l2), test.features, test.labels, np.arange(60))
    assert (found.top1, found.top5, found.nll) == (pytest.approx(top1), top5, pytest.approx(nll, abs=2e-3))
    assert len(kept) + found.held_out_images == found.train_images == 100 and found.converged


def test_the_test_images_have_no_say_and_the_seed_decides() -> None:
    train, test = features(images=100), features(images=60, seed=1)
    first = linear_probe(train, test, l2=STRENGTHS)
    wrong = replace(test, labels=(test.labels + 1) % 3)
    other = linear_probe(train, wrong, l2=STRENGTHS)
    assert (other.settings, other.chosen) == (first.settings, first.chosen) and other.top1 < first.top1
    assert linear_probe(train, test, l2=STRENGTHS) == first
    assert linear_probe(train, test, l2=STRENGTHS, seed=1).settings != first.settings


def test_a_choice_at_the_end_of_the_grid_is_told() -> None:
    train, test = features(images=200), features(images=60, seed=1)
    assert linear_probe(train, test, l2=(1e4, 1e3)).grid_end == "smallest"
    assert linear_probe(train, test, l2=(1e3,)).grid_end is None
    noise = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    chance = replace(train, features=noise, labels=np.arange(200) % 5 // 4)  # four in five are of class 0
    asked = replace(test, features=noise[:60], labels=np.zeros(60, np.int64))
    found = linear_probe(chance, asked, l2=(1e-6, 1e-3, 100.0))
    assert found.chosen.l2 == 100 and found.grid_end == "largest"
    some = replace(train, features=np.hstack([train.features, noise[:, :100]]))
    many = replace(test, features=np.hstack([test.features, noise[:60, :100]]))
    found = linear_probe(some, many, l2=(1e-9, 0.3, 1e4))
    assert found.chosen.l2 == 0.3 and found.grid_end is None


def test_a_solver_that_stops_early_says_so() -> None:
    train, test = features(images=100), features(images=60, seed=1)
    found = linear_probe(train, test, l2=STRENGTHS, iterations=1)
    assert not found.converged and not any(one.converged for one in found.settings)


def test_a_tenth_of_each_class_is_held_out() -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 20, 2, 1])
    kept, held = held_out(labels, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(123))
    np.testing.assert_array_equal(np.bincount(labels[held], minlength=4), [10, 2, 1, 0])
    assert not np.array_equal(held, held_out(labels, 1)[1])
    with pytest.raises(DataError, match="no class has two training images"):
        held_out(np.arange(5), 0)


def test_a_constant_feature_does_no_harm() -> None:
    train, test = features(), features(seed=1)
    wide = [
        Features(np.hstack([f.features, np.full((len(f), 1), 0.1, np.float32)]), f.labels, f.index, f.class_names)
        for f in (train, test)
    ]
    found = linear_probe(*wide, l2=(0.1,))
    assert found.top1 == pytest.approx(linear_probe(train, test, l2=(0.1,)).top1)
    assert found.top1 > 0.5


@pytest.mark.parametrize("more", [dict(l2=()), dict(l2=(0.0,)), dict(l2=(0.1, -1.0)), dict(iterations=0)])
def test_settings_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="at least one strength, each above 0"):
        linear_probe(features(), features(seed=1), **more)


def test_features_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="training images have 6 features and test images 7"):
        linear_probe(features(), features(width=7))
