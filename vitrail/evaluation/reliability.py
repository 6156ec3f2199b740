"""The reliability diagram: accuracy against confidence, and the number of images at each confidence."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitrail.evaluation.calibration import Calibration
from vitrail.files import replacing

COLOURS = ("#0072b2", "#d55e00")
"""Blue and vermilion from the palette of Okabe and Ito, distinct under every kind of colour blindness."""


def plot(figure: Figure, found: Calibration, *, labels: bool = False) -> None:
    """Draw into an empty figure; text and lines have matplotlib's text colour.

    labels: The probabilities are those of every label of every image, not of each image's best class.

    In the upper plot, each bin has a bar for its accuracy and a line for its mean confidence. A line above the bar
    means overconfidence, a line inside the bar underconfidence. The lower plot shows the share of images in each bin.
    """
    blue, vermilion = COLOURS
    share, things = ("share that is there", "labels") if labels else ("accuracy", "images")
    sure = "probability of a label" if labels else "confidence: probability of the best class"
    ink = matplotlib.rcParams["text.color"]
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = found.bin_count > 0
    left, width = found.edges[:-1][filled], 0.92 * np.diff(found.edges)[filled]
    upper.bar(left, found.bin_accuracy[filled], width, align="edge", color=blue, label=share)
    confidence = found.bin_confidence[filled]
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
    upper.set_title(f"Calibration: ECE {found.ece:.2%}, {found.count:,} {things}")
    figure.legend(
        *upper.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize="small"
    )
    lower.bar(left, found.bin_count[filled] / found.count, width, align="edge", color=blue)
    lower.set_ylabel(things)
    lower.set_xlabel(sure)
    lower.set_xlim(0, 1)
    for axis in (upper.xaxis, upper.yaxis, lower.xaxis, lower.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (upper, lower):
        axes.grid(True, alpha=0.15)
        axes.set_axisbelow(True)


def draw(found: Calibration, path: Path, *, labels: bool = False) -> None:
    """Write the diagram to `path`, in the format of its suffix; `labels` as in `plot`."""
    figure = Figure(figsize=(4.8, 4.8), layout="constrained")
    plot(figure, found, labels=labels)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=144, format=path.suffix[1:])
