"""Table 4 of the follow-up: speed of parallel and sequential blocks, measured on this machine (section 3.3).

Each seed is another round of measurements. `vitrail` computes the branches of a frozen network together where that is
faster; accuracy does not matter here, so nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.depth import published
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, Scores, Study, mean_of

SIZES = ("Ti", "S", "B")
SEQUENTIAL, PARALLEL = "24x1", "12x2"
LITTLE = 5.0
"""Percent of the throughput that count as no gain: the follow-up reports none of note for large batches."""


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return the time of an image and the throughput of 24 blocks of Ti, S and B at 224 pixels in both shapes."""
    cells = []
    for metric in ("latency", "images/s"):
        for size in SIZES:
            for shape in (SEQUENTIAL, PARALLEL):
                cells.append(Cell(shape, size, published(f"{size}{shape}"), metric=metric))
    return cells


def paper() -> Sequence[Cell]:
    """Return the same networks: the table has no data and no training."""
    return laptop(LaptopData())


def _faster(scores: Scores) -> list[float]:
    """Return by how much more images two branches take in the same time, in percent, one image at a time."""
    return mean_of([_lead(scores[PARALLEL, size], scores[SEQUENTIAL, size]) for size in SIZES])


def _little(scores: Scores) -> list[float]:
    """Return by how much the lead in throughput stays below 5 percent."""
    lead = mean_of([_lead(scores[SEQUENTIAL, size], scores[PARALLEL, size]) for size in SIZES])
    return [LITTLE - abs(percent) for percent in lead]


def _lead(less: Sequence[float], more: Sequence[float]) -> list[float]:
    return [100 * (b / a - 1) for a, b in zip(less, more, strict=True)]


STUDY = Study(
    name="three-table4",
    where="Follow-up, Table 4",
    title="speed of parallel and sequential blocks",
    axis="width",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Single images are faster with two branches, in percent.", _faster, UNITS["latency"]),
        Claim("Throughput at the best batch size changes by less than 5 percent.", _little, UNITS["images/s"]),
    ),
)
