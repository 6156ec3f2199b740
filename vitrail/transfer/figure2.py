"""Figure 2 of the paper, drawn from measurements: VTAB-1k over all tasks and by group, beside what is published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from vitrail.costs.figure import COLOURS
from vitrail.data.benchmarks.vtab import GROUPS
from vitrail.transfer.table9 import MEAN, means


def draw(rows: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write the figure to `path`, in the format its suffix names.

    `rows` are network -> task -> top-1 in percent. Only the tasks that all of them have are counted, so that bars side
    by side are of the same tasks.
    """
    tasks = set.intersection(*(set(scores) for scores in rows.values()))
    found = {name: means({task: scores[task] for task in tasks}) for name, scores in rows.items()}
    titles = [title for title in (MEAN, *GROUPS) if all(title in each for each in found.values())]
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles, strict=True):
        values = [each[title][0] for each in found.values()]
        bars = axes.bar(range(len(values)), values, color=COLOURS[: len(values)], label=list(found))
        axes.bar_label(bars, fmt="%.1f", fontsize="small")
        axes.set_ylim(max(min(values) - 10, 0), min(max(values) + 5, 100))
        axes.set_xticks([])
        count = next(iter(found.values()))[title][1]
        shown = "VTAB" if title == MEAN else title.capitalize()
        axes.set_title(f"{shown} ({count} task{'s' * (count > 1)})", fontsize="medium")
    figure.axes[0].set_ylabel("top-1, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(path, dpi=144)
