"""`CardAnswer`: one of several answers of a network for an image, as its card describes it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.data.labels.numbers import TargetScale
from vitrail.errors import UsageError
from vitrail.ranges import Range, Settings
from vitrail.weights.confidence import Confidence


@dataclass(frozen=True)
class CardAnswer(Settings):
    """What the outputs of one answer mean. Raises UsageError for values that contradict each other."""

    name: str = ""
    """Name of the column that the network learned."""
    task: Literal["classes", "labels", "numbers"] = "classes"
    """See `Card.task`."""
    outputs: Annotated[int, Range(1, 2**31)] = 1
    """Number of outputs. Those of the answers follow each other."""
    thresholds: tuple[float, ...] = ()
    """See `Card.thresholds`."""
    confidence: Confidence | None = None
    """See `Card.confidence`."""
    scale: TargetScale | None = None
    """See `Card.scale`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = len(self.thresholds) in (0, self.outputs) and all(0 <= value <= 1 for value in self.thresholds)
        if (self.task == "numbers") != (self.scale is not None) or not known:
            raise UsageError(f"the answer {self.name!r} predicts {self.task} and has a scale or thresholds of others")


class Confidences(dict[str, Confidence]):
    """What validation images say about the probabilities of each answer that has some."""

    def __str__(self) -> str:
        return "; ".join(f"{name}: {one}" for name, one in self.items())

    def logged(self) -> Mapping[str, float]:
        """See `Confidence.logged`."""
        return {f"{name}.{key}": value for name, one in self.items() for key, value in one.logged().items()}
