"""Table 3 of the follow-up: more blocks against more width, at equal parameters (section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vitrail.studies.grids.three_things.depth import COUNTS, EPOCHS, WIDTH, baseline, deep, published, tested
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, mean_of, minus

AT = f"{EPOCHS} epochs"
SCALED = f"{AT} with LayerScale"
NARROW, NARROW_PARALLEL, WIDE = "width 64, 24x1", "width 64, 12x2", "width 128, 6x1"
PAPER = ("S48x1", "S24x2", "B12x1", "B36x1", "B18x2", "L24x1")


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return 24 blocks of width 64 in both shapes, and 6 of width 128, which have as many parameters.

    In so short a training, deep networks need LayerScale to compete, so there are both.
    """
    networks = {NARROW: ("24x1", WIDTH), NARROW_PARALLEL: ("12x2", WIDTH), WIDE: ("6x1", 2 * WIDTH)}
    cells = []
    for at, layer_scale in ((AT, False), (SCALED, True)):
        for row, (shape, width) in networks.items():
            cells += tested(row, at, deep(shape, width, layer_scale), () if layer_scale else COUNTS)
    return cells


def paper() -> Sequence[Cell]:
    """Return S48 in both shapes beside B12, and B36 in both shapes beside L24."""
    cells = []
    for name in PAPER:
        cells += tested(name, "300 epochs", baseline("b16") if name == "B12x1" else published(name), COUNTS)
    return cells


def _deeper(at: str) -> Callable[[Scores], list[float]]:
    def difference(scores: Scores) -> list[float]:
        return mean_of([minus(scores, (row, at), (WIDE, at)) for row in (NARROW, NARROW_PARALLEL)])

    return difference


NAMES = {NARROW: "S48x1", NARROW_PARALLEL: "S24x2", WIDE: "B12x1", AT: "300 epochs"}
"""Row and column at laptop scale -> those of the paper."""
STUDY = Study(
    name="three-table3",
    where="Follow-up, Table 3",
    title="more blocks (24x1, 12x2) against more width (6x1)",
    axis="length of training",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("More blocks are better than more width, at equal parameters.", _deeper(AT), paper=NAMES),
        Claim("With LayerScale, more blocks are better than more width.", _deeper(SCALED)),
    ),
)
