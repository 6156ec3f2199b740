"""The scale of targets: their mean and deviation. A network for regression computes (target - mean) / deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.data.labels.numbers import Numbers


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of each target over the training images, in the units of the data.

    Raises UsageError unless there are equally many of both, all finite, with deviations above 0.
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        finite = all(math.isfinite(value) for value in (*self.mean, *self.deviation))
        if len(self.mean) != len(self.deviation) or not finite or not all(value > 0 for value in self.deviation):
            raise UsageError(
                f"scale: mean {list(self.mean)} and deviation {list(self.deviation)}; valid are equally many finite "
                "numbers, and deviations above 0"
            )

    @classmethod
    def of(cls, numbers: Numbers, names: Sequence[str]) -> TargetScale:
        """Return the scale of the known targets. Raises DataError for a target with the same value everywhere."""
        values = numbers.values[numbers.known]
        for name, lowest, highest in zip(names, values.min(axis=0), values.max(axis=0), strict=True):
            if lowest == highest:
                raise DataError(
                    f"the target {name!r} is {lowest:g} in all {len(values):,} training images, so there is nothing to "
                    "learn. Check the column of the labels, or leave this target out"
                )
        return cls(tuple(values.mean(axis=0).tolist()), tuple(values.std(axis=0).tolist()))

    def standardised(self, values: Tensor) -> Tensor:
        """Return targets [..., targets] as multiples of their deviation from their mean."""
        return (values - values.new_tensor(self.mean)) / values.new_tensor(self.deviation)

    def original(self, outputs: Tensor) -> Tensor:
        """Return a network's outputs [..., targets] in the units of the data."""
        return outputs * outputs.new_tensor(self.deviation) + outputs.new_tensor(self.mean)
