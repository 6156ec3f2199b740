"""Which images to label next: uncertainty by hand, farthest-first by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.transfer.next_images import Coverage, choose_images, least_sure, uncertainty


def test_uncertainty_is_one_minus_the_margin() -> None:
    probabilities = np.array([[0.5, 0.5, 0.0], [0.2, 0.7, 0.1], [1.0, 0.0, 0.0]])
    assert uncertainty(probabilities) == pytest.approx([1.0, 0.5, 0.0])
    assert uncertainty(np.ones((2, 1))).tolist() == [0, 0]  # a single class is certain


def test_uncertainty_of_several_labels_is_that_of_the_label_nearest_to_its_threshold() -> None:
    probabilities = np.array([[0.9, 0.31], [0.9, 0.1], [0.5, 0.9]])
    assert uncertainty(probabilities, [0.5, 0.3]) == pytest.approx([0.99, 0.8, 1.0])


def test_candidates_are_the_least_sure_and_ties_keep_their_order() -> None:
    unsure = np.array([0.1, 0.9, 0.5, 0.9, 0.2])
    assert least_sure(unsure, 2, "uncertainty").tolist() == [1, 3]
    assert least_sure(unsure, 1, "both", width=3).tolist() == [1, 3, 2]
    assert least_sure(unsure, 9, "both").tolist() == [1, 3, 2, 4, 0]
    assert sorted(least_sure(unsure, 1, "coverage").tolist()) == [0, 1, 2, 3, 4]


def test_farthest_first_agrees_with_brute_force() -> None:
    rng = np.random.default_rng(0)
    features, labelled = rng.normal(size=(30, 5)).astype(np.float32), rng.normal(size=(7, 5)).astype(np.float32)
    coverage = Coverage(features)
    coverage.cover(labelled[:4])
    coverage.cover(labelled[4:])
    chosen, similarity = coverage.farthest(8)
    covered = [*labelled]
    for row, near in zip(chosen.tolist(), similarity.tolist(), strict=True):
        angles = [
            max(float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) for other in covered)
            for one in features
        ]
        assert near == pytest.approx(min(angles), abs=1e-5)
        assert angles[row] == pytest.approx(min(angles), abs=1e-5)
        covered.append(features[row])
    assert len(set(chosen.tolist())) == 8
    assert sorted(Coverage(features).farthest(99)[0].tolist()) == list(range(30))  # each image once, and no more


def test_copies_of_labelled_images_come_last() -> None:
    features = np.eye(4, dtype=np.float32)
    rows, similarity = choose_images(
        np.array([0.4, 0.9, 0.8, 0.7]), 3, "both", lambda rows: features[rows], lambda one: one.cover(features[1:2])
    )
    assert rows.tolist() == [2, 3, 0]
    assert similarity.tolist() == [0, 0, 0]


def test_without_labelled_images_the_least_sure_is_first() -> None:
    rows, similarity = choose_images(
        np.array([0.1, 0.9, 0.5]), 2, "both", lambda rows: np.eye(3, dtype=np.float32)[rows], lambda one: None
    )
    assert (rows.tolist(), similarity.tolist()) == ([1, 2], [-np.inf, 0])


def test_uncertainty_alone_computes_no_features() -> None:
    def refuse(*_: object) -> np.ndarray:
        raise AssertionError

    rows, similarity = choose_images(np.array([0.1, 0.9, 0.5]), 2, "uncertainty", refuse, refuse)
    assert rows.tolist() == [1, 2]
    assert np.isnan(similarity).all()
