"""The paper's results on VTAB-1k: Table 9 in percent, its means by group, and Figure 2 of these means."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from vitrail.costs.published import published_table
from vitrail.data.benchmarks.vtab_tasks import GROUPS, TASKS, Group
from vitrail.plots import COLOURS, save_figure

MEAN = "mean"
"""The mean over all tasks, each with the same weight, whatever their group."""

PUBLISHED: dict[str, dict[str, float]] = {
    network: dict(zip(TASKS, values, strict=True))
    for network, (*values, _mean) in published_table("table9_vtab")["rows"].items()
}
"""Network (and its pre-training data) -> task -> top-1 on the test set, in percent."""

_QUOTED = published_table("figure2_quoted")
QUOTED: dict[str, dict[str, float]] = {
    f"{name}, quoted": dict(zip(TASKS, values, strict=True)) for name, values in _QUOTED["rows"].items()
}
"""Networks of other authors in Figure 2 whose results for every task are public, in the form of `PUBLISHED`."""
QUOTED_MEANS: dict[str, float] = {
    "BiT-L, quoted": float(published_table("table2_state_of_the_art")["rows"]["VTAB (19 tasks)"][3].split("±")[0]),
    **{f"{name}, quoted": mean for name, mean in _QUOTED["means"].items()},
}
"""Networks of other authors for which only the mean over all tasks is public."""


def means(scores: Mapping[str, float]) -> dict[Group | str, tuple[float, int]]:
    """Return group -> (mean, number of tasks) for the groups of the tasks in `scores` (task -> number), and MEAN."""
    found: dict[Group | str, tuple[float, int]] = {}
    for group in GROUPS:
        if values := [scores[name] for name, task in TASKS.items() if task.group == group and name in scores]:
            found[group] = statistics.fmean(values), len(values)
    if scores:
        found[MEAN] = statistics.fmean(scores.values()), len(scores)
    return found


def draw_means(rows: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw the means of `rows` (network -> task -> top-1 in percent) as in Figure 2 and write them to `path`.

    The suffix of `path` names the format. Only tasks that all networks have are counted, so bars can be compared. If
    these are all 19, the first panel shows `QUOTED_MEANS`, too.
    """
    from matplotlib.figure import Figure

    tasks = set.intersection(*(set(scores) for scores in rows.values()))
    found = {name: means({task: scores[task] for task in tasks}) for name, scores in rows.items()}
    titles = [title for title in (MEAN, *GROUPS) if all(title in each for each in found.values())]
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles, strict=True):
        heights = {name: each[title][0] for name, each in found.items()}
        if title == MEAN and len(tasks) == len(TASKS):
            heights |= QUOTED_MEANS
        values = list(heights.values())
        bars = axes.bar(range(len(values)), values, color=COLOURS[: len(values)], label=list(heights))
        axes.bar_label(bars, fmt="%.1f", fontsize="small")
        axes.set_ylim(max(min(values) - 10, 0), min(max(values) + 5, 100))
        axes.set_xticks([])
        count = next(iter(found.values()))[title][1]
        shown = "VTAB" if title == MEAN else title.capitalize()
        axes.set_title(f"{shown} ({count} task{'s' * (count > 1)})", fontsize="medium")
    figure.axes[0].set_ylabel("top-1, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    save_figure(figure, path)
