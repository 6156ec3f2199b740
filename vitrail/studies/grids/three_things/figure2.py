"""Figure 2 of the follow-up: parallel against sequential networks of 24 blocks, by width (section 3.3).

The paper trains the widest networks with LayerScale: "even though we used LS for this size".
"""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.depth import deep, published, tested
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, minus

SEQUENTIAL, PARALLEL = "24x1", "12x2"
WIDTHS = (32, 64, 96)
SIZES = ("Ti", "S", "B", "L")
WIDEST = "L"


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return three widths in both shapes."""
    shapes = (SEQUENTIAL, PARALLEL)
    return [cell for width in WIDTHS for shape in shapes for cell in tested(shape, float(width), deep(shape, width))]


def paper() -> Sequence[Cell]:
    """Return Ti, S, B and L in both shapes."""
    cells = []
    for size in SIZES:
        for shape in (SEQUENTIAL, PARALLEL):
            cells += tested(shape, size, published(f"{size}{shape}", layer_scale=size == WIDEST))
    return cells


def _more_for_wide(scores: Scores) -> list[float]:
    narrow, wide = (minus(scores, (PARALLEL, float(w)), (SEQUENTIAL, float(w))) for w in (WIDTHS[0], WIDTHS[-1]))
    return [b - a for a, b in zip(narrow, wide, strict=True)]


def _wide(scores: Scores) -> list[float]:
    return minus(scores, (PARALLEL, float(WIDTHS[-1])), (SEQUENTIAL, float(WIDTHS[-1])))


NAMES: dict[float | str, float | str] = {float(WIDTHS[0]): SIZES[0], float(WIDTHS[-1]): SIZES[-1]}
"""Width at laptop scale -> size of the paper."""
STUDY = Study(
    name="three-figure2",
    where="Follow-up, Figure 2",
    title="parallel against sequential networks of 24 blocks, by width",
    axis="width",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("The widest network is better with two branches.", _wide, paper=NAMES),
        Claim("The wider the network, the more it gains from two branches.", _more_for_wide, paper=NAMES),
    ),
)
