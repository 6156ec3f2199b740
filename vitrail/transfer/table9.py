"""The paper's Table 9: VTAB-1k task by task, in percent, and the means that it and Figure 2 are made of. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from vitrail.costs.published import published
from vitrail.data.benchmarks.vtab import GROUPS, TASKS, Group

MEAN = "mean"
"""Of all tasks, whatever their group (each counts the same)."""

PUBLISHED: dict[str, dict[str, float]] = {
    network: dict(zip(TASKS, values, strict=True))
    for network, (*values, _mean) in published("table9_vtab")["rows"].items()
}
"""Network (and what it was pre-trained on) -> task -> top-1 on the test set, in percent."""


def means(scores: Mapping[str, float]) -> dict[Group | str, tuple[float, int]]:
    """Return group -> (mean, number of tasks it is of), for the groups that `scores` (task -> number) has, and MEAN."""
    found: dict[Group | str, tuple[float, int]] = {}
    for group in GROUPS:
        if values := [scores[name] for name, task in TASKS.items() if task.group == group and name in scores]:
            found[group] = statistics.fmean(values), len(values)
    if scores:
        found[MEAN] = statistics.fmean(scores.values()), len(scores)
    return found
