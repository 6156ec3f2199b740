"""Figure 10: similarity of position embeddings that were learned with different settings (appendix D.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.durations import Epochs
from vitrail.studies.grids.paper.published_runs import JFT, pre_trained
from vitrail.studies.laptop import pre_training
from vitrail.studies.study import Cell, LaptopData, Stage, Study
from vitrail.training.run import Run

SETTINGS = ((1, 0.5, 0.1), (1, 1.0, 1.0), (2, 1.0, 1.0))
"""Length, learning rate and weight decay, relative to the first ones: the panels of the paper."""
EPOCHS, RATE, DECAY = 4, 1e-3, 0.1


def _cells(row: str, base: Run, epochs: float, rate: float, decay: float) -> list[Cell]:
    cells = []
    for longer, faster, stronger in SETTINGS:
        optim = replace(base.optim, lr=faster * rate, weight_decay=stronger * decay)
        run = replace(base, optim=optim, duration=Epochs(longer * epochs))
        at = f"{longer * epochs:g} epochs, rate {faster * rate:g}, decay {stronger * decay:g}"
        cells.append(Cell(row, at, Stage(run)))
    return cells


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return a network with three settings."""
    return _cells("ViT-64/4", pre_training("ViT-64/4"), EPOCHS, RATE, DECAY)


def paper() -> Sequence[Cell]:
    """Return L/16 on JFT-300M for 7 epochs at rate 2e-4 and decay 0.01, at 4e-4 and 0.1, and for 14 epochs."""
    return _cells("ViT-L/16", pre_trained("paper/vit-l16-jft", JFT).run, 7, 4e-4, 0.1)


STUDY = Study(
    name="figure10",
    where="Figure 10",
    title="similarity of position embeddings learned with different settings",
    axis="setting",
    laptop=laptop,
    paper=paper,
    tiles=True,
)
