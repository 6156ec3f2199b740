"""Table 7: ResNets pre-trained with Adam and with SGD, then fine-tuned (appendix D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from vitrail.costs.published import published
from vitrail.studies.grids.paper.published_runs import JFT, by_set, pre_trained
from vitrail.studies.laptop import LABELS, fine_tuning, pre_training
from vitrail.studies.study import MEAN, Cell, Claim, LaptopData, Scores, Stage, Study, mean_of, minus
from vitrail.training.run import Optim

EPOCHS = 3
ADAM, SGD = "Adam", "SGD"
NETWORKS = ("R50x1/4", "R50x1/2")
OPTIMISERS: dict[str, tuple[Literal["adamw", "sgd"], float, tuple[float, ...]]] = {
    ADAM: ("adamw", 0.05, (1e-3, 3e-3)),
    SGD: ("sgd", 1e-4, (0.03, 0.1, 0.3)),
}
"""Column -> optimiser, weight decay, rates to try."""
PAPER = {
    "ResNet50x1": {ADAM: "paper/r50x1-jft", SGD: "bit/r50x1-jft-7ep"},
    "ResNet152x2": {ADAM: "paper/r152x2-jft", SGD: "bit/r152x2-jft-7ep"},
}


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return two ResNets with both optimisers, each at the best of several rates, fine-tuned on each data set."""
    cells = []
    for network in NETWORKS:
        for title, (name, decay, rates) in OPTIMISERS.items():
            run = pre_training(network, EPOCHS)
            starts = [Stage(replace(run, optim=Optim(name=name, lr=lr, weight_decay=decay))) for lr in rates]
            for on in given.sets:
                first, *others = (fine_tuning(start, on) for start in starts)
                cells.append(Cell(network, title, first, others, "top-1", f"fine-tuned on {LABELS.get(on, on)}"))
    return cells


def paper() -> Sequence[Cell]:
    """Return both ResNets with both optimisers on JFT-300M, 7 epochs."""
    cells = []
    for network, recipes in PAPER.items():
        for title, name in recipes.items():
            cells += by_set(network, title, pre_trained(name, JFT))
    return cells


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the numbers of Table 7."""
    titles = {"CIFAR10": "CIFAR-10", "CIFAR100": "CIFAR-100"}
    places = [(network, title) for network in PAPER for title in (ADAM, SGD)]
    found: dict[tuple[str, str, float | str], float] = {}
    for on, *values in published("table7_adam_vs_sgd")["rows"]:
        table = MEAN if on == "Average" else f"fine-tuned on {titles.get(on, on)}"
        found |= {(table, *place): value for place, value in zip(places, values, strict=True)}
    return found


def _ahead(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (network, ADAM), (network, SGD)) for network in NETWORKS])


STUDY = Study(
    name="table7",
    where="Table 7",
    title="ResNets pre-trained with Adam and with SGD",
    axis="optimiser of pre-training",
    laptop=laptop,
    paper=paper,
    claims=(Claim("Pre-training with Adam is better than with SGD, on average over the data sets.", _ahead, MEAN,
                  dict(zip(NETWORKS, PAPER, strict=True))),),
    published=printed(),
    mean=True,
)  # fmt: skip
