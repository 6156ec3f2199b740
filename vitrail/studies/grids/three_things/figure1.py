"""Figure 1 of the follow-up: accuracy by the number of branches, at an equal number of blocks (section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.depth import deep, published, tested
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, mean_of, minus

LAPTOP = ("24x1", "12x2", "8x3", "6x4")
PAPER = {"36 blocks": ("S36x1", "S18x2", "S12x3", "S9x4"), "60 blocks": ("S60x1", "S30x2", "S20x3")}
ROW = "24 blocks"


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return 24 blocks of width 64 in one to four branches."""
    return [cell for shape in LAPTOP for cell in tested(ROW, float(shape[-1]), deep(shape))]


def paper() -> Sequence[Cell]:
    """Return 36 and 60 blocks of S in one to four branches."""
    return [
        cell for row, names in PAPER.items() for name in names for cell in tested(row, float(name[-1]), published(name))
    ]


def _over_one(scores: Scores) -> list[float]:
    return minus(scores, (ROW, 2.0), (ROW, 1.0))


def _over_more(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (ROW, 2.0), (ROW, other)) for other in (3.0, 4.0)])


STUDY = Study(
    name="three-figure1",
    where="Follow-up, Figure 1",
    title="accuracy by number of branches",
    axis="branches",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Two branches are better than one.", _over_one, paper={ROW: "36 blocks"}),
        Claim("Two branches are better than three or four.", _over_more, paper={ROW: "36 blocks"}),
    ),
)
