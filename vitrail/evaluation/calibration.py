"""Calibration of a classifier: calibration error, Brier score, and the reliability diagram.

Of all predictions with a confidence of 80 %, 80 % should be correct. "On Calibration of Modern Neural Networks"
(Guo et al., 2017, section 2): predictions are sorted by the confidence of the best class into bins of equal width,
(0, 1/M], (1/M, 2/M], ..., with M = 15, and each bin's accuracy is compared with its mean confidence.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import UsageError
from vitrail.evaluation.classify import Classification
from vitrail.files import replacing_text
from vitrail.plots import COLOURS, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 15
COLUMNS = ("from", "to", "images", "accuracy", "confidence")


@dataclass(frozen=True)
class Calibration:
    """Agreement of confidence and accuracy, over the images with a known class.

    Values are NaN if a prediction is not finite, as the loss is; `brier` is NaN if the evaluation did not compute it.
    """

    ece: float
    """Expected calibration error: mean over images of |accuracy - confidence| of their bin, 0 to 1."""
    nll: float
    """Mean cross-entropy in nats."""
    brier: float
    """Mean squared distance of all probabilities from 1 for the true class and 0 for the others, 0 to 2."""
    accuracy: float
    """Share of images whose best class is correct."""
    confidence: float
    """Mean probability of the best class; above `accuracy` the network is overconfident, below it underconfident."""
    edges: np.ndarray
    """float64 [bins + 1], from 0 to 1; a bin includes its upper edge but not its lower one."""
    bin_count: np.ndarray
    """int64 [bins]: number of images in each bin."""
    bin_accuracy: np.ndarray
    """float64 [bins]; NaN in an empty bin."""
    bin_confidence: np.ndarray
    """float64 [bins]: mean confidence; NaN in an empty bin."""

    @property
    def count(self) -> int:
        """Return the number of images in all bins."""
        return int(self.bin_count.sum())

    def rows(self) -> Iterator[dict[str, float]]:
        """Yield each bin: from, to, images, accuracy, confidence."""
        columns = (self.edges[:-1], self.edges[1:], self.bin_count, self.bin_accuracy, self.bin_confidence)
        for values in zip(*(column.tolist() for column in columns), strict=True):
            yield dict(zip(COLUMNS, values, strict=True))


def calibration(evaluation: Classification, bins: int = BINS) -> Calibration:
    """Return the calibration of the predictions, from the probability of each image's best class.

    Raises UsageError for fewer than one bin.
    """
    known = evaluation.known
    brier = float(evaluation.brier[known].mean())
    return binned(evaluation.probability[known, 0], evaluation.correct[known], bins, nll=evaluation.nll, brier=brier)


def before_scaling(evaluation: Classification, bins: int = BINS) -> Calibration:
    """Return the calibration with temperature 1, as `calibration` does, without loss and Brier score."""
    sure = evaluation.probability[:, 0] if evaluation.uncalibrated is None else evaluation.uncalibrated
    return binned(sure[evaluation.known], evaluation.correct[evaluation.known], bins, brier=math.nan)


def binned(
    sure: np.ndarray, right: np.ndarray, bins: int = BINS, *, nll: float = math.nan, brier: float | None = None
) -> Calibration:
    """Return how probabilities [n] agree with outcomes, bool [n]. Raises UsageError for fewer than one bin.

    brier: The Brier score, where it is not that of the single probabilities.
    """
    if bins < 1:
        raise UsageError(f"a calibration error needs at least 1 bin, not {bins}")
    edges = np.linspace(0, 1, bins + 1)
    # compared in the precision of the confidences, in which 3/15 and a probability of 0.2 are equal
    places = np.searchsorted(edges.astype(sure.dtype), sure, side="left") - 1
    places = places.clip(0, bins - 1)
    counts = np.bincount(places, minlength=bins)
    accuracy, confidence = (
        np.divide(np.bincount(places, values, bins), counts, out=np.full(bins, np.nan), where=counts > 0)
        for values in (right, sure)
    )
    filled = counts > 0
    gaps = np.abs(accuracy[filled] - confidence[filled])
    return Calibration(
        ece=float((counts[filled] * gaps).sum() / len(sure)),
        nll=nll,
        brier=float(np.square(sure.astype(np.float64) - right).mean()) if brier is None else brier,
        accuracy=float(right.sum() / len(right)),
        confidence=float(sure.mean(dtype=np.float64)),
        edges=edges,
        bin_count=counts,
        bin_accuracy=accuracy,
        bin_confidence=confidence,
    )


def write_bins(path: Path, result: Calibration) -> None:
    """Write the bins as a CSV: from, to, images, accuracy, confidence; an empty bin has no accuracy."""
    with replacing_text(path) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in result.rows():
            numbers = {name: value if name == "images" else f"{value:.6f}" for name, value in row.items()}
            writer.writerow(numbers if row["images"] else {**numbers, "accuracy": "", "confidence": ""})


def plot(figure: Figure, result: Calibration, *, labels: bool = False) -> None:
    """Draw the reliability diagram into an empty figure; text and lines have matplotlib's text colour.

    labels: The probabilities are those of every label of every image, not of each image's best class.

    In the upper plot, each bin has a bar for its accuracy and a line for its mean confidence. A line above the bar
    means overconfidence, a line inside the bar underconfidence. The lower plot shows the share of images in each bin.
    """
    import matplotlib  # of the extra train; the numbers do without
    from matplotlib.ticker import PercentFormatter

    blue, vermilion, *_ = COLOURS
    share, things = ("share that is there", "labels") if labels else ("accuracy", "images")
    sure = "probability of a label" if labels else "confidence: probability of the best class"
    ink = matplotlib.rcParams["text.color"]
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = result.bin_count > 0
    left, width = result.edges[:-1][filled], 0.92 * np.diff(result.edges)[filled]
    upper.bar(left, result.bin_accuracy[filled], width, align="edge", color=blue, label=share)
    confidence = result.bin_confidence[filled]
    upper.hlines(
        confidence,
        left,
        left + width,
        color=vermilion,
        linewidth=3,
        label="mean probability" if labels else "mean confidence",
    )
    upper.plot((0, 1), (0, 1), color=ink, linestyle="--", linewidth=1, label="calibrated", zorder=1.5)
    upper.set_ylim(0, 1)
    upper.set_ylabel(share)
    upper.set_title(f"Calibration: ECE {result.ece:.2%}, {result.count:,} {things}")
    figure.legend(
        *upper.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize="small"
    )
    lower.bar(left, result.bin_count[filled] / result.count, width, align="edge", color=blue)
    lower.set_ylabel(things)
    lower.set_xlabel(sure)
    lower.set_xlim(0, 1)
    for axis in (upper.xaxis, upper.yaxis, lower.xaxis, lower.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (upper, lower):
        axes.grid(True, alpha=0.15)
        axes.set_axisbelow(True)


def draw_reliability(result: Calibration, path: Path, *, labels: bool = False) -> None:
    """Write the reliability diagram to `path`, in the format of its suffix; `labels` as in `plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 4.8), layout="constrained")
    plot(figure, result, labels=labels)
    save_figure(figure, path)
