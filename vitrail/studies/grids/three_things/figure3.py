"""Figure 3 of the follow-up: parallel against sequential networks, by the number of blocks (section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.depth import deep, published, tested
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, minus

BLOCKS = (6, 12, 24, 36)
SEQUENTIAL, PARALLEL = "sequential", "two branches"
PAPER = {"S": (24, 36, 48, 60), "B": (24, 36)}


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return four numbers of blocks of width 64 in both shapes."""
    cells = []
    for blocks in reversed(BLOCKS):
        cells += tested(SEQUENTIAL, float(blocks), deep(f"{blocks}x1"))
        cells += tested(PARALLEL, float(blocks), deep(f"{blocks // 2}x2"))
    return cells


def paper() -> Sequence[Cell]:
    """Return S and B with 24 to 60 blocks in both shapes."""
    cells = []
    for size, numbers in PAPER.items():
        for blocks in numbers:
            cells += tested(f"{size}, {SEQUENTIAL}", float(blocks), published(f"{size}{blocks}x1"))
            cells += tested(f"{size}, {PARALLEL}", float(blocks), published(f"{size}{blocks // 2}x2"))
    return cells


def _grows(scores: Scores) -> list[float]:
    few, many = (minus(scores, (PARALLEL, float(n)), (SEQUENTIAL, float(n))) for n in (BLOCKS[0], BLOCKS[-1]))
    return [b - a for a, b in zip(few, many, strict=True)]


NAMES: dict[float | str, float | str] = {
    SEQUENTIAL: f"S, {SEQUENTIAL}",
    PARALLEL: f"S, {PARALLEL}",
    float(BLOCKS[0]): float(PAPER["S"][0]),
    float(BLOCKS[-1]): float(PAPER["S"][-1]),
}
"""Row and number of blocks at laptop scale -> those of the paper."""
STUDY = Study(
    name="three-figure3",
    where="Follow-up, Figure 3",
    title="parallel against sequential networks, by number of blocks",
    axis="blocks",
    laptop=laptop,
    paper=paper,
    claims=(Claim("The deeper the network, the more it gains from two branches.", _grows, paper=NAMES),),
)
