"""Table 5 of the follow-up: a part of the network fine-tuned at a higher resolution on its own data (section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.studies.grids.three_things.tuning import ALL, PARTS, SIZES, part, published_part
from vitrail.studies.laptop import LARGER_SIDE, SIDE
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, MetricName, Scores, Study, minus

METRICS: tuple[MetricName, ...] = ("top-1", "stored", "memory", "step")
AT = f"{SIDE} to {LARGER_SIDE} pixels"


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return a network tuned at 48 pixels, after 32, on the classes it knows, with its classifier kept."""
    cells = [part(name, AT, "up", LARGER_SIDE, keep_head=True) for name in PARTS]
    return [replace(cell, metric=metric) for cell in cells for metric in METRICS]


def paper() -> Sequence[Cell]:
    """Return the baselines of Table 1, with LayerScale, tuned at 384 pixels on ImageNet."""
    return [published_part(name, size, name, "imagenet", size) for size in SIZES for name in PARTS]


def _attention(scores: Scores) -> list[float]:
    return minus(scores, ("attention", AT), ("FFN", AT))


def _as_good(scores: Scores) -> list[float]:
    """Return by how much attention stays within a point of everything."""
    return [1 + difference for difference in minus(scores, ("attention", AT), (ALL, AT))]


def _smaller(scores: Scores) -> list[float]:
    return minus(scores, (ALL, AT), ("attention", AT))


STUDY = Study(
    name="three-table5",
    where="Follow-up, Table 5",
    title="fine-tuning a part of the network at a higher resolution",
    axis="resolution",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Tuning attention is better than tuning the FFNs.", _attention, paper={AT: "s16"}),
        Claim("Tuning attention is within a point of tuning everything.", _as_good, paper={AT: "s16"}),
        Claim("Tuning attention stores less than tuning everything.", _smaller, UNITS["stored"]),
        Claim("Tuning attention takes less memory than tuning everything.", _smaller, UNITS["memory"]),
        Claim("Tuning attention takes less time than tuning everything.", _smaller, UNITS["step"]),
    ),
)
