"""Figure 9: class token against average pooling, each at several learning rates (appendix D.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.model.limits import Pool
from vitrail.recipes.registry import recipe
from vitrail.studies.laptop import pre_training
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Stage, Study, minus

EPOCHS = 6
RATES = (3e-4, 1e-3, 3e-3)
TOKEN, MEAN, ATTENTION = "class token", "average pooling", "attention pooling"
POOLS: dict[str, Pool] = {TOKEN: "cls", MEAN: "gap", ATTENTION: "map"}


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return a network with each way of pooling, at each rate."""
    cells = []
    for rate in RATES:
        for name, pool in POOLS.items():
            run = pre_training("ViT-64/8", EPOCHS, pool=pool)
            cells.append(Cell(name, rate, Stage(replace(run, optim=replace(run.optim, lr=rate)))))
    return cells


def paper() -> Sequence[Cell]:
    """Return B/16 on JFT-300M, 7 epochs: the class token at 8e-4, average pooling at 8e-4 and 3e-4."""
    base = recipe("paper/vit-b16-jft")
    base = replace(base, data=replace(base.data, path="jft300m"))
    cells = []
    for name, rate in ((TOKEN, 8e-4), (MEAN, 8e-4), (MEAN, 3e-4)):
        run = replace(base, vit=replace(base.vit, pool=POOLS[name]), optim=replace(base.optim, lr=rate))
        cells.append(Cell(name, rate, Stage(run)))
    return cells


def _best(scores: Scores, name: str) -> Sequence[float]:
    """Return the scores at the rate with the best mean."""
    return max((values for (row, _), values in scores.items() if row == name), key=sum)


def _behind(scores: Scores) -> list[float]:
    """Return the lead of the class token at the rate that is its own best."""
    rate = max((at for row, at in scores if row == TOKEN), key=lambda at: sum(scores[TOKEN, at]))
    return minus(scores, (TOKEN, rate), (MEAN, rate))


def _as_good(scores: Scores) -> list[float]:
    """Return by how much average pooling stays within a point of the class token, each at its best rate."""
    return [1 - abs(a - b) for a, b in zip(_best(scores, TOKEN), _best(scores, MEAN), strict=True)]


STUDY = Study(
    name="figure9",
    where="Figure 9",
    title="class token against pooling, at several learning rates",
    axis="learning rate",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("At the class token's best learning rate, average pooling is worse.", _behind),
        Claim("At their own best rates, average pooling is within a point of the class token.", _as_good),
    ),
    log=True,
)
