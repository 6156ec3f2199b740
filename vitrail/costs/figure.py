"""Figure 12 of the paper, drawn from measurements: speed and largest batch that fits, by image size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter

from vitrail.plots import COLOURS, save_figure

STYLES = {"inference": "-", "training": "--"}
"""The palette of Okabe and Ito, distinguishable with every kind of colour blindness."""


@dataclass(frozen=True)
class Curve:
    """One model in one mode: images/s and the largest batch at each image size in pixels."""

    model: str
    mode: str
    sizes: list[int]
    images_per_second: list[float]
    largest_batch: list[int]


def draw_speed(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Write the figure to `path`, in the format its suffix names.

    The left plot shows images/s at the best batch size, the right plot the largest batch, by the side of the image on
    logarithmic axes. Solid lines are inference, dashed lines training. Each model has one colour.
    """
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    models = list(dict.fromkeys(curve.model for curve in curves))
    for curve in curves:
        colour = COLOURS[models.index(curve.model) % len(COLOURS)]
        style: dict[str, Any] = {"color": colour, "linestyle": STYLES[curve.mode], "marker": "o", "markersize": 3}
        label = f"{curve.model}, {curve.mode}"
        speed.plot(curve.sizes, curve.images_per_second, label=label, **style)
        memory.plot(curve.sizes, [max(count, 1) for count in curve.largest_batch], label=label, **style)
    sizes = sorted({size for curve in curves for size in curve.sizes})
    for axes, what in ((speed, "images/s, best batch size"), (memory, "largest batch that fits")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(_Plain())
        axes.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.5)))
        axes.set_xlabel("side of the image, pixels")
        axes.set_ylabel(what)
        axes.grid(alpha=0.2)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, path)


class _Plain(LogFormatter):
    """Labels written in full: "600" and "20,000"."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,.6g}" if super().__call__(x, pos) else ""
