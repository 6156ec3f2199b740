"""Figure 13: axial attention against ViT and ResNet, over compute and over measured speed (appendix D.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vitrail.studies.grids.paper.published_runs import JFT, pre_trained
from vitrail.studies.laptop import pre_training
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, Scores, Stage, Study, mean_of, minus
from vitrail.training.run import Run

EPOCHS = 3
VIT, AXIAL, RESNET, AXIAL_RESNET = "ViT", "Axial-ViT", "ResNet50", "AxialResNet50"


def _cells(runs: Mapping[tuple[str, str], Run]) -> list[Cell]:
    return [
        *(Cell(row, at, Stage(run)) for (row, at), run in runs.items()),
        *(Cell(row, at, Stage(run), metric="MACs") for (row, at), run in runs.items()),
        *(Cell(row, at, Stage(run), metric="images/s") for (row, at), run in runs.items()),
    ]


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return plain and axial networks with patches of 4 and 8 pixels, and both ResNets at half their width.

    Axial networks have no class token, so all ViTs have average pooling, and differ in their attention only.
    """
    runs = {}
    for at, network in (("patch 4", "ViT-64/4"), ("patch 8", "ViT-64/8")):
        plain = pre_training(network, EPOCHS, pool="gap")
        runs[VIT, at] = plain
        runs[AXIAL, at] = replace(plain, model=f"axial-{plain.model}", vit=replace(plain.vit, pool=None))
    runs[RESNET, "R50x1/2"] = pre_training("R50x1/2", EPOCHS)
    runs[AXIAL_RESNET, "axial-R50/2"] = replace(runs[RESNET, "R50x1/2"], model="axial-R50")
    return _cells(runs)


def paper() -> Sequence[Cell]:
    """Return B/32, B/16, their axial forms, R50x1 and AxialResNet50 on JFT-300M, 7 epochs."""
    runs = {}
    for at, name in (("B/32", "paper/vit-b32-jft"), ("B/16", "paper/vit-b16-jft")):
        plain = pre_trained(name, JFT).run
        runs[VIT, at] = plain
        runs[AXIAL, at] = replace(plain, model=f"axial-{plain.model}")
    runs[RESNET, "R50x1"] = pre_trained("paper/r50x1-jft", JFT).run
    runs[AXIAL_RESNET, "axial-R50"] = replace(runs[RESNET, "R50x1"], model="axial-R50")
    return _cells(runs)


def _better(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (AXIAL, at), (VIT, at)) for at in ("patch 4", "patch 8")])


def _slower(scores: Scores) -> list[float]:
    return minus(scores, (RESNET, "R50x1/2"), (AXIAL_RESNET, "axial-R50/2"))


def _dearer(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (AXIAL, at), (VIT, at)) for at in ("patch 4", "patch 8")])


PATCHES = {"patch 4": "B/16", "patch 8": "B/32"}
RESNETS = {"R50x1/2": "R50x1", "axial-R50/2": "axial-R50"}
"""Columns at laptop scale -> those of the paper."""
STUDY = Study(
    name="figure13",
    where="Figure 13",
    title="axial attention against ViT and ResNet",
    axis="network",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Axial-ViT is better than ViT with the same patches.", _better, paper=PATCHES),
        Claim("Axial-ViT costs more compute than ViT with the same patches.", _dearer, UNITS["MACs"], PATCHES),
        Claim("AxialResNet50 is slower than ResNet50.", _slower, UNITS["images/s"], RESNETS),
    ),
    over=("MACs", "images/s"),
)
