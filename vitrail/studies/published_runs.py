"""The papers' own trainings as stages: pre-training by a recipe, then fine-tuning at the rates of Table 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_source import HUB
from vitrail.data.benchmarks.vtab_tasks import TASKS
from vitrail.recipes.bit import hyperrule
from vitrail.recipes.paper_finetune import CONVOLUTIONAL_RATE, TABLE_4
from vitrail.recipes.registry import recipe
from vitrail.studies.claims import Column
from vitrail.studies.study import Cell, Stage, Trained, best_of, with_data
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
PRINTED = {
    "CIFAR10": "CIFAR-10", "CIFAR100": "CIFAR-100", "Pets": "Oxford-IIIT Pets", "Oxford-IIIT-Pets": "Oxford-IIIT Pets",
    "Flowers": "Oxford Flowers-102",
}  # fmt: skip
"""Name of a data set in some of the paper's tables -> its name in all tables here."""
SIDES, PHOTOGRAPH = {"cifar10": 32, "cifar100": 32}, 224
"""Data set of small images -> their side in pixels, and the side that stands for all photographs."""
RECIPES = dict(zip(("imagenet", "cifar100", "cifar10", "pets", "flowers102"), TABLE_4, strict=False))
"""Data set -> its row of Table 4."""


def pre_trained(name: str, data: str) -> Stage:
    """Return the pre-training of a recipe on a data set."""
    return Stage(with_data(recipe(name), path=data))


def fine_tuned(start: Stage, on: str, name: str | None = None) -> list[Stage]:
    """Return the fine-tuning of a network on a data set at each rate of Table 4; `name` is another recipe for it.

    The rate of 0.06 is for ResNets and hybrids only; ResNets are tuned by BiT's HyperRule, too (appendix B.1.1).
    """
    row, network = RECIPES[on], start.run.network
    run = with_data(recipe(name or row.recipe), path=on)
    rates = [rate for rate in row.grid if "R" in network or rate != CONVOLUTIONAL_RATE]
    tried = [replace(run, optim=replace(run.optim, lr=rate)) for rate in rates]
    if "R" in network and "+" not in network:
        rule = hyperrule(CATALOG[on].splits["train"], SIDES.get(on, PHOTOGRAPH))
        tried.append(replace(rule, data=run.data))
    return [Stage(each, start) for each in tried]


def on_each_set(start: Stage, imagenet: str | None = None) -> Iterator[tuple[str, Trained, list[Stage]]]:
    """Yield (title, metric, trainings) for each data set; `imagenet` is another recipe for ImageNet."""
    for on, title in TITLES.items():
        tried = fine_tuned(start, on, imagenet if on == IMAGENET else None)
        yield title, "top-1", tried
        if on == IMAGENET:
            yield REAL, "ReaL", tried


def by_set(row: str, at: Column, start: Stage) -> Iterator[Cell]:
    """Yield the accuracy of a network on each data set, each in a table of its own."""
    for title, metric, tried in on_each_set(start):
        yield best_of(row, at, tried, f"fine-tuned on {title}", metric)


def vtab(row: str, start: Stage) -> Iterator[Cell]:
    """Yield the accuracy of a network on each of the 19 tasks of VTAB."""
    for task in TASKS.values():
        run = with_data(run_of(task, recipe("paper/finetune-vtab"), HUB, 0), path=f"vtab/{task.name}")
        yield Cell(row, task.name, Stage(run, start), metric="top-1", what="VTAB, task by task")
