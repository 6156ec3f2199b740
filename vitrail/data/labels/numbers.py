"""Numbers as labels, for regression: one or several targets for each image."""

from __future__ import annotations

import math
import re

import numpy as np

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
        """Return the targets of each image as text that `numbers_in` reads back exactly; "" if they are unknown."""
        rows = zip(self.values.tolist(), self.known.tolist(), strict=True)
        return ["|".join(map(repr, row)) if known else "" for row, known in rows]


def numbers_in(text: str, separator: str | None = None) -> tuple[float, ...]:
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


def target_names(count: int, label: str | None, columns: tuple[str, ...] | None) -> list[str]:
    """Return the names of targets: those of their `columns`, the name of the only column, or "target"."""
    if columns is not None and len(columns) == count:
        return list(columns)
    if count == 1:
        return [label or TARGET]
    return [f"{label or TARGET} {number}" for number in range(1, count + 1)]
