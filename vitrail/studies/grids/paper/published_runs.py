"""The paper's own trainings as stages: pre-training by a recipe, then fine-tuning at the rates of Table 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_source import HUB
from vitrail.data.benchmarks.vtab_tasks import TASKS
from vitrail.recipes.bit import hyperrule
from vitrail.recipes.paper_finetune import CONVOLUTIONAL_RATE, TABLE_4
from vitrail.recipes.registry import recipe
from vitrail.studies.study import UNITS, Cell, Stage
from vitrail.transfer.vtab_runs import run_of

JFT, IMAGENET_21K, IMAGENET = "jft300m", "imagenet21k", "imagenet"
REAL = "ImageNet ReaL"
"""The same fine-tuned network by other labels of the same images."""
TITLES = {
    "imagenet": "ImageNet",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "pets": "Oxford-IIIT Pets",
    "flowers102": "Oxford Flowers-102",
}
"""Data set that networks are fine-tuned on -> its name in the tables."""
SIDES, PHOTOGRAPH = {"cifar10": 32, "cifar100": 32}, 224
"""Data set of small images -> their side in pixels, and the side that stands for all photographs."""
RECIPES = dict(zip(("imagenet", "cifar100", "cifar10", "pets", "flowers102"), TABLE_4, strict=False))
"""Data set -> its row of Table 4."""


def pre_trained(name: str, data: str, **changes: object) -> Stage:
    """Return the pre-training of a recipe on a data set."""
    run = recipe(name)
    return Stage(replace(run, data=replace(run.data, path=data), **changes))  # type: ignore[arg-type]


def fine_tuned(start: Stage, on: str, name: str | None = None) -> tuple[Stage, ...]:
    """Return the fine-tuning of a network on a data set at each rate of Table 4; `name` is another recipe for it.

    The rate of 0.06 is for ResNets and hybrids only; ResNets are tuned by BiT's HyperRule, too (appendix B.1.1).
    """
    row = RECIPES[on]
    run = recipe(name or row.recipe)
    run = replace(run, data=replace(run.data, path=on))
    convolutional = "R" in start.run.network
    rates = [rate for rate in row.grid if convolutional or rate != CONVOLUTIONAL_RATE]
    tried = [replace(run, optim=replace(run.optim, lr=rate)) for rate in rates]
    if convolutional and "+" not in start.run.network:
        rule = hyperrule(CATALOG[on].splits["train"], SIDES.get(on, PHOTOGRAPH))
        tried.append(replace(rule, data=run.data))
    return tuple(Stage(each, start) for each in tried)


def by_set(row: str, at: float | str, start: Stage, titles: Mapping[str, str] = TITLES) -> list[Cell]:
    """Return the accuracy of a network on each data set, each in a table of its own."""
    cells = []
    for on, title in titles.items():
        tried = fine_tuned(start, on)
        cells.append(Cell(row, at, tried[0], tried[1:], "top-1", f"fine-tuned on {title}"))
        if on == IMAGENET:
            cells.append(replace(cells[-1], metric="ReaL", what=f"fine-tuned on {REAL}"))
    return cells


def in_a_row(row: str, start: Stage, imagenet: str, titles: Mapping[str, str] = TITLES) -> list[Cell]:
    """Return the accuracy of a network on each data set, as a row of a table; `imagenet` is the recipe for ImageNet."""
    cells = []
    for on, title in titles.items():
        tried = fine_tuned(start, on, imagenet if on == IMAGENET else None)
        cells.append(Cell(row, title, tried[0], tried[1:], "top-1"))
        if on == IMAGENET:
            cells.append(replace(cells[-1], at=REAL, metric="ReaL", what=UNITS["top-1"]))
    return cells


def vtab(row: str, start: Stage) -> list[Cell]:
    """Return the accuracy of a network on each of the 19 tasks of VTAB."""
    base = recipe("paper/finetune-vtab")
    cells = []
    for task in TASKS.values():
        run = run_of(task, base, HUB, 0)
        stage = Stage(replace(run, data=replace(run.data, path=f"vtab/{task.name}")), start)
        cells.append(Cell(row, task.name, stage, metric="top-1", what="VTAB, task by task"))
    return cells
