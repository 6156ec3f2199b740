"""Section 4.1, metrics: one network measured by every protocol, from few images on frozen features to fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitrail.studies.grids.paper.published_runs import IMAGENET, IMAGENET_21K, fine_tuned, pre_trained
from vitrail.studies.grids.three_things.tuning import ALL, PARTS, part, start
from vitrail.studies.laptop import LARGER_SIDE
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Study, Trained, minus

LINEAR = "linear classifier"
PROBES: dict[str, Trained] = {"5-shot": "5-shot", "20 nearest neighbours": "20-NN", LINEAR: "linear"}
"""Row -> measure of frozen features."""
ATTENTION = "attention"
OURS, PAPERS = "ViT-64/8", "ViT-B/16"
ACCURACY = "top-1, %"
STEPS = 1500
"""Steps of fine-tuning, about ten epochs. With the 200 of three-table6 a linear classifier is ahead of fine-tuning."""


def _tuned(name: str) -> str:
    return f"{name} fine-tuned"


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return one network measured on the classes that it has not seen; three-table6 starts from it, too."""
    probes = [Cell(row, OURS, start(), metric=metric, what=ACCURACY) for row, metric in PROBES.items()]
    tuned = [part(name, OURS, "down", LARGER_SIDE, steps=STEPS) for name in (ATTENTION, ALL)]
    return [*probes, *(replace(cell, row=_tuned(cell.row), what=ACCURACY) for cell in tuned)]


def paper() -> Sequence[Cell]:
    """Return B/16 from ImageNet-21k, measured on ImageNet."""
    network = pre_trained("paper/vit-b16-imagenet21k", IMAGENET_21K)
    cells = [Cell(row, PAPERS, network, metric=metric, what=ACCURACY) for row, metric in PROBES.items()]
    for name in (ATTENTION, ALL):
        tried = [replace(stage, run=replace(stage.run, tune=PARTS[name])) for stage in fine_tuned(network, IMAGENET)]
        cells.append(Cell(_tuned(name), PAPERS, tried[0], tried[1:], "top-1", ACCURACY))
    return cells


def _over(one: str, other: str) -> Callable[[Scores], list[float]]:
    def difference(scores: Scores) -> list[float]:
        return minus(scores, (one, OURS), (other, OURS))

    return difference


STUDY = Study(
    name="protocols",
    where="Section 4.1",
    title="one network measured by every protocol",
    axis="network",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim(
            "Fine-tuning everything is better than a linear classifier.",
            _over(_tuned(ALL), LINEAR),
            paper={OURS: PAPERS},
        ),
        Claim(
            "Fine-tuning attention is better than a linear classifier.",
            _over(_tuned(ATTENTION), LINEAR),
            paper={OURS: PAPERS},
        ),
    ),
)
