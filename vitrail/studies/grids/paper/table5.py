"""Table 5 and Figure 3: accuracy after fine-tuning, by network and pre-training set (section 4.3).

At laptop scale the pre-training sets are shares of one set, and each network sees the same number of images. In the
paper all sets are trained to convergence, with regularisation tuned for the smaller ones. The larger and the smaller
network of the claims have the same patches and differ in width: in Table 5, L falls behind B, but /16 never behind /32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.costs.published import published
from vitrail.durations import Examples
from vitrail.studies.grids.paper.published_runs import IMAGENET, IMAGENET_21K, JFT, by_set, pre_trained
from vitrail.studies.grids.paper.table2 import SEEN
from vitrail.studies.laptop import LABELS, pre_training, transferred
from vitrail.studies.study import Cell, Claim, LaptopData, Scores, Stage, Study, minus

SHARES = (1.0, 3 / 8, 1 / 10)
SMALL, LARGE, RESNET = "ViT-64/8", "ViT-128/8", "R50x1/2"
NETWORKS = (LARGE, SMALL, RESNET, "ViT-64/4")
"""ViT-128/8 and ViT-64/4 cost as much as the ResNet."""

PAPER = {
    "ViT-B/16": ("paper/vit-b16-imagenet", "paper/vit-b16-imagenet21k", "paper/vit-b16-jft"),
    "ViT-B/32": ("paper/vit-b32-imagenet", "paper/vit-b32-imagenet21k", "paper/vit-b32-jft"),
    "ViT-L/16": ("paper/vit-l16-imagenet", "paper/vit-l16-imagenet21k", "paper/vit-l16-jft"),
    "ViT-L/32": ("paper/vit-l32-imagenet", "paper/vit-l32-imagenet21k", "paper/vit-l32-jft"),
    "ViT-H/14": (None, "paper/vit-h14-imagenet21k", "paper/vit-h14-jft"),
    "R50x1 (BiT)": ("bit/r50x1-imagenet", "bit/r50x1-imagenet21k", "paper/r50x1-jft"),
    "R152x2 (BiT)": ("bit/r152x2-imagenet", "bit/r152x2-imagenet21k", "paper/r152x2-jft"),
}
"""Row -> the recipes for ImageNet, ImageNet-21k and JFT-300M; the ResNets are the shaded band of Figure 3."""
DATA = {"ImageNet": IMAGENET, "ImageNet-21k": IMAGENET_21K, "JFT-300M": JFT}


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return four networks pre-trained on three shares of the images, and fine-tuned on each data set."""
    cells = []
    for share in SHARES:
        count = round(share * given.images)
        for network in NETWORKS:
            run = pre_training(network)
            data = replace(run.data, subset=None if share == 1 else count)
            run = replace(run, duration=Examples(SEEN), data=data)
            cells += transferred(network, count, Stage(run), given)
    return cells


def paper() -> Sequence[Cell]:
    """Return the networks of Table 5, and two ResNets, on three pre-training sets."""
    cells = []
    for network, recipes in PAPER.items():
        for (title, data), name in zip(DATA.items(), recipes, strict=True):
            if name is not None:
                cells += by_set(network, title, pre_trained(name, data))
    return cells


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the numbers of Table 5."""
    entry = published("table5_pretraining_size")
    titles = {"Oxford-IIIT-Pets": "Oxford-IIIT Pets"}
    return {
        (f"fine-tuned on {titles.get(on, on)}", network, data): value
        for data, by_data in entry["rows"].items()
        for on, values in by_data.items()
        for network, value in zip(entry["models"], values, strict=True)
        if value is not None
    }


def _sizes(scores: Scores) -> list[float]:
    return sorted(at for row, at in scores if row == LARGE and not isinstance(at, str))


def _gains(scores: Scores) -> list[float]:
    """Return how much more the large network gains on the small one from the fewest images to the most."""
    few, many = (minus(scores, (LARGE, at), (SMALL, at)) for at in (_sizes(scores)[0], _sizes(scores)[-1]))
    return [b - a for a, b in zip(few, many, strict=True)]


def _more_data(scores: Scores) -> list[float]:
    few, *_, many = _sizes(scores)
    return minus(scores, (LARGE, many), (LARGE, few))


def _resnet_with_few(scores: Scores) -> list[float]:
    few = _sizes(scores)[0]
    return minus(scores, (RESNET, few), (LARGE, few))


def _vit_with_many(scores: Scores) -> list[float]:
    many = _sizes(scores)[-1]
    return minus(scores, (LARGE, many), (RESNET, many))


NEW = f"fine-tuned on {LABELS['down']}"
NAMES: dict[float | str, float | str] = {
    LARGE: "ViT-L/16", SMALL: "ViT-B/16", RESNET: "R152x2 (BiT)", NEW: "fine-tuned on ImageNet",
    1.0: "ImageNet", 2.0: "ImageNet-21k", 3.0: "JFT-300M",
}  # fmt: skip
"""Row, table and place on the axis at laptop scale -> those of the paper; its pre-training sets are in their order."""
STUDY = Study(
    name="table5",
    where="Table 5 and Figure 3",
    title="accuracy after fine-tuning by network and pre-training set",
    axis="images to pre-train on",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("More images to pre-train on make the large network better on other classes.", _more_data, NEW, NAMES),
        Claim("The larger network gains more than the smaller one from more images to pre-train on.", _gains, NEW,
              NAMES),
        Claim("With few images to pre-train on, the ResNet is better than the ViT.", _resnet_with_few, NEW, NAMES),
        Claim("With many images to pre-train on, the ViT is better than the ResNet.", _vit_with_many, NEW, NAMES),
    ),
    published=printed(),
    log=True,
)  # fmt: skip
