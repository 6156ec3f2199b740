"""The pictures of a report: curves and confusion matrix as inline SVG, images as data URIs.

The colours of Okabe and Ito and the colour map cividis can be told apart with every kind of colour blindness.
Text and axes use the page's text colour, so the same figure is readable on a light and on a dark page.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from vitrail.evaluation.calibration import Calibration, plot
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.confidence import SHOWN, counts_at, risk_coverage_curve
from vitrail.evaluation.number_scores import NumberScores

INK = "#010203"
"""Placeholder for the page's text colour while matplotlib draws."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#666666")
"""Blue, vermilion and four more colours for more runs. style.css lightens them on a dark page."""
DASHES = ("-", "--", ":")
"""Line styles. When all colours are used, they repeat in the next style."""
TRAINING, VALIDATION = 0, 1
MOST_POINTS = 500
MEAN_POINTS = 60
"""Points of a running mean."""
NAMED_CLASSES = 30
"""Maximum number of classes for which the confusion matrix shows names and counts."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's fonts
    "svg.hashsalt": "vitrail",  # the same run gives the same bytes
    "text.parse_math": False,  # a class named "$x$" is a name
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
}

Points = tuple[np.ndarray, np.ndarray]
"""Steps and values."""


@matplotlib.rc_context(_STYLE)
def draw_curves(
    title: str,
    label: str,
    lines: Mapping[str, Points],
    *,
    describe: str,
    percent: bool = False,
    running_mean: bool = False,
    styles: Mapping[str, int] | None = None,
) -> Markup:
    """Return an SVG of values over steps. `label` is the y axis with its unit, `describe` the alternative text.

    The name of a line decides its colour, which is the same in all figures; or its number in `styles` does. With
    `running_mean`, lines of many points are drawn faintly, with their mean on top.
    """
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")
    axes = figure.add_subplot()
    for name, (steps, values) in lines.items():
        place = (VALIDATION if name == "validation" else TRAINING) if styles is None else styles[name]
        color, dash = SERIES[place % len(SERIES)], DASHES[place // len(SERIES) % len(DASHES)]
        steps, values = thin_curve(steps, values, MOST_POINTS)
        if running_mean and len(steps) > MEAN_POINTS:
            axes.plot(steps, values, dash, color=color, alpha=0.3, linewidth=0.8)
            steps, values = thin_curve(steps, values, MEAN_POINTS)
        marker = "o" if len(steps) <= 30 else ""
        axes.plot(steps, values, dash, color=color, marker=marker, markersize=4, label=name)
    axes.set_title(title)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel(label)
    axes.grid(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=10)
    return svg(figure, describe)


def thin_curve(steps: np.ndarray, values: np.ndarray, most: int) -> Points:
    """Return at most `most` points; each is the mean of a section of equal length."""
    if len(steps) <= most:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), most)
    return np.array([steps[part].mean() for part in parts]), np.array([values[part].mean() for part in parts])


@matplotlib.rc_context({**_STYLE, "axes.spines.top": True, "axes.spines.right": True})
def confusion(counts: np.ndarray, class_names: Sequence[str]) -> Markup:
    """Return an SVG of a confusion matrix [K, K]: rows are true classes and sum to 100 %."""
    classes = len(counts)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    named = classes <= NAMED_CLASSES
    side = min(3.2 + 0.34 * classes, 9.0) if named else 6.5
    figure = Figure(figsize=(side + 0.9, side), layout="constrained")
    axes = figure.add_subplot()
    image = _share_matrix(axes, share, class_names)
    axes.set_title("Predictions for each class")
    axes.set_xlabel("predicted class" if named else "predicted class (number)")
    axes.set_ylabel("true class" if named else "true class (number)")
    if named:
        brightness = _share_scale()(share)
        for row, column in zip(*np.nonzero(counts), strict=True):
            color = "#000000" if brightness[row, column] > 0.5 else "#ffffff"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color, fontsize=9)
    _share_bar(figure, image, [axes], "share of the true class's images")
    best, total = int(np.trace(counts)), int(counts.sum())
    return svg(
        figure,
        f"Confusion matrix of {classes} classes: {best} of {total} images are on the diagonal, "
        "where the prediction is correct. The tables below list the largest confusions.",
    )


@matplotlib.rc_context({**_STYLE, "axes.spines.top": True, "axes.spines.right": True})
def cooccurrence(there: np.ndarray, predicted: np.ndarray, class_names: Sequence[str]) -> Markup:
    """Return an SVG of two matrices: for images with a label (row), how many have each label, and for how many it is
    predicted. `there` and `predicted` are numbers of images [K, K]; the diagonal of `there` holds those of each label.
    """
    classes, images = len(there), np.maximum(np.diag(there), 1)[:, None]
    named = classes <= NAMED_CLASSES
    side = min(2.8 + 0.24 * classes, 7.0) if named else 5.0
    figure = Figure(figsize=(2 * side + 1.2, side), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, counts, title in (
        (left, there, "labels that are there"),
        (right, predicted, "labels that are predicted"),
    ):
        image = _share_matrix(axes, counts / images, class_names)
        axes.set_title(title)
    left.set_ylabel("images with the label" if named else "images with the label (number)")
    _share_bar(figure, image, [left, right], "share of the images with the row's label")
    return svg(
        figure,
        f"Two matrices of {classes} labels: for the images with each label, the share that has each other label, and "
        "the share for which it is predicted. The table below lists the most frequent wrong labels.",
    )


@matplotlib.rc_context(_STYLE)
def reliability(found: Calibration, *, labels: bool = False) -> Markup:
    """Return an SVG of the reliability diagram; `labels` as in `plot`."""
    figure = Figure(figsize=(4.6, 4.8), layout="constrained")
    plot(figure, found, labels=labels)
    return svg(
        figure,
        f"Reliability diagram of {found.count} {'labels' if labels else 'images'} in {len(found.bin_count)} bins: "
        f"mean confidence {found.confidence:.1%}, accuracy {found.accuracy:.1%}, "
        f"expected calibration error {found.ece:.1%}.",
    )


@matplotlib.rc_context(_STYLE)
def risk_coverage(found: Classification) -> Markup:
    """Return an SVG of the share of mistakes over the share of images that get a class, with some thresholds."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    coverage, risk = risk_coverage_curve(found)
    axes.plot(coverage, risk, color=SERIES[0])
    for threshold, named, wrong in zip(SHOWN, *counts_at(found, SHOWN), strict=True):
        if named:
            place = (named / found.count, wrong / named)
            axes.plot(*place, "o", color=SERIES[1], markersize=5)
            axes.annotate(f"{threshold:g}", place, (0, 6), textcoords="offset points", ha="center", fontsize=9)
    axes.set_title("Mistakes above a minimum confidence")
    axes.set_xlabel("images that get a class")
    axes.set_ylabel("wrong among these")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, min(max(1.25 * float(risk.max()), 0.01), 1.02))
    axes.grid(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=None))
    return svg(
        figure,
        f"Risk over coverage of {found.count} images: if every image gets a class, {risk[-1]:.1%} are wrong. The table "
        "below gives the numbers for some minimum confidences.",
    )


