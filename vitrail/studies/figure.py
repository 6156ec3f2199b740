"""The figure of a study: the paper's axes, one colour for each family, bars for the deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from vitrail.plots import COLOURS, save_figure
from vitrail.studies.claims import MEAN, Place
from vitrail.studies.study import COUNTED, UNITS, Study
from vitrail.studies.table import Table, Tables, column

MARKERS = "osDv^P"
"""Markers of the rows, after each round through the colours."""
PANELS = 3
"""Number of panels side by side."""
MOST_TICKS = 6
"""Number of columns up to which each has a tick of its own."""
SHORT = 4
"""Number of characters up to which a tick's label stays level."""
SPREAD = 0.42
"""Share of a row's height over which its points are spread."""
NARROW = 4
"""A range whose end is at most this factor above its start needs no logarithmic axis."""
MOST_BESIDE, MARK, LETTER = 5, 0.6, 0.075
"""Entries of the legend in a line at most; inches of a mark with its margins, and of a letter."""
ROW = 0.42
"""Inches for a row of points with one row for each network."""


def draw_study(found: Tables, path: Path) -> None:
    """Draw the figure of a study in the format that the suffix names: a panel for each table."""
    study, tables = found.study, {table.name: table for table in found.tables}
    accuracies = [table for name, table in tables.items() if name not in {UNITS[metric] for metric in COUNTED}]
    shown = [tables[MEAN]] if MEAN in tables else accuracies or list(tables.values())
    panels: list[tuple[Table, Table | None]] = [(table, None) for table in shown]
    if study.over:
        panels = [(shown[0], tables[UNITS[metric]]) for metric in study.over]
    wide = 2 if len(panels) == 4 else min(len(panels), PANELS)
    high = math.ceil(len(panels) / wide)
    tall = 3.6
    if study.scatter is None and not study.over and any(isinstance(at, str) for at in shown[0].columns):
        tall = min(max(ROW * len(shown[0].rows) + 0.9, 1.6), 6.0)
    size = (6.4, tall + 0.8) if len(panels) == 1 else (4.2 * wide, tall * high + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    every = list(figure.subplots(high, wide, squeeze=False).flat)
    for axes, (table, against) in zip(every, panels, strict=False):
        if against is not None:
            _points(axes, table, against)
        elif study.scatter is not None:
            _scatter(axes, table, *study.scatter)
        elif any(isinstance(at, str) for at in table.columns):
            _dots(axes, table)
        else:
            _lines(axes, table, study)
        axes.grid(alpha=0.2)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    handles, labels = every[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=_columns(labels, size[0]), fontsize="small",
                      frameon=False)  # fmt: skip
    seeds = len({result.seed for result in found.results})
    bars = f"\nbars: standard deviation over {seeds} seeds" * (seeds > 1)
    figure.suptitle(f"{study.where}: {study.title}{bars}", fontsize="medium")
    save_figure(figure, path)


def _columns(labels: Sequence[str], inches: float) -> int:
    """Return the number of legend entries that stand beside each other in a figure of this width."""
    return max(1, min(len(labels), MOST_BESIDE, int(inches / (MARK + LETTER * max(map(len, labels))))))


def label(name: str) -> str:
    """Return the name of a table with its unit; that of a transfer has none."""
    if name == MEAN:
        return "mean of the data sets, top-1 in %"
    return name if name in UNITS.values() or "%" in name else f"{name}, top-1 in %"


def _style(number: int) -> dict[str, Any]:
    marker = MARKERS[number // len(COLOURS) % len(MARKERS)]
    return {"color": COLOURS[number % len(COLOURS)], "marker": marker, "markersize": 4, "capsize": 3}


def _bars(values: list[float]) -> list[float]:
    return [0.0 if math.isnan(value) else value for value in values]


def _lines(axes: Axes, table: Table, study: Study) -> None:
    """Draw each row over the columns, which are numbers."""
    means = table.means
    for number, row in enumerate(table.rows):
        points = [(at, *means[row, at]) for at in table.columns if (row, at) in means]
        if points:
            x, y, deviation = (list(values) for values in zip(*points, strict=True))
            axes.errorbar(x, y, yerr=_bars(deviation), label=row, **_style(number))
    if study.log:
        _logarithmic(axes)
    if len(table.columns) <= MOST_TICKS:
        labels = [column(at) for at in table.columns]
        turn = 30 if max(map(len, labels)) > SHORT else 0
        axes.set_xticks([float(at) for at in table.columns], labels, rotation=turn, fontsize="small")
    axes.set_xlabel(study.axis)
    axes.set_ylabel(label(table.name), fontsize="small")


def _dots(axes: Axes, table: Table) -> None:
    """Draw a line of points for each row, one colour for each column, because words have no order.

    The columns stand a little apart in height, so that bars of equal accuracies do not cover each other.
    """
    means, rows = table.means, list(table.rows)
    for number, at in enumerate(table.columns):
        beside = SPREAD * ((number + 0.5) / len(table.columns) - 0.5)
        points = [(place + beside, *means[row, at]) for place, row in enumerate(rows) if (row, at) in means]
        if points:
            y, x, deviation = (list(values) for values in zip(*points, strict=True))
            axes.errorbar(x, y, xerr=_bars(deviation), label=str(at), linestyle="none", **_style(number))
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label(table.name), fontsize="small")


def _logarithmic(axes: Axes) -> None:
    low, high = axes.dataLim.intervalx
    if low > 0 and high / low > NARROW:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())


