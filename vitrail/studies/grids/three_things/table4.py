"""Table 4 of the follow-up: speed of parallel and sequential blocks, measured on this machine (section 3.3).

Each seed is another round of measurements. `vitrail` computes the branches of a frozen network together where that is
faster; accuracy does not matter here, so nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.depth import published
from vitrail.studies.study import UNITS, Cell, Claim, Given, Scores, Study, mean_of, minus

SIZES = ("Ti", "S", "B")
SEQUENTIAL, PARALLEL = "24x1", "12x2"


def laptop(given: Given) -> Sequence[Cell]:
    """Return the time of an image and the throughput of 24 blocks of Ti, S and B at 224 pixels in both shapes."""
    cells = []
    for metric in ("latency", "images/s"):
        for size in SIZES:
            for shape in (SEQUENTIAL, PARALLEL):
                cells.append(Cell(shape, size, published(f"{size}{shape}"), metric=metric))
    return cells


def paper() -> Sequence[Cell]:
    """Return the same networks: the table has no data and no training."""
    return laptop(Given())


def _faster(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (SEQUENTIAL, size), (PARALLEL, size)) for size in SIZES])


def _throughput(scores: Scores) -> list[float]:
    """Return the lead of two branches in percent."""
    leads = [
        [100 * (b / a - 1) for a, b in zip(scores[SEQUENTIAL, size], scores[PARALLEL, size], strict=True)]
        for size in SIZES
    ]
    return mean_of(leads)


STUDY = Study(
    name="three-table4",
    where="Follow-up, Table 4",
    title="speed of parallel and sequential blocks",
    axis="width",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Single images take less time with two branches.", _faster, UNITS["latency"]),
        Claim("Large batches gain throughput from two branches, in percent.", _throughput, UNITS["images/s"]),
    ),
)
