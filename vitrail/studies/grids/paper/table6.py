"""Table 6 and Figure 5: accuracy after fine-tuning over the compute of pre-training (section 4.4, appendix C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vitrail.costs.count import training_flops
from vitrail.costs.published import published
from vitrail.studies.grids.paper.published_runs import JFT, TITLES, by_set, pre_trained
from vitrail.studies.laptop import pre_training, transferred
from vitrail.studies.measure import config_of
from vitrail.studies.study import MEAN, Cell, Claim, LaptopData, Scores, Stage, Study

VIT, RESNET, HYBRID = "ViT", "ResNet (BiT)", "hybrid"
EPOCHS = (1, 3)
LAPTOP: dict[str, Mapping[str, dict[str, Any]]] = {
    VIT: {"ViT-64/8": {}, "ViT-128/8": {}, "ViT-64/4": {}},
    RESNET: {"R50x1/4": {}, "R50x1/2": {}},
    HYBRID: {"ViT-64/8": {"stem": "early"}, "ViT-64/4": {"stem": "early"}},
}
"""Family -> network -> its changes; the hybrids have a convolutional stem."""
PAPER = {
    VIT: ("vit-b32-jft", "vit-b16-jft", "vit-l32-jft", "vit-l16-jft-7ep", "vit-l16-jft", "vit-h14-jft"),
    RESNET: ("r50x1-jft", "r50x2-jft", "r101x1-jft", "r152x1-jft", "r152x2-jft", "r152x2-jft-14ep", "r200x3-jft-14ep"),
    HYBRID: ("r50-b32-jft", "r50-b16-jft", "r50-l32-jft", "r50-l16-jft-7ep", "r50-l16-jft"),
}
"""Family -> its recipes, the rows of Table 6 in its order."""


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return 14 networks of three families by the teraFLOPs of their pre-training, fine-tuned on each data set."""
    cells = []
    for family, networks in LAPTOP.items():
        for (network, changes), epochs in product(networks.items(), EPOCHS):
            start = Stage(pre_training(network, epochs, **changes))
            flops = training_flops(config_of(start)) * epochs * given.images
            cells += transferred(family, float(f"{flops / 1e12:.3g}"), start, given)
    return cells


def paper() -> Sequence[Cell]:
    """Return the 18 networks of Table 6 by the exaFLOPs that it prints, fine-tuned on five data sets."""
    cells = []
    for (family, name), (_, exaflops, _) in zip(_recipes(), _rows(), strict=True):
        cells += by_set(family, exaflops, pre_trained(f"paper/{name}", JFT))
    return cells


def _recipes() -> list[tuple[str, str]]:
    return [(family, name) for family, names in PAPER.items() for name in names]


def _rows() -> list[tuple[str, float, dict[str, float]]]:
    """Return (network, exaFLOPs, accuracies) of the rows of Table 6."""
    entry = published("table6_scaling")
    titles = {"Pets": "Oxford-IIIT Pets", "Flowers": "Oxford Flowers-102"}
    names = [titles.get(name, name) for name in entry["columns"]]
    rows = [dict(zip(names, row, strict=True)) for row in entry["rows"]]
    kept = [*TITLES.values(), "ImageNet ReaL"]
    return [(row["name"], float(row["exaFLOPs"]), {title: row[title] for title in kept}) for row in rows]


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the numbers of Table 6."""
    return {
        (f"fine-tuned on {title}", family, exaflops): value
        for (family, _), (_, exaflops, values) in zip(_recipes(), _rows(), strict=True)
        for title, value in values.items()
    }


def _curve(scores: Scores, family: str, seed: int) -> tuple[list[float], list[float]]:
    """Return compute (log2) and the best accuracy so far of a family."""
    points = sorted((float(at), values[seed]) for (row, at), values in scores.items() if row == family)
    return [float(np.log2(x)) for x, _ in points], list(np.maximum.accumulate([y for _, y in points]))


def _lead(scores: Scores, one: str, other: str, part: slice) -> list[float]:
    """Return the mean lead of one family over another at equal compute, over a part of the range that both have."""
    found = []
    for seed in range(len(next(iter(scores.values())))):
        (x, y), (u, v) = _curve(scores, one, seed), _curve(scores, other, seed)
        grid = np.linspace(max(x[0], u[0]), min(x[-1], u[-1]), 9)[part]
        found.append(float(np.mean(np.interp(grid, x, y) - np.interp(grid, u, v))))
    return found


STUDY = Study(
    name="table6",
    where="Table 6 and Figure 5",
    title="accuracy after fine-tuning by the compute of pre-training",
    axis="teraFLOPs of pre-training (the paper: exaFLOPs)",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("ViTs are better than ResNets at equal compute.", lambda s: _lead(s, VIT, RESNET, slice(None)), MEAN),
        Claim("Hybrids are ahead of ViTs at small budgets.", lambda s: _lead(s, HYBRID, VIT, slice(0, 4)), MEAN),
    ),
    published=printed(),
    log=True,
    mean=True,
)
