"""Table 8 of the follow-up: its baselines beside other training procedures (appendix A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.data.settings import Preprocess
from vitrail.durations import Epochs, Percent
from vitrail.recipes.registry import recipe
from vitrail.studies.grids.three_things.depth import tested
from vitrail.studies.laptop import HOLDOUT, NETWORKS, SIDE
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Stage, Study, mean_of, minus

EPOCHS = 8
AT = f"{EPOCHS} epochs"
PAPER_PROCEDURE, AUGREG, DEIT, DEIT3, FOLLOW_UP = "paper", "AugReg, light", "DeiT", "DeiT-III", "follow-up"
PROCEDURES = {
    PAPER_PROCEDURE: "paper/vit-b16-imagenet",
    AUGREG: "augreg/light1",
    DEIT: "deit/vit-s16",
    DEIT3: "deit3/vit-s16-imagenet",
    FOLLOW_UP: "three-things/vit-s16-300",
}
"""Row -> a recipe with its augmentation, regularisation, loss and optimiser."""
RATES = {"adamw": (1e-3, 3e-3), "lamb": (3e-3, 1e-2)}
"""Optimiser -> the rates to try for steps of 128 images; those of the recipes are for 1,024 to 4,096."""
IMAGENET = {
    "Ti/16": {DEIT: "deit/vit-ti16", FOLLOW_UP: "three-things/vit-ti16-300"},
    "S/16": {AUGREG: "augreg/vit-s16-imagenet", DEIT: "deit/vit-s16", DEIT3: "deit3/vit-s16-imagenet",
             FOLLOW_UP: "three-things/vit-s16-300"},
    "B/16": {PAPER_PROCEDURE: "paper/vit-b16-imagenet", AUGREG: "augreg/vit-b16-imagenet", DEIT: "deit/vit-b16",
             DEIT3: "deit3/vit-b16-imagenet", FOLLOW_UP: "three-things/vit-b16-300"},
    "L/16": {PAPER_PROCEDURE: "paper/vit-l16-imagenet", DEIT3: "deit3/vit-l16-imagenet",
             FOLLOW_UP: "three-things/vit-l16-300"},
}  # fmt: skip
"""Column -> row -> the recipe on ImageNet."""


def _small(name: str) -> list[Stage]:
    """Return a procedure applied to ViT-64/8 on small images, at each rate."""
    run = recipe(name)
    small = replace(
        run,
        model="narrow/8",
        vit=replace(NETWORKS["ViT-64/8"]["vit"], drop_path=run.vit.drop_path, dropout=run.vit.dropout),
        image_size=SIDE,
        preprocess=Preprocess((SIDE, SIDE), resize="squash"),
        data=replace(run.data, path="up", holdout=HOLDOUT),
        schedule=replace(run.schedule, warmup=Percent(5)),
        duration=Epochs(EPOCHS),
        batch_size=128,
        evaluate_every=Percent(100),
        checkpoint_every=Percent(25),
    )
    return [Stage(replace(small, optim=replace(run.optim, lr=rate))) for rate in RATES[run.optim.name]]


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return ViT-64/8 trained by five procedures, each at the better of two rates."""
    cells = []
    for row, name in PROCEDURES.items():
        first, *others = _small(name)
        cells.append(Cell(row, AT, first, others, metric="top-1"))
    return cells


def paper() -> Sequence[Cell]:
    """Return Ti, S, B and L on ImageNet, by each procedure that its authors used for them."""
    cells = []
    for size, recipes in IMAGENET.items():
        for row, name in recipes.items():
            run = recipe(name)
            cells += tested(row, size, Stage(replace(run, data=replace(run.data, path="imagenet"))))
    return cells


def _light(scores: Scores) -> list[float]:
    heavy = (DEIT, DEIT3, FOLLOW_UP)
    return mean_of([minus(scores, (PAPER_PROCEDURE, AT), (row, AT)) for row in heavy])


def _best(scores: Scores) -> list[float]:
    """Return the lead of the follow-up's procedure over the best other one."""
    other = max((row for row, _ in scores if row != FOLLOW_UP), key=lambda row: sum(scores[row, AT]))
    return minus(scores, (FOLLOW_UP, AT), (other, AT))


STUDY = Study(
    name="three-table8",
    where="Follow-up, Table 8",
    title="training procedures compared",
    axis="length of training",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("The follow-up's procedure is better than the others.", _best, paper={AT: "B/16"}),
        Claim("When training is this short, light augmentation is better than strong.", _light),
    ),
)
