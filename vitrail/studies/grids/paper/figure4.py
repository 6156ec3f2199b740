"""Figure 4: few-shot accuracy by the number of images to pre-train on (section 4.3).

The paper takes subsets of JFT-300M with the same hyper-parameters for all of them, without more regularisation, and
stops early: it reports the best validation accuracy reached. So here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.durations import Percent, Steps
from vitrail.recipes.registry import recipe
from vitrail.studies.laptop import pre_training
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Stage, Study, minus

SHARES = (1 / 32, 1 / 8, 1 / 2, 1.0)
STEPS = 900
SMALL, LARGE, RESNET = "ViT-64/8", "ViT-64/4", "R50x1/2"

JFT = (9_000_000, 30_000_000, 90_000_000, 303_000_000)
PAPER = {
    "ViT-b/32": ("paper/vit-b32-jft", "b/32"),
    "ViT-B/32": ("paper/vit-b32-jft", "B/32"),
    "ViT-L/32": ("paper/vit-l32-jft", "L/32"),
    "ViT-L/16": ("paper/vit-l16-jft-7ep", "L/16"),
    "ResNet50x1 (BiT)": ("paper/r50x1-jft", "R50x1"),
    "ResNet152x2 (BiT)": ("paper/r152x2-jft", "R152x2"),
}
"""Network in the figure -> its recipe and its name. The rate of b/32 is not printed; it is that of B/32."""


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return three networks on four subsets, with as many steps for each."""
    cells = []
    for share in reversed(SHARES):
        count = max(round(share * given.images), 1)
        for network in (LARGE, RESNET, SMALL):
            run = replace(pre_training(network), duration=Steps(STEPS), evaluate_every=Percent(10))
            run = replace(run, data=replace(run.data, subset=None if share == 1 else count))
            cells.append(Cell(network, count, Stage(run), best=True))
    return cells


def paper() -> Sequence[Cell]:
    """Return six networks on four subsets of JFT-300M, 7 epochs of each."""
    cells = []
    for name, (of, model) in PAPER.items():
        for count in JFT:
            run = replace(recipe(of), model=model)
            data = replace(run.data, path="jft300m", subset=None if count == JFT[-1] else count)
            cells.append(Cell(name, count, Stage(replace(run, data=data)), best=True))
    return cells


def _gap(scores: Scores) -> list[float]:
    """Return how much more the ViT gains on the ResNet from the fewest images to the most."""
    sizes = sorted(at for row, at in scores if row == LARGE and not isinstance(at, str))
    few, many = (minus(scores, (LARGE, at), (RESNET, at)) for at in (sizes[0], sizes[-1]))
    return [b - a for a, b in zip(few, many, strict=True)]


def _behind(scores: Scores) -> list[float]:
    few = min(at for row, at in scores if row == LARGE and not isinstance(at, str))
    return minus(scores, (RESNET, few), (LARGE, few))


NAMES = {LARGE: "ViT-B/32", RESNET: "ResNet50x1 (BiT)"}
"""Networks of equal cost at laptop scale -> those that the paper compares."""
STUDY = Study(
    name="figure4",
    where="Figure 4",
    title="few-shot accuracy by the number of images to pre-train on",
    axis="images to pre-train on",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("ResNets are better than ViTs with few images to pre-train on.", _behind, paper=NAMES),
        Claim("ViTs gain more than ResNets from more images to pre-train on.", _gap, paper=NAMES),
    ),
    log=True,
)
