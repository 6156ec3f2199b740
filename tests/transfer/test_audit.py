from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression

from vitrail.errors import DataError, UsageError
from vitrail.transfer.audit import ABLE, folds_of, out_of_fold, outliers, surest, suspects


def clusters(per_class: int, classes: int = 4, width: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    centres = 3 * random.normal(size=(classes, width))
    return (centres[labels] + random.normal(size=(len(labels), width))).astype(np.float32), labels


def test_folds_hold_each_class_in_equal_parts() -> None:
    labels = np.repeat([0, 1, 2], [50, 7, 1])
    fold = folds_of(labels, 5, seed=3)
    assert np.bincount(fold[labels == 0]).tolist() == [10] * 5
    assert sorted(np.bincount(fold[labels == 1], minlength=5).tolist()) == [1, 1, 1, 2, 2]
    np.testing.assert_array_equal(fold, folds_of(labels, 5, seed=3))
    assert (fold != folds_of(labels, 5, seed=4)).any()
    with pytest.raises(DataError, match="two classes"):
        folds_of(np.array([0, 0, 1]), 2, seed=0)


def test_probabilities_are_scikit_learns_without_the_image() -> None:
    features, labels = clusters(15)
    fold = folds_of(labels, 3, seed=1)
    found = out_of_fold(features, labels, 4, fold, strengths=[0.1])
    for number in range(3):
        rows = fold != number
        mean, deviation = features[rows].mean(axis=0), features[rows].std(axis=0)
        scaled = (features - mean) / deviation
        theirs = LogisticRegression(C=1 / (0.1 * rows.sum()), tol=1e-6, max_iter=1000).fit(scaled[rows], labels[rows])
        np.testing.assert_allclose(found[~rows], theirs.predict_proba(scaled[~rows]), atol=2e-3)
    with pytest.raises(UsageError, match="folds is 1"):
        folds_of(labels, 1)


def test_the_likelihood_chooses_temperature_and_share_of_wrong_labels() -> None:
    """Labels are drawn from known probabilities; then one in ten is replaced by another class."""
    random = np.random.default_rng(0)
    true = softmax(3 * random.normal(size=(4000, 5)), axis=1)
    right = (true.cumsum(axis=1) > random.random((4000, 1))).argmax(axis=1)
    flipped = random.random(4000) < 0.1
    labels = np.where(flipped, (right + random.integers(1, 5, 4000)) % 5, right)
    sharper = softmax(2 * np.log(true), axis=1).astype(np.float32)  # a probe that is too sure
    for probabilities in (true, sharper):
        found = suspects(probabilities, labels)
        posterior = 0.1 / 4 * (1 - true) / (0.9 * true + 0.1 / 4 * (1 - true))  # of Bayes, with the true share
        expected = posterior[np.arange(4000), labels]
        np.testing.assert_allclose(found.wrong, expected[found.rows], atol=0.12)
        assert abs(found.wrong.sum() - flipped[found.rows].sum()) < 0.15 * flipped[found.rows].sum()
        assert (np.diff(found.wrong) <= 0).all() and found.wrong.min() >= 1 / 3
        assert (found.suggested != labels[found.rows]).all()


def test_a_weak_probe_lists_nothing_if_all_labels_are_right() -> None:
    random = np.random.default_rng(0)
    true = softmax(random.normal(size=(4000, 5)), axis=1)  # the best class is right for less than half of the images
    labels = (true.cumsum(axis=1) > random.random((4000, 1))).argmax(axis=1)
    assert (true.argmax(axis=1) == labels).mean() < 0.6
    assert len(suspects(true, labels).rows) < 10


def test_a_probe_that_is_often_wrong_where_it_is_sure_lists_nothing() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, 4000)
    probabilities = softmax(3 * random.normal(size=(4000, 5)) + np.eye(5)[labels], axis=1)  # sure of its own noise
    assert surest(probabilities, labels) < ABLE and not len(suspects(probabilities, labels).rows)
    rows = np.argsort(-probabilities.max(axis=1))[:800]
    assert surest(probabilities, labels) == pytest.approx((probabilities.argmax(axis=1) == labels)[rows].mean())


def test_flipped_labels_are_found() -> None:
    features, labels = clusters(60, width=16)
    random = np.random.default_rng(5)
    flipped = random.permutation(len(labels))[:12]
    given = labels.copy()
    given[flipped] = (labels[flipped] + random.integers(1, 4, 12)) % 4
    found = suspects(out_of_fold(features, given, 4, folds_of(given)), given)
    assert len(set(found.rows) & set(flipped)) >= 10 and len(found.rows) <= 12
    right = {row: label for row, label in zip(found.rows.tolist(), found.suggested.tolist(), strict=True)}
    assert all(right[row] == labels[row] for row in set(right) & set(flipped.tolist()))


def test_an_image_like_no_other_is_an_outlier() -> None:
    features, _ = clusters(20, classes=1)
    far = np.concatenate([features, -features.mean(axis=0, keepdims=True)])
    rows, nearest, similarity = outliers(far)
    assert rows.tolist()[0] == 20 and similarity[20] == similarity.min() and (nearest != np.arange(21)).all()
    unit = far / np.linalg.norm(far, axis=1, keepdims=True)
    cosine = np.sort(unit @ unit[3])[::-1]
    assert similarity[3] == pytest.approx(cosine[1:11].mean(), abs=1e-5)
