"""The reliability diagram: accuracy against confidence, and the number of images at each confidence."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitrail.evaluation.calibration import Calibration

COLOURS = ("#0072b2", "#d55e00")
"""Blue and vermilion from the palette of Okabe and Ito, distinct under every kind of colour blindness."""


def plot(figure: Figure, found: Calibration) -> None:
    """Draw into an empty figure; text and lines have matplotlib's text colour.

    In the upper plot, each bin has a bar for its accuracy and a line for its mean confidence. A line above the bar
    means overconfidence, a line inside the bar underconfidence. The lower plot shows the share of images in each bin.
    """
    blue, vermilion = COLOURS
    ink = matplotlib.rcParams["text.color"]
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = found.bin_count > 0
    left, width = found.edges[:-1][filled], 0.92 * np.diff(found.edges)[filled]
    upper.bar(left, found.bin_accuracy[filled], width, align="edge", color=blue, label="accuracy")
    confidence = found.bin_confidence[filled]
    upper.hlines(confidence, left, left + width, color=vermilion, linewidth=3, label="mean confidence")
    upper.plot((0, 1), (0, 1), color=ink, linestyle="--", linewidth=1, label="calibrated", zorder=1.5)
    upper.set_ylim(0, 1)
    upper.set_ylabel("images answered right")
    upper.set_title(f"Calibration: ECE {found.ece:.2%}, {found.count:,} images")
    figure.legend(
        *upper.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize="small"
    )
    lower.bar(left, found.bin_count[filled] / found.count, width, align="edge", color=blue)
    lower.set_ylabel("images")
    lower.set_xlabel("confidence: probability of the best class")
    lower.set_xlim(0, 1)
    for axis in (upper.xaxis, upper.yaxis, lower.xaxis, lower.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (upper, lower):
        axes.grid(True, alpha=0.15)
        axes.set_axisbelow(True)


def draw(found: Calibration, path: Path) -> None:
    """Write the diagram to `path`, in the format of its suffix."""
    figure = Figure(figsize=(4.8, 4.8), layout="constrained")
    plot(figure, found)
    figure.savefig(path, dpi=144)
