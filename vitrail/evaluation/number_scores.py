"""Results of a network that predicts numbers: R2, mean absolute error and root mean squared error of each target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.labels.numbers import TargetScale
from vitrail.errors import DataError
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.classify import Batches, Predict, gather_rows
from vitrail.evaluation.results import Guess, Results

STORED = {"index": "index", "numbers": "target", "predictions": "prediction"}
"""Array in a file -> field of `NumberScores`."""


@dataclass(frozen=True)
class NumberScores(Results):
    """True and predicted targets in the units of the data, one row per image, sorted by `index`."""

    task = "numbers"
    headline = "r2"
    class_names: list[str]
    """Names of the targets."""
    index: np.ndarray
    target: np.ndarray
    """float64 [N, targets]; NaN in the row of an image whose numbers are unknown, which does not count."""
    prediction: np.ndarray
    """float64 [N, targets]."""
    scale: TargetScale
    """Mean and deviation of the training images, by which targets were standardised."""
    bad: list[tuple[str, str]] = field(default_factory=list)

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether the numbers are known."""
        found: np.ndarray = np.isfinite(self.target).all(axis=1)
        return found

    @property
    def errors(self) -> np.ndarray:
        """float64 [count, targets]: prediction - target, of the images that count."""
        found: np.ndarray = self.prediction[self.known] - self.target[self.known]
        return found

    @property
    def target_mae(self) -> np.ndarray:
        """float64 [targets]: mean absolute error."""
        return _mae(self.errors)

    @property
    def target_rmse(self) -> np.ndarray:
        """float64 [targets]: root of the mean squared error."""
        return _rmse(self.errors)

    @property
    def target_r2(self) -> np.ndarray:
        """float64 [targets]: share of the variance of these images that is explained (coefficient of determination).

        Of a target that is constant on these images it is 1 without any error, else 0, as in scikit-learn.
        """
        truth = self.target[self.known]
        residual, total = (self.errors**2).sum(axis=0), ((truth - truth.mean(axis=0)) ** 2).sum(axis=0)
        exact = np.where(residual == 0, 1.0, 0.0)
        return np.where(total > 0, 1 - residual / np.where(total > 0, total, 1), exact)

    @property
    def mean_mae(self) -> np.ndarray:
        """float64 [targets]: mean absolute error of always predicting the mean of the training images."""
        return _mae(self.target[self.known] - np.array(self.scale.mean))

    @property
    def mean_rmse(self) -> np.ndarray:
        """float64 [targets]: root of the mean squared error of always predicting the mean of the training images."""
        return _rmse(self.target[self.known] - np.array(self.scale.mean))

    @property
    def r2(self) -> float:
        """Mean of R2 over targets."""
        return float(self.target_r2.mean())

    @property
    def mae(self) -> float:
        """Mean of the mean absolute error over targets."""
        return float(self.target_mae.mean())

    @property
    def rmse(self) -> float:
        """Mean of the root mean squared error over targets."""
        return float(self.target_rmse.mean())

    @property
    def loss(self) -> float:
        """Mean squared error of the standardised targets."""
        return float(((self.errors / np.array(self.scale.deviation)) ** 2).mean())

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log: r2, mae, rmse, loss, count."""
        return {name: getattr(self, name) for name in ("r2", "mae", "rmse", "loss", "count")}

    def in_words(self) -> str:
        """See `Results`."""
        return f"R2 {self.r2:.4f}, MAE {self.mae:.4g}"

    def worst(self, most: int) -> np.ndarray:
        """See `Results`: those with the largest errors, in deviations."""
        error = ((self.prediction - self.target) / np.array(self.scale.deviation)) ** 2
        rows = np.flatnonzero(self.known & np.isfinite(error).all(axis=1))
        return rows[np.argsort(-error[rows].sum(axis=1), kind="stable")][:most]

    def true_names(self, row: int) -> list[str] | None:
        """See `Results`."""
        return [f"{value:.4g}" for value in self.target[row].tolist()] if self.known[row] else None

    def guesses(self, row: int, most: int) -> list[Guess]:
        """See `Results`: the numbers of a row are one guess."""
        return [Guess(", ".join(f"{value:.4g}" for value in self.prediction[row].tolist()), None, False)]

    def cells(self, row: int) -> tuple[list[str], list[str], list[str]]:
        """See `Results`."""
        target, prediction = ([f"{one:.7g}" for one in rows[row].tolist()] for rows in (self.target, self.prediction))
        return target, prediction, []

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Results`."""
        found: dict[str, np.ndarray] = {name: getattr(self, field) for name, field in STORED.items()}
        return {**found, "scale": np.array([self.scale.mean, self.scale.deviation])}


def _mae(errors: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.abs(errors).mean(axis=0)
    return found


def _rmse(errors: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.sqrt((errors**2).mean(axis=0))
    return found


@torch.no_grad()
def predicted_numbers(outputs: Tensor, scale: TargetScale) -> np.ndarray:
    """Return a network's outputs [batch, targets] in the units of the data, float64."""
    found: np.ndarray = scale.original(outputs.float().cpu().double()).numpy()
    return found


def score_numbers(predict: Predict, loader: Batches, class_names: Sequence[str], scale: TargetScale) -> NumberScores:
    """Run `predict` over one epoch of `loader` and return the numbers of all processes, on every process.

    Batches have labels float64 [batch, targets]. An image that arrives twice counts once. Raises DataError if outputs
    and targets do not fit, if no image could be read, and if the numbers of no image are known.
    """

    def launch(batch: Any) -> Tensor:
        outputs = predict(batch.images)
        if batch.labels.shape != outputs.shape:
            raise DataError(
                f"the model predicts {outputs.shape[1]} numbers, and the labels of a batch are "
                f"{list(batch.labels.shape)}. Evaluate on images with the same targets"
            )
        return outputs

    rows = [
        (batch.index, batch.labels, torch.from_numpy(predicted_numbers(outputs, scale)))
        for batch, outputs in ahead(loader.epoch(0), launch)
    ]
    (index, target, prediction), bad = gather_rows(rows, loader)
    index, first = np.unique(index, return_index=True)
    found = NumberScores(list(class_names), index, target[first], prediction[first], scale, bad)
    if not found.count:
        raise DataError(f"the numbers of none of the {len(index)} images are known, so nothing can be measured")
    return found
