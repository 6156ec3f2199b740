"""Table 6 of the follow-up: a part of the network fine-tuned on other data sets (section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vitrail.studies.grids.three_things.tuning import ALL, PARTS, SIZES, part, published_part
from vitrail.studies.laptop import LABELS, LARGER_SIDE, SIDE
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, mean_of, minus

PAPER = ("inaturalist2018", "inaturalist2019", "cars", "cifar100", "cifar10", "flowers102")
FEW = 0.1
"""Share of the images of the other classes that makes a small data set."""
LARGE, SMALL = LABELS["down"], f"a tenth of {LABELS['down']}"
SIDES = (SIDE, LARGER_SIDE)


def _at(on: str, side: int) -> str:
    return f"{on}, {side} px"


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return a network tuned on each data set that it has not seen, and on a tenth of one, at two resolutions."""
    cells = []
    for side in SIDES:
        sets = [(LARGE, "down", None), (SMALL, "down", FEW)]
        sets += [(LABELS.get(on, on), on, None) for on in given.sets if on not in ("up", "down")]
        cells += [part(name, _at(at, side), on, side, share=share) for at, on, share in sets for name in PARTS]
    return cells


def paper() -> Sequence[Cell]:
    """Return the baselines of Table 1, with LayerScale, tuned on the six data sets of the follow-up."""
    return [published_part(f"{size}, {name}", size, name, on, on) for size in SIZES for on in PAPER for name in PARTS]


def _columns(scores: Scores, large: bool) -> list[float | str]:
    of_large = [_at(LARGE, side) for side in SIDES]
    return [at for at in dict.fromkeys(at for _, at in scores) if (at in of_large) == large]


def _lead(one: str, other: str, large: bool) -> Callable[[Scores], list[float]]:
    """Return the mean lead of tuning one part over another, on the large data set or on the small ones."""

    def difference(scores: Scores) -> list[float]:
        return mean_of([minus(scores, (one, at), (other, at)) for at in _columns(scores, large)])

    return difference


STUDY = Study(
    name="three-table6",
    where="Follow-up, Table 6",
    title="fine-tuning a part of the network on other data sets",
    axis="data set and resolution",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("On small data sets, tuning attention is better than tuning the FFNs.", _lead("attention", "FFN", False)),
        Claim("On small data sets, tuning attention is better than tuning everything.", _lead("attention", ALL, False)),
        Claim("On a large data set, tuning everything is better than attention.", _lead(ALL, "attention", True)),
    ),
)
