"""Scores of a segmentation: how well the class of each pixel is predicted, over all pixels of all images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.data.masks import IGNORED
from vitrail.evaluation.classify import confusion_counts


def confusions(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of pixels of each true class (row) that are predicted as each class (column), int64 [K, K].

    `truth` and `predicted` are arrays of one shape with the numbers of classes; pixels with IGNORED in `truth` do not
    count.
    """
    counted = truth != IGNORED
    return confusion_counts(truth[counted], predicted[counted], classes)


@dataclass(frozen=True)
class PixelScores:
    """The scores of all pixels together, as Pascal VOC and ADE20K define them."""

    class_names: Sequence[str]
    confusion: np.ndarray
    """int64 [K, K]: see `confusions`"""

    @property
    def iou(self) -> np.ndarray:
        """Return intersection over union of each class, float64 [K]; NaN for a class that is neither there nor seen."""
        right = self.confusion.diagonal()
        union = self.confusion.sum(axis=0) + self.confusion.sum(axis=1) - right
        return np.divide(right, union, out=np.full(len(right), np.nan), where=union > 0)

    @property
    def miou(self) -> float:
        """Return the mean IoU of the classes that have one."""
        return float(np.nanmean(self.iou))

    @property
    def pixel_accuracy(self) -> float:
        """Return the share of the pixels whose class is right."""
        return float(self.confusion.trace() / self.confusion.sum())

    @property
    def largest_share(self) -> float:
        """Return the share of the pixels that have the most frequent class: the accuracy without looking."""
        return float(self.confusion.sum(axis=1).max() / self.confusion.sum())
