"""Table 6 of the follow-up: a part of the network fine-tuned on other data sets (section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.studies.grids.three_things.tuning import ALL, PARTS, SIZES, part, published_part
from vitrail.studies.laptop import LABELS, LARGER_SIDE, SIDE
from vitrail.studies.study import Cell, Claim, Given, Scores, Study, mean_of, minus

PAPER = ("inaturalist2018", "inaturalist2019", "cars", "cifar100", "cifar10", "flowers102")


def _at(on: str, side: int) -> str:
    return f"{LABELS.get(on, on)}, {side} px"


def laptop(given: Given) -> Sequence[Cell]:
    """Return a network tuned on each data set that it has not seen, at two resolutions."""
    return [
        part(name, _at(on, side), on, side, keep_head=False)
        for side in (SIDE, LARGER_SIDE)
        for on in given.sets
        if on != "up"
        for name in PARTS
    ]


def paper() -> Sequence[Cell]:
    """Return the baselines of Table 1, with LayerScale, tuned on the six data sets of the follow-up."""
    return [published_part(f"{size}, {name}", size, name, on, on) for size in SIZES for on in PAPER for name in PARTS]


def _columns(scores: Scores) -> list[float | str]:
    return list(dict.fromkeys(at for _, at in scores))


def _over_ffn(scores: Scores) -> list[float]:
    return mean_of([minus(scores, ("attention", at), ("FFN", at)) for at in _columns(scores)])


def _over_all(scores: Scores) -> list[float]:
    return mean_of([minus(scores, ("attention", at), (ALL, at)) for at in _columns(scores)])


STUDY = Study(
    name="three-table6",
    where="Follow-up, Table 6",
    title="fine-tuning a part of the network on other data sets",
    axis="data set and resolution",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Tuning attention is better than tuning the FFNs, on average over the data sets.", _over_ffn),
        Claim("Tuning attention is better than tuning everything on these small sets.", _over_all),
    ),
)