def _points(axes: Axes, table: Table, against: Table) -> None:
    """Draw each row over what its networks cost, in the order of the cost."""
    for number, row in enumerate(table.rows):
        places: list[Place] = [place for place in table.scores if place[0] == row and place in against.scores]
        points = sorted((against.means[place][0], *table.means[place], str(place[1])) for place in places)
        if points:
            x, y, deviation, names = (list(values) for values in zip(*points, strict=True))
            axes.errorbar(x, y, yerr=_bars(deviation), label=row, **_style(number))
            for at, value, name in zip(x, y, names, strict=True):
                axes.annotate(name, (at, value), (4, 4), textcoords="offset points", fontsize="x-small")
    axes.margins(x=0.12)  # room for the names
    _logarithmic(axes)
    axes.set_xlabel(against.name, fontsize="small")
    axes.set_ylabel(label(table.name), fontsize="small")


def _scatter(axes: Axes, table: Table, across: str, up: str) -> None:
    """Draw a point for each row, one column over another."""
    means = table.means
    for number, row in enumerate(row for row in table.rows if {(row, across), (row, up)} <= means.keys()):
        (x, right), (y, above) = means[row, across], means[row, up]
        axes.errorbar([x], [y], _bars([above]), _bars([right]), label=row, linestyle="none", **_style(number))
    axes.set_xlabel(f"{across}: {table.name}", fontsize="small")
    axes.set_ylabel(f"{up}: {table.name}", fontsize="small")


def draw_tiles(found: Tables, path: Path) -> None:
    """Draw the similarity of the position embeddings of all networks of the first seed (Figure 10).

    Their run folders are below the folder of `path`.
    """
    from vitrail.inspection.figures.weights import draw_positions
    from vitrail.inspection.positions import position_tiles
    from vitrail.model.vit import ViT
    from vitrail.training.folder import RunFolder
    from vitrail.weights.load import load

    first = found.results[0].seed
    runs = {f"{one.cell.row}, {column(one.cell.at)}": one.run for one in found.results if one.run and one.seed == first}
    networks = {label: load(RunFolder(path.parent / run).last) for label, run in runs.items()}
    tiles = {label: position_tiles(network) for label, network in networks.items() if isinstance(network, ViT)}
    save_figure(draw_positions(tiles) if tiles else Figure(), path)
