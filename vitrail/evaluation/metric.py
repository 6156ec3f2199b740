"""The number by which the best model of a run is chosen. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitrail.errors import UsageError
from vitrail.import_path import Extensible, import_path, is_own
from vitrail.words import listing

if TYPE_CHECKING:
    from vitrail.evaluation.results import Results

ONE_LABEL = ("top1", "top5", "balanced_accuracy")
"""Metrics of images with one label each."""
SEVERAL_LABELS = ("map", "micro_f1", "exact")
"""Metrics of images with several labels each."""
NUMBERS = ("r2", "mae", "rmse")
"""Metrics of images whose labels are numbers."""
PIXELS = ("miou", "pixel_accuracy")
"""Metrics of images with masks."""

SCORE = "score"
"""Metric of several answers for an image: the mean of their headlines."""
OF_CLASSES, OF_LABELS = (*ONE_LABEL, "macro_f1", "nll"), (*SEVERAL_LABELS, "macro_f1", "nll")
"""All metrics of one class and of several labels."""

HEADLINES = (SCORE, "top1", "map", "r2", "miou")
"""The number of each kind of evaluation that says how good a network is."""
TITLES = {
    "top1": "top-1",
    "map": "mAP",
    "micro_f1": "F1 (micro)",
    "macro_f1": "F1 (macro)",
    "exact": "exact match",
    "r2": "R2",
    "mae": "MAE",
    "rmse": "RMSE",
    SCORE: "mean score",
    "miou": "mIoU",
    "pixel_accuracy": "pixel accuracy",
}
"""Names of metrics in sentences."""
SHARES = ("top1", "top5", "exact")
"""Metrics that are shares of the images."""
FEW = 1000
"""Number of images from which an accuracy is given without its interval, which is then at most 6 points wide."""


def headline(numbers: Mapping[str, float]) -> str | None:
    """Return which number of an evaluation says how good a network is: score, top1, map, r2 or miou; None without."""
    return next((name for name in HEADLINES if name in numbers), None)


def metric_in_words(name: str, value: float) -> str:
    """Return a metric as text: "top-1 93.40%", "MAE 2.51"."""
    return f"{TITLES[name]} {value:.4g}" if name in NUMBERS else f"{TITLES[name]} {value:.2%}"


def on_images(name: str, numbers: Mapping[str, float], what: str = "images") -> str:
    """Return on how many images a metric was measured: " on 65 images (95 % confidence: 71.5% to 89.1%)".

    what: Name of the images. The interval is given for the accuracy on fewer than `FEW` images. Returns "" if the
    number of images is not known.
    """
    if "count" not in numbers:
        return ""
    count = round(numbers["count"])
    text = f" on {count:,} {what}"
    if name != "top1" or count >= FEW:
        return text
    low, high = interval(numbers)
    return f"{text} (95 % confidence: {low:.1%} to {high:.1%})"


def interval(numbers: Mapping[str, float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the accuracy `top1` on `count` images."""
    count = round(numbers["count"])
    return wilson(round(numbers["top1"] * count), count)


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson's score interval, which is right for small counts)."""
    if not count:
        return 0.0, 1.0
    share = right / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)


@dataclass(frozen=True)
class Metric(Extensible, section="metric"):
    """The number by which the best model is chosen and early stopping counts, if the run learns from labels.

    A metric of one's own is a subclass with another `value`. It is also logged, and measured on the test images.
    """

    name: Literal[
        "top1",
        "top5",
        "nll",
        "balanced_accuracy",
        "macro_f1",
        "map",
        "micro_f1",
        "exact",
        "r2",
        "mae",
        "rmse",
        "miou",
        "pixel_accuracy",
        "score",
    ] = "top1"
    """Number on the validation images by which the best model is chosen and early stopping counts. balanced_accuracy
    and macro_f1 count every class the same, however rare it is. nll, the validation loss, breaks ties, and shares of
    the images (top1, top5, exact) that lie within the 80 % interval of the highest one count as ties. For images with
    several labels: map (mean average precision, in place of top1), macro_f1, micro_f1, or exact (all labels right).
    For numbers: r2 (in place of top1), mae, or rmse, each the mean over targets. For images with masks: miou (in place
    of top1), or pixel_accuracy. For several answers: score (in place of top1), the mean over answers of top1, map and
    r2, which counts as 0 below 0; or a number of one `answer`."""
    answer: str | None = None
    """Answer whose number is meant, if data.answers names several (default: the mean over answers)."""
    all_classes: ClassVar[bool] = False
    """Whether `value` needs the probabilities of all classes, not only of the five best."""

    def value(self, found: Results) -> float:
        """Return the number from the outputs for all images, whose labels are `found.label`."""
        return float(getattr(found, self.name))

    def measured(self, found: Results) -> float:
        """Return `value` of the results, or of those of `answer` alone.

        Raises UsageError if no image has it, or if a metric of the user's own reads what these results do not have.
        """
        if self.answer is not None:
            parts: Mapping[str, Results] = getattr(found, "parts", {})
            if self.answer not in parts:
                raise UsageError(
                    f"metric.answer is {self.answer!r}, which no image has that is evaluated: name another"
                )
            found = parts[self.answer]
        try:
            return self.value(found)
        except AttributeError as error:
            if error.obj is not found:
                raise
            has = listing(list(vars(found)), quoted=False)
            raise UsageError(
                f"the metric {import_path(type(self))} is not for {found.task}: {error}. Leave it out, for "
                f"{found.headline}, or read what these results have: {has}"
            ) from error

    def rank(self, value: float) -> float:
        """Return how good a value is: larger is better."""
        return -value if self.name in ("nll", "mae", "rmse") else value

    def tied(self, numbers: Mapping[str, float]) -> float:
        """Return the rank from which models count as good as that with the `numbers` of an evaluation.

        A share of the images is known up to chance only. It counts as the lower end of its 80 % confidence interval, so
        that one more image that is right, of few, decides nothing (as in the rule of one standard error, Breiman et al.
        1984).
        """
        rank = self.rank(numbers[self.key])
        if self.key not in SHARES:
            return rank
        count = round(numbers["count"])
        return wilson(round(rank * count), count, z=1.281552)[0]

    @property
    def key(self) -> str:
        """The name under which the number is logged."""
        name = type(self).__name__.lower() if is_own(type(self)) else self.name
        return name if self.answer is None else f"{self.answer}.{name}"
