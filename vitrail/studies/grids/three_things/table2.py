"""Table 2 of the follow-up: LayerScale in deep sequential and parallel networks (section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.depth import deep, published, tested
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, mean_of, minus

WITHOUT, WITH = "without LayerScale", "with LayerScale"
SHAPES = ("24x1", "12x2")
PAPER = ("S36x1", "S18x2", "B36x1", "B18x2")


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return 24 blocks of width 64 in one and two branches, without and with LayerScale."""
    cells = []
    for at, layer_scale in ((WITHOUT, False), (WITH, True)):
        for shape in SHAPES:
            cells += tested(shape, at, deep(shape, layer_scale=layer_scale))
    return cells


def paper() -> Sequence[Cell]:
    """Return S and B with 36 blocks in one and two branches, without and with LayerScale."""
    cells = []
    for name in PAPER:
        for at, layer_scale in ((WITHOUT, False), (WITH, True)):
            cells += tested(name, at, published(name, layer_scale))
    return cells


def _helps(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (shape, WITH), (shape, WITHOUT)) for shape in SHAPES])


def _levels(scores: Scores) -> list[float]:
    """Return by how much LayerScale shrinks the lead of two branches."""
    without, with_it = (minus(scores, (SHAPES[1], at), (SHAPES[0], at)) for at in (WITHOUT, WITH))
    return [abs(a) - abs(b) for a, b in zip(without, with_it, strict=True)]


NAMES = dict(zip(SHAPES, ("B36x1", "B18x2"), strict=True))
"""Network at laptop scale -> network of the paper."""
STUDY = Study(
    name="three-table2",
    where="Follow-up, Table 2",
    title="LayerScale in deep networks, in sequence (24x1) and in two branches (12x2)",
    axis="LayerScale",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("LayerScale helps deep networks.", _helps, paper=NAMES),
        Claim("LayerScale makes the two shapes more alike.", _levels, paper=NAMES),
    ),
)
