"""Table 1 of the follow-up: baselines of several widths, also longer and with LayerScale (section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.recipes.three_things import TABLE_1
from vitrail.studies.grids.three_things.depth import baseline, tested
from vitrail.studies.laptop import pre_training
from vitrail.studies.study import UNITS, Cell, Claim, Counted, LaptopData, Scores, Stage, Study, mean_of, minus

WIDTHS = (32, 64, 128)
PLAIN, SCALED = (6, None), (8, 1e-4)
COUNTS: tuple[Counted, ...] = ("parameters", "MACs", "memory", "images/s")
COLUMNS = ("300 epochs", "400 epochs with LayerScale")


def _at(epochs: int, layer_scale: float | None) -> str:
    return f"{epochs} epochs" + (" with LayerScale" if layer_scale else "")


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return three widths, trained for 6 epochs, or for 8 with LayerScale."""
    cells = []
    for epochs, layer_scale in (PLAIN, SCALED):
        for width in WIDTHS:
            vit = {"width": width, "heads": width // 32, "mlp_dim": 4 * width, "layer_scale": layer_scale}
            stage = Stage(pre_training("ViT-128/8", epochs, tested=True, **vit))
            counts = () if layer_scale else COUNTS
            cells += tested(f"width {width}", _at(epochs, layer_scale), stage, counts)
    return cells


def paper() -> Sequence[Cell]:
    """Return Ti, S, B and L on ImageNet for 300 epochs, and for 400 with LayerScale."""
    cells = []
    for row in TABLE_1:
        for suffix, at in zip(("-300", "-400-ls"), COLUMNS, strict=True):
            size = row.name.rpartition("-")[2]
            cells += tested(row.model, at, baseline(size, suffix), COUNTS if suffix == "-300" else ())
    return cells


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the accuracies of Table 1."""
    found: dict[tuple[str, str, float | str], float] = {}
    for row in TABLE_1:
        for at, value in zip(COLUMNS, (row.top1, row.top1_with_layer_scale), strict=True):
            found[UNITS["top-1"], row.model, at] = value
    return found


def _larger(scores: Scores) -> list[float]:
    first, last = f"width {WIDTHS[0]}", f"width {WIDTHS[-1]}"
    return mean_of([minus(scores, (last, _at(*how)), (first, _at(*how))) for how in (PLAIN, SCALED)])


def _longer(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (f"width {w}", _at(*SCALED)), (f"width {w}", _at(*PLAIN))) for w in WIDTHS])


NAMES = {_at(*PLAIN): COLUMNS[0], _at(*SCALED): COLUMNS[1]}
NAMES |= {f"width {width}": f"{size}/16" for width, size in zip(WIDTHS, ("Ti", "S", "L"), strict=True)}
"""Row and column at laptop scale -> those of the paper."""
STUDY = Study(
    name="three-table1",
    where="Follow-up, Table 1",
    title="baselines of several widths",
    axis="length of training",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("The widest network is better than the narrowest.", _larger, paper=NAMES),
        Claim("Longer training with LayerScale is better at every width, on average.", _longer, paper=NAMES),
    ),
    published=printed(),
)
