"""Durations of training with a unit, such as "30 epochs", and their conversion to optimiser steps; times in minutes, or
with a unit, such as "20 s". Torch-free."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from vitrail.errors import UsageError
from vitrail.ranges import LARGE, Range, limits
from vitrail.words import shown


@dataclass(frozen=True)
class Duration:
    """A length of training in one of four units. `steps` converts it to optimiser steps.

    Written "500 steps", "30 epochs", "1e6 examples" or "5 %" (of the whole run). Raises UsageError if the value is
    negative or not finite.
    """

    value: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value >= 0):
            raise UsageError(f"the duration {self.value!r} is not valid: it must be a finite number of at least 0")

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """Return the number of optimiser steps, rounded up; a percentage is relative to `total`."""
        raise NotImplementedError

    def __str__(self) -> str:
        # exact, so that a written duration reads back as itself: {:g} would round 1,234,567 examples
        whole = float(self.value).is_integer() and self.value < 1e15
        return f"{int(self.value) if whole else repr(float(self.value))} {UNIT_NAMES[type(self)]}"


def _up(steps: float) -> int:
    return math.ceil(round(steps, 6))  # 0.1 epochs of 30 steps are 3.0000000000000004 steps and must become 3


@dataclass(frozen=True)
class Steps(Duration):
    """Optimiser steps."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return _up(self.value)


@dataclass(frozen=True)
class Epochs(Duration):
    """Passes over the training split."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return _up(self.value * per_epoch)


@dataclass(frozen=True)
class Examples(Duration):
    """Training images."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`."""
        return _up(self.value / batch_size)


@dataclass(frozen=True)
class Percent(Duration):
    """Percent of the whole run."""

    def steps(self, *, per_epoch: float, batch_size: int, total: int | None = None) -> int:
        """See `Duration.steps`; raises UsageError if the length of the whole run is not known."""
        if total is None:
            raise UsageError("the length of a run cannot be a percentage: use steps, epochs or examples")
        return _up(self.value * total / 100)


LONGEST = 1e12
"""Maximum number of a duration. At 10,000 steps a second it would take three years."""
Length = Annotated[Duration, Range(0, LONGEST, above=True)]
"""A duration that is not zero."""
AnyLength = Annotated[Duration, Range(0, LONGEST)]
"""A duration that may be zero."""

UNIT_NAMES: dict[type[Duration], str] = {Steps: "steps", Epochs: "epochs", Examples: "examples", Percent: "%"}
_UNITS: dict[str, type[Duration]] = {
    "": Steps,
    **dict.fromkeys(("step", "steps"), Steps),
    **dict.fromkeys(("ep", "epoch", "epochs"), Epochs),
    **dict.fromkeys(("ex", "example", "examples", "images"), Examples),
    **dict.fromkeys(("%", "percent"), Percent),
}
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_DURATION = re.compile(rf"\s*(?P<number>{_NUMBER})\s*(?P<unit>[a-z%]*)\s*")


def parse_duration(text: str | int | float | Duration) -> Duration:
    """Return the duration that "30 epochs", "500", "1e6 examples" or "5%" means; a number alone counts steps.

    Raises UsageError for anything else.
    """
    if isinstance(text, Duration):
        return text
    match = _DURATION.fullmatch(str(text))
    if not match or match["unit"] not in _UNITS:
        raise UsageError(f"{text!r} is not a duration: write '500 steps', '30 epochs', '1e6 examples' or '5 %'")
    return _UNITS[match["unit"]](float(match["number"]))


@dataclass(frozen=True)
class TimeRange(Range):
    """The valid times of a setting, in minutes. Flags and configuration files take a text with a unit, too."""


Minutes = Annotated[float, TimeRange(0, LARGE, above=True)]
"""A time in minutes. `parse_minutes` reads it from text."""

_MINUTES: dict[str, float] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1 / 60),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 1),
    **dict.fromkeys(("h", "hour", "hours"), 60),
}
_TIME = re.compile(rf"\s*(?P<number>-?{_NUMBER})\s*(?P<unit>[a-z]+)\s*")


def in_minutes(hint: Any) -> bool:
    """Return whether a type, or a part of a union, is a time in minutes."""
    return any(isinstance(limit, TimeRange) for limit in limits(hint))


def parse_minutes(text: str | float) -> float:
    """Return the minutes that "20s", "90 s", "10 min", "1.5h" or "2 hours" means; a number alone counts minutes.

    The range is not checked. Raises UsageError for anything else.
    """
    try:
        return float(text)
    except ValueError:
        match = _TIME.fullmatch(str(text))
    if not match or match["unit"] not in _MINUTES:
        raise UsageError(
            f"{shown(text)} is not a time: write a number of minutes, such as 10, or a number with the unit s, min or "
            "h, such as '20 s', '10 min' or '1.5 h'"
        )
    return float(match["number"]) * _MINUTES[match["unit"]]
