"""Values that carry units, and strict YAML. Torch-free, so that `--help` and a wrong flag answer at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from vitrail.errors import UsageError


@dataclass(frozen=True)
class Duration:
    """How long, in one of four units; converted to optimiser steps once, by `steps`.

    Written "500 steps", "30 epochs", "1e6 examples" or "5 %" (of the whole run).
    """

    value: float

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """Return the number of optimiser steps, rounded up; `total` is what a percentage is of."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.value:g} {UNIT_NAMES[type(self)]}"


@dataclass(frozen=True)
class Steps(Duration):
    """Optimiser steps."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return math.ceil(self.value)


@dataclass(frozen=True)
class Epochs(Duration):
    """Passes over the training split."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return math.ceil(self.value * per_epoch)


@dataclass(frozen=True)
class Examples(Duration):
    """Images seen."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return math.ceil(self.value / batch_size)


@dataclass(frozen=True)
class Percent(Duration):
    """Percent of the whole run."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`; raises UsageError where there is no whole to be a part of."""
        if total is None:
            raise UsageError("the length of a run cannot be a percentage: use steps, epochs or examples")
        return math.ceil(self.value / 100 * total)


UNIT_NAMES: dict[type[Duration], str] = {Steps: "steps", Epochs: "epochs", Examples: "examples", Percent: "%"}
_UNITS: dict[str, type[Duration]] = {
    "": Steps,
    **dict.fromkeys(("step", "steps"), Steps),
    **dict.fromkeys(("ep", "epoch", "epochs"), Epochs),
    **dict.fromkeys(("ex", "example", "examples", "images"), Examples),
    **dict.fromkeys(("%", "percent"), Percent),
}
_DURATION = re.compile(r"\s*(?P<number>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>[a-z%]*)\s*")


def parse_duration(text: str | int | float | Duration) -> Duration:
    """Read "30 epochs", "500", "1e6 examples", "5%"; a bare number counts steps. Raises UsageError."""
    if isinstance(text, Duration):
        return text
    match = _DURATION.fullmatch(str(text))
    if not match or match["unit"] not in _UNITS:
        raise UsageError(f"{text!r} is no duration: write '500 steps', '30 epochs', '1e6 examples' or '5 %'")
    return _UNITS[match["unit"]](float(match["number"]))
