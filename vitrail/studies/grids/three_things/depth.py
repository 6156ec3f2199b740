"""The deep networks of the follow-up's section 3 at laptop scale, shared by its figures and tables, and their recipes.

"24x1" is 24 sequential blocks, "12x2" the same number of blocks in 12 layers of two branches.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.recipes.registry import recipe
from vitrail.studies.laptop import NETWORKS, pre_training
from vitrail.studies.study import Cell, Counted, Stage

EPOCHS = 4
WIDTH = 64
COUNTS: tuple[Counted, ...] = ("parameters", "MACs", "memory")


def deep(shape: str, width: int = WIDTH, layer_scale: bool = False) -> Stage:
    """Return a network of layers x branches with patches of 8 pixels, trained and tested with labels."""
    small = NETWORKS["ViT-64/8"]["vit"]
    vit = replace(small, width=width, heads=width // 32, mlp_dim=4 * width, depth=None)
    run = pre_training("ViT-64/8", EPOCHS, tested=True)
    return Stage(replace(run, model=f"Ti{shape}/8", vit=replace(vit, layer_scale=1e-4 if layer_scale else None)))


def baseline(size: str, suffix: str = "-300") -> Stage:
    """Return the follow-up's training of a network of its Table 1, such as "b16", on ImageNet."""
    run = recipe(f"three-things/vit-{size}{suffix}")
    return Stage(replace(run, data=replace(run.data, path="imagenet")))


def published(network: str, layer_scale: bool = False) -> Stage:
    """Return the follow-up's training of a network such as "S18x2" on ImageNet for 300 epochs."""
    return baseline(network.lower(), f"-300{'-ls' * layer_scale}")


def tested(row: str, at: float | str, stage: Stage, counts: tuple[Counted, ...] = ()) -> list[Cell]:
    """Return the accuracy on the test images of a network's own classes, and what it costs."""
    costs = [Cell(row, at, stage, metric=metric) for metric in counts]
    return [Cell(row, at, stage, metric="top-1"), *costs]
