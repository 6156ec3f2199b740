"""`Confidence`: what validation images say about a network's probabilities, stored in its card. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from vitrail.errors import UsageError
from vitrail.ranges import Range, Settings, Share, Whole

THRESHOLDS = tuple(k / 100 for k in range(101))
"""The confidences for which images are counted."""


class Rejection(NamedTuple):
    """What a smallest confidence means: images whose best class is less probable get no class."""

    threshold: float
    images: int
    """Number of validation images."""
    coverage: float
    """Share of the images that get a class."""
    risk: float
    """Share of wrong classes among the images that get one; NaN if there are none."""
    risk_of_all: float
    """Share of wrong classes among all images."""

    def __str__(self) -> str:
        risk = f"{self.risk:.1%} of the classes named are wrong" if self.coverage else "no class is named"
        return (
            f"on the {self.images:,} validation images, a class is named for {self.coverage:.1%} at a confidence of "
            f"{self.threshold:.2f}, and {risk} ({self.risk_of_all:.1%} without rejection)"
        )


@dataclass(frozen=True)
class Confidence(Settings):
    """The temperature of a network's probabilities, and how often it is wrong at each confidence.

    Probabilities are the softmax of logits / temperature, or with several labels their sigmoid ("On Calibration of
    Modern Neural Networks", Guo et al. 2017, section 4.2). Raises UsageError for counts that contradict each other.
    """

    temperature: Annotated[float, Range(1e-3, 1e3)] = 1.0
    images: Whole = 0
    """Number of validation images that the other values are from."""
    ece_before: Share = 0.0
    """Expected calibration error on these images with temperature 1."""
    ece: Share = 0.0
    """Expected calibration error on these images with this temperature."""
    named: tuple[int, ...] = ()
    """For each of `THRESHOLDS`: number of images whose best class has at least this probability. Empty for a network
    that predicts several labels."""
    wrong: tuple[int, ...] = ()
    """Number of these images whose best class is wrong."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.named) not in (0, len(THRESHOLDS)) or len(self.wrong) != len(self.named):
            raise UsageError(
                f"named and wrong have {len(self.named)} and {len(self.wrong)} counts, not {len(THRESHOLDS)}"
            )
        if any(not 0 <= wrong <= named <= self.images for named, wrong in zip(self.named, self.wrong, strict=True)):
            raise UsageError("of named, wrong and images, each count must be at most the next")

    def __str__(self) -> str:
        if self.temperature == 1:
            return (
                f"temperature 1, because no other one makes both the loss and the calibration error of "
                f"{self.images:,} validation images smaller; calibration error {self.ece:.2%}"
            )
        return (
            f"temperature {self.temperature:.4g}, fitted on {self.images:,} validation images; calibration error "
            f"{self.ece_before:.2%} before and {self.ece:.2%} after"
        )

    def logged(self) -> dict[str, float]:
        """Return the numbers for the log of a run."""
        return {"temperature": self.temperature, "ece_before": self.ece_before, "ece": self.ece}

    def rejection(self, threshold: float) -> Rejection | None:
        """Return what a threshold, rounded down to a hundredth, means on the images; None if they were not counted."""
        if not self.named or not self.images:
            return None
        place = int(threshold * 100 + 1e-9)
        named, wrong = self.named[place], self.wrong[place]
        risk = wrong / named if named else float("nan")
        return Rejection(THRESHOLDS[place], self.images, named / self.images, risk, self.wrong[0] / self.images)
