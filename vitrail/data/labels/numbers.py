"""Numbers as labels, for regression: one or several targets for each image.

Targets have a scale, their mean and deviation: a network for regression computes (target - mean) / deviation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


TARGET = "target"
"""Name of a target whose column has no name of its own."""
_BETWEEN = re.compile(r"[|;]")


class Numbers:
    """The targets of each image, float64 [N, targets]; NaN in the whole row of an image whose numbers are unknown."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def width(self) -> int:
        """Number of targets."""
        return int(self.values.shape[1])

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, indices: np.ndarray | slice) -> Numbers:
        return Numbers(self.values[indices])

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether the numbers of an image are known."""
        found: np.ndarray = np.isfinite(self.values).all(axis=1)
        return found

    def at(self, index: int) -> np.ndarray:
        """Return the targets of an image, float64 [targets]."""
        row: np.ndarray = self.values[index]
        return row

    def texts(self) -> list[str]:
        """Return the targets of each image as text that `parse_numbers` reads back exactly; "" if they are unknown."""
        rows = zip(self.values.tolist(), self.known.tolist(), strict=True)
        return [numbers_text(row) or "" if known else "" for row, known in rows]


def parse_numbers(text: str, separator: str | None = None) -> tuple[float, ...]:
    """Return the numbers in a text: "3.5", "[3.5, 2]", or "3.5|2" with "|", ";" or `separator` between them.

    Raises ValueError for anything else. A comma outside brackets is not read, because it may be a decimal comma.
    """
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("[]", "()"):
        parts = inner[1:-1].split(",")
    else:
        parts = inner.split(separator) if separator else _BETWEEN.split(inner)
    found = tuple(float(part) for part in parts)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{text} is not finite")
    return found


def numbers_text(value: object) -> str | None:
    """Return a number or a list of numbers as text that `parse_numbers` reads back exactly.

    None for anything else, and for numbers that are not finite.
    """
    values = value if isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not (isinstance(one, int) or (isinstance(one, float) and math.isfinite(one))):
            return None
    return "|".join(map(repr, values)) or None


def target_names(count: int, label: str | None, columns: tuple[str, ...] | None) -> list[str]:
    """Return the names of targets: those of their `columns`, the name of the only column, or "target"."""
    if columns is not None and len(columns) == count:
        return list(columns)
    if count == 1:
        return [label or TARGET]
    return [f"{label or TARGET} {number}" for number in range(1, count + 1)]


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
