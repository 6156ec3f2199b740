"""A metric of one's own that chooses the best model: `vitrail train digits --metric balanced_accuracy:Balanced`."""

from dataclasses import dataclass

import numpy as np

from vitrail import Metric
from vitrail.ranges import Share


@dataclass(frozen=True)
class Balanced(Metric):
    """Mean accuracy of the classes, so that rare classes count as much as frequent ones."""

    worst: Share = 0.0
    """Weight of the worst class against the mean of all."""

    def value(self, found):
        """Return the number from the outputs for all images."""
        of_class = found.class_accuracy
        return (1 - self.worst) * np.nanmean(of_class) + self.worst * np.nanmin(of_class)