@matplotlib.rc_context(_STYLE)
def scatter(found: NumberScores, number: int) -> Markup:
    """Return an SVG of the predicted against the true values of one target, for at most `MOST_POINTS` images."""
    name, rows = found.class_names[number], np.flatnonzero(found.known)
    shown = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).round().astype(int))]
    truth, prediction = found.target[shown, number], found.prediction[shown, number]
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axline((truth[0], truth[0]), slope=1, color=INK, linewidth=1, linestyle="--")
    axes.plot(truth, prediction, "o", color=SERIES[0], markersize=3, alpha=0.6)
    axes.set_title(name if len(name) <= 40 else name[:39] + "…")
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.grid(True)
    return svg(
        figure,
        f"Predicted against true values of {name} for {len(shown)} images: R2 {found.target_r2[number]:.3f}, mean "
        f"absolute error {found.target_mae[number]:.4g}.",
    )


def _share_matrix(axes: Axes, share: np.ndarray, class_names: Sequence[str]) -> AxesImage:
    """Draw shares [K, K], with the names of the classes if they are few."""
    if len(share) <= NAMED_CLASSES:
        short = [name if len(name) <= 18 else name[:17] + "…" for name in class_names]
        axes.set_xticks(range(len(share)), short, rotation=90)
        axes.set_yticks(range(len(share)), short)
    return axes.imshow(share, cmap="cividis", norm=_share_scale(), interpolation="nearest")


def _share_scale() -> PowerNorm:
    """Return a scale of shares on which a few percent are visible."""
    return PowerNorm(0.5, 0, 1)


def _share_bar(figure: Figure, image: AxesImage, panels: list[Axes], label: str) -> None:
    bar = figure.colorbar(image, ax=panels, shrink=0.7, format=PercentFormatter(1, decimals=0))
    bar.set_ticks([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1])
    bar.set_label(label)


def svg(figure: Figure, describe: str, enlarged: float = 1.0) -> Markup:
    """Return the figure as an <svg> element that is at most as wide as the page and has the page's text colour."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs matplotlib cannot measure, the browser can draw
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    for number, color in enumerate(SERIES):
        text = text.replace(color, f"var(--series-{number})")
    head, drawing = text.split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head)
    assert box is not None  # matplotlib always writes one
    width = f"{enlarged * float(box[1].split()[2]):.6g}"
    return Markup(
        f'<svg role="img" aria-label="{escape(describe)}" viewBox="{box[1]}" style="width: {width}pt" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{drawing}'
    )


def picture(image: np.ndarray, *, side: int = 176) -> str:
    """Return uint8 [H, W, 3] as a data URI of at most `side` pixels; small images are stored without loss."""
    shown = Image.fromarray(image)
    buffer = io.BytesIO()
    if max(shown.size) <= 64:
        shown.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        shown.thumbnail((side, side), Image.Resampling.LANCZOS)
        shown.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return data_uri(buffer.getvalue(), kind)


def data_uri(data: bytes, kind: str) -> str:
    """Return an image file's bytes as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
