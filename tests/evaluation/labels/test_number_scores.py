"""Measures of numbers agree with scikit-learn's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics

from vitrail.data.labels.numbers import TargetScale
from vitrail.data.loading.loader import Batch
from vitrail.errors import DataError
from vitrail.evaluation.metric import Metric
from vitrail.evaluation.number_scores import NumberScores, score_numbers
from vitrail.tasks.catalog import load_results, save_results

SCALE = TargetScale((3.0, -200.0), (2.0, 50.0))


class Batches:
    """Batches whose images are outputs; images arrive in another order, and one of them twice."""

    bad: list[Any]

    def __init__(self, outputs: np.ndarray, target: np.ndarray, order: np.ndarray) -> None:
        self.outputs, self.target, self.order = torch.from_numpy(outputs), torch.from_numpy(target), order
        self.bad = [("lost.png", "corrupt")]

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for rows in np.array_split(self.order, 3):
            yield Batch(self.outputs[rows], self.target[rows], torch.from_numpy(rows))


def case() -> tuple[NumberScores, np.ndarray, np.ndarray]:
    """(results, true and predicted numbers of the images that count)."""
    rng = np.random.default_rng(0)
    target = rng.normal(size=(40, 2)) * [2, 50] + [3, -200]
    target[7] = np.nan
    outputs = ((np.nan_to_num(target) - [3, -200]) / [2, 50] + rng.normal(size=(40, 2)) / 3).astype(np.float32)
    found = score_numbers(
        lambda images: images, Batches(outputs, target, np.append(rng.permutation(40), 5)), ["x", "y"], SCALE
    )
    known = np.arange(40) != 7
    return found, target[known], outputs[known].astype(np.float64) * [2, 50] + [3, -200]


def test_measures_agree_with_scikit_learn() -> None:
    found, truth, predicted = case()
    raw = {"multioutput": "raw_values"}
    assert found.count == 39
    assert found.bad == [("lost.png", "corrupt")]
    assert found.target_r2 == pytest.approx(metrics.r2_score(truth, predicted, **raw))
    assert found.target_mae == pytest.approx(metrics.mean_absolute_error(truth, predicted, **raw))
    assert found.target_rmse == pytest.approx(metrics.root_mean_squared_error(truth, predicted, **raw))
    mean = np.tile(SCALE.mean, (39, 1))
    assert found.mean_mae == pytest.approx(metrics.mean_absolute_error(truth, mean, **raw))
    assert found.mean_rmse == pytest.approx(metrics.root_mean_squared_error(truth, mean, **raw))
    assert found.r2 == pytest.approx(metrics.r2_score(truth, predicted))


@pytest.mark.parametrize("predicted", [[4.0, 4.0, 4.0], [4.0, 5.0, 4.0]])
def test_r2_of_a_constant_is_scikit_learns(predicted: list[float]) -> None:
    truth = np.full((3, 1), 4.0)
    found = NumberScores(["x"], np.arange(3), truth, np.array(predicted)[:, None], TargetScale())
    assert found.r2 == metrics.r2_score(truth[:, 0], predicted)


def test_the_lowest_error_is_the_best() -> None:
    assert Metric(name="mae").rank(1.0) > Metric(name="mae").rank(2.0)
    assert Metric(name="rmse").rank(1.0) > Metric(name="rmse").rank(2.0)
    assert Metric(name="r2").rank(1.0) > Metric(name="r2").rank(0.5)


def test_results_as_a_file(tmp_path: Path) -> None:
    found, _, _ = case()
    save_results(tmp_path / "e.npz", found)
    back = load_results(tmp_path / "e.npz", ["x", "y"])
    assert isinstance(back, NumberScores)
    assert back.metrics() == found.metrics()
    assert back.scale == SCALE
    assert back.bad == found.bad
    with pytest.raises(DataError, match="there are 3 targets"):
        load_results(tmp_path / "e.npz", ["x", "y", "z"])


def test_the_worst_images_are_those_with_the_largest_errors_in_deviations() -> None:
    target, prediction = np.zeros((3, 2)), np.array([[0.0, 40.0], [4.0, 0.0], [0.0, 0.0]])
    found = NumberScores(["x", "y"], np.arange(3), target, prediction, SCALE)
    assert found.worst(12).tolist() == [1, 0, 2]


def test_outputs_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="predicts 1 numbers"):
        score_numbers(
            lambda images: images[:, :1], Batches(np.zeros((3, 2)), np.zeros((3, 2)), np.arange(3)), ["x"], SCALE
        )
    with pytest.raises(DataError, match="none of the 3 images are known"):
        nothing = Batches(np.zeros((3, 2)), np.full((3, 2), np.nan), np.arange(3))
        score_numbers(lambda images: images, nothing, ["x", "y"], SCALE)
