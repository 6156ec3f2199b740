"""Calibration of the probabilities of labels: of all labels with a probability of 80 %, 80 % should be there.

Each label is a yes-or-no question, and its probability is compared with how often the images have the label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.evaluation.calibration import BINS, Calibration, binned
from vitrail.evaluation.label_scores import LabelScores


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


def before_scaling(found: LabelScores, bins: int = BINS) -> float:
    """Return the mean over labels of the calibration error with temperature 1."""
    return float(np.nanmean(_each_ece(found, found.uncalibrated[found.known], bins)))


def _each_ece(found: LabelScores, probability: np.ndarray, bins: int) -> np.ndarray:
    """Return the calibration error of each label for probabilities [count, classes]."""
    each = [binned(column, truth, bins).ece for column, truth in zip(probability.T, found.truth.T, strict=True)]
    return np.where(found.class_count > 0, each, np.nan)
