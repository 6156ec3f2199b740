"""The paper's Table 9: VTAB-1k task by task, in percent, and the means that it and Figure 2 are made of. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from vitrail.data.benchmarks.vtab import GROUPS, TASKS, Group

MEAN = "mean"
"""Of all tasks, whatever their group (each counts the same)."""

_ROWS = {
    "ViT-H/14 (JFT)": (
        *(95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9),
        *(83.3, 96.7, 91.4, 76.6),
        *(91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
    ),
    "ViT-L/16 (JFT)": (
        *(95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4),
        *(83.6, 96.5, 89.7, 77.1),
        *(86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
    ),
    "ViT-L/16 (I21k)": (
        *(90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9),
        *(82.5, 95.6, 85.2, 75.3),
        *(70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
    ),
}

PUBLISHED: dict[str, dict[str, float]] = {
    network: dict(zip(TASKS, values, strict=True)) for network, values in _ROWS.items()
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
