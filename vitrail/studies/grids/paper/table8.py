"""Table 8: kinds of position embeddings, and where they are added (appendix D.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitrail.costs.published import published
from vitrail.recipes.registry import recipe
from vitrail.studies.laptop import pre_training
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, Scores, Stage, Study, mean_of, minus

EPOCHS = 4
NONE, PLAIN = "no positions", "at the input"
KINDS = {NONE: "none", "1-D": "1d", "2-D": "2d", "relative": "relative"}
PLACES = {PLAIN: "input", "at every layer": "every", "at every layer, shared": "shared"}


def _grid() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (row, column, settings): the paper has relative positions, and none, in one place only."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    for place, where in PLACES.items():
        for kind, positions in KINDS.items():
            if positions in ("1d", "2d") or where == "input":
                found.append((kind, place, {"positions": positions, "place": where}))
    return found


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return a network with each kind in each place."""
    return [Cell(kind, place, Stage(pre_training("ViT-64/4", EPOCHS, **vit))) for kind, place, vit in _grid()]


def paper() -> Sequence[Cell]:
    """Return B/16 on JFT-300M, 7 epochs, with each kind in each place."""
    base = recipe("paper/vit-b16-jft")
    base = replace(base, data=replace(base.data, path="jft300m"))
    return [Cell(kind, place, Stage(replace(base, vit=replace(base.vit, **vit)))) for kind, place, vit in _grid()]


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the numbers of Table 8 in percent."""
    found: dict[tuple[str, str, float | str], float] = {}
    for name, *values in published("table8_position_embeddings")["rows"]:
        kind = NONE if name == "none" else name
        printed = zip(PLACES, values, strict=True)
        found |= {(UNITS["5-shot"], kind, place): 100 * value for place, value in printed if value is not None}
    return found


def _others(scores: Scores) -> list[tuple[str, float | str]]:
    return [place for place in scores if place[0] != NONE]


def _needed(scores: Scores) -> list[float]:
    """Return the mean advantage of having positions."""
    return mean_of([minus(scores, place, (NONE, PLAIN)) for place in _others(scores)])


def _alike(scores: Scores) -> list[float]:
    """Return by how much the advantage of having positions exceeds the largest difference between their kinds."""
    seeds = range(len(next(iter(scores.values()))))
    kinds = [[scores[place][seed] for place in _others(scores)] for seed in seeds]
    return [gain - (max(values) - min(values)) for gain, values in zip(_needed(scores), kinds, strict=True)]


STUDY = Study(
    name="table8",
    where="Table 8",
    title="kinds of position embeddings, and where they are added",
    axis="where positions are added",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("A network without positions is worse than those with positions, on average.", _needed),
        Claim("The kinds of positions differ less from each other than from none.", _alike),
    ),
    published=printed(),
)
