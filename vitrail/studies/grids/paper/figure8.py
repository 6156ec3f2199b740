"""Figure 8: one dimension of the network scaled at a time, from a base of the same shape (appendix D.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from typing import Any

from vitrail.costs.count import macs
from vitrail.model.variants import variant
from vitrail.recipes.registry import recipe
from vitrail.studies.laptop import SIDE, pre_training
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Stage, Study
from vitrail.training.run import Run

EPOCHS = 3
DEPTH, WIDTH, MLP, PATCH, ALL = "depth", "width", "MLP width", "patch size", "all"
BASE = {"depth": 3, "width": 128, "heads": 4, "mlp_dim": 256, "patch": 8}
LAPTOP: dict[str, list[dict[str, Any]]] = {
    DEPTH: [{"depth": 1}, {"depth": 6}, {"depth": 12}],
    WIDTH: [{"width": 64, "heads": 2}, {"width": 192, "heads": 6}, {"width": 256, "heads": 8}],
    MLP: [{"mlp_dim": 128}, {"mlp_dim": 512}, {"mlp_dim": 1024}],
    PATCH: [{"patch": 16}, {"patch": 4}],
    ALL: [
        {"depth": 1, "width": 64, "heads": 2, "mlp_dim": 128, "patch": 16},
        {"depth": 4, "width": 160, "heads": 5, "mlp_dim": 320, "patch": 8},
        {"depth": 4, "width": 160, "heads": 5, "mlp_dim": 320, "patch": 4},
    ],
}
PAPER_BASE = {"depth": 8, "width": 1024, "heads": 16, "mlp_dim": 2048, "patch": 32}
PAPER: dict[str, list[dict[str, Any]]] = {
    DEPTH: [{"depth": depth} for depth in (4, 12, 16, 32, 64)],
    WIDTH: [{"width": width, "heads": width // 64} for width in (256, 512, 2048)],
    MLP: [{"mlp_dim": width} for width in (512, 1024, 4096, 8192)],
    PATCH: [{"patch": patch} for patch in (56, 16, 8)],
    ALL: [{"depth": 4, "width": 512, "heads": 8, "mlp_dim": 1024, "patch": 56},
          {"depth": 16, "width": 1536, "heads": 24, "mlp_dim": 3072, "patch": 16}],
}  # fmt: skip
"""The paper prints the base alone; the values around it are the powers of two near those of its figure."""


def _grid(base: Run, values: Mapping[str, Any], scaled: Mapping[str, list[dict[str, Any]]], side: int) -> list[Cell]:
    """Return the base, on every line of the figure, and the networks around it, by their compute relative to it."""

    def network(changes: Mapping[str, Any]) -> tuple[Run, int]:
        run = replace(base, vit=replace(base.vit, **{**values, **changes}))
        return run, macs(variant(run.network, **run.vit.changes(), image_size=(side, side)))

    start, unit = network({})
    cells = [Cell(name, 1.0, Stage(start)) for name in scaled]
    for name, all_changes in scaled.items():
        for changes in all_changes:
            run, cost = network(changes)
            cells.append(Cell(name, float(f"{cost / unit:.3g}"), Stage(run)))
    return cells


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return 15 networks around one of 3 blocks of width 128."""
    return _grid(pre_training("ViT-128/8", EPOCHS), BASE, LAPTOP, SIDE)


def paper() -> Sequence[Cell]:
    """Return the networks around one of 8 blocks of width 1024 on JFT-300M, 7 epochs."""
    base = recipe("paper/vit-b32-jft")
    return _grid(replace(base, data=replace(base.data, path="jft300m")), PAPER_BASE, PAPER, 224)


def _slope(scores: Scores, name: str) -> list[float]:
    """Return the points gained per doubling of the compute, from the cheapest to the most expensive network."""
    places = sorted(float(at) for row, at in scores if row == name)
    few, many = scores[name, places[0]], scores[name, places[-1]]
    return [(b - a) / log2(places[-1] / places[0]) for a, b in zip(few, many, strict=True)]


def _over_width(name: str) -> Any:
    return lambda scores: [a - b for a, b in zip(_slope(scores, name), _slope(scores, WIDTH), strict=True)]


STUDY = Study(
    name="figure8",
    where="Figure 8",
    title="depth, width, MLP width and patch size scaled one at a time",
    axis="compute relative to the base network",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("More depth gains more than more width, for the same compute.", _over_width(DEPTH)),
        Claim("Smaller patches gain more than more width, for the same compute.", _over_width(PATCH)),
        Claim("Scaling all dimensions gains more than more width, for the same compute.", _over_width(ALL)),
    ),
    log=True,
)
