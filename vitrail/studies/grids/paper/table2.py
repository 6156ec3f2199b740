"""Table 2: pre-trained networks on many data sets, and what pre-training cost (section 4.2).

At laptop scale: a ViT pre-trained on all images and on fewer, a smaller ViT and a ResNet, on three data sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.costs.published import published
from vitrail.durations import Examples
from vitrail.studies.grids.paper.published_runs import IMAGENET_21K, JFT, in_a_row, pre_trained, vtab
from vitrail.studies.laptop import LABELS, fine_tuning, pre_training
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, Scores, Stage, Study, mean_of, minus

SEEN = 160_000
RATES = (1e-3, 3e-3)
MORE, LESS = "ViT-64/4, all images", "ViT-64/4, 3/8 of the images"
SMALL, RESNET = "ViT-64/8, all images", "R50x1/2, all images"
NETWORKS = {MORE: ("ViT-64/4", 1.0), LESS: ("ViT-64/4", 3 / 8), SMALL: ("ViT-64/8", 1.0), RESNET: ("R50x1/2", 1.0)}
PAPER = {
    "ViT-H/14 (JFT)": ("paper/vit-h14-jft", JFT, "paper/finetune-imagenet-518"),
    "ViT-L/16 (JFT)": ("paper/vit-l16-jft", JFT, "paper/finetune-imagenet-512"),
    "ViT-L/16 (I21k)": ("paper/vit-l16-imagenet21k", IMAGENET_21K, "paper/finetune-imagenet-512"),
    "BiT-L (ResNet152x4)": ("bit/r152x4-jft", JFT, "paper/finetune-imagenet-bit"),
}
"""Row -> its recipe, its data set, and the recipe that fine-tunes it on ImageNet."""


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return four networks, each fine-tuned on each data set at the better of two rates."""
    cells = []
    for row, (network, share) in NETWORKS.items():
        run = replace(pre_training(network), duration=Examples(SEEN))
        count = round(share * given.images)
        start = Stage(replace(run, data=replace(run.data, subset=None if share == 1 else count)))
        for on in given.sets:
            first, *others = (fine_tuning(start, on, rate) for rate in RATES)
            cells.append(Cell(row, LABELS.get(on, on), first, others, metric="top-1"))
    return cells


def paper() -> Sequence[Cell]:
    """Return the networks of Table 2, on five data sets and the 19 tasks of VTAB. Noisy Student is only quoted."""
    cells: list[Cell] = []
    for row, (name, data, imagenet) in PAPER.items():
        start = pre_trained(name, data)
        cells += [*in_a_row(row, start, imagenet), *vtab(row, start)]
    return cells


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the numbers of Table 2; of two numbers, the first."""
    entry = published("table2_state_of_the_art")
    found: dict[tuple[str, str, float | str], float] = {}
    for title, values in entry["rows"].items():
        for network, value in zip(entry["columns"], values, strict=True):
            if value is not None:
                number = value.split("±")[0].split("/")[0]
                days = title == "TPUv3-core-days"
                table = "TPUv3-core-days of pre-training" if days else UNITS["top-1"]
                found[table, network, title] = 1000 * float(number[:-1]) if number.endswith("k") else float(number)
    return found


def _columns(scores: Scores) -> list[float | str]:
    return list(dict.fromkeys(at for _, at in scores))


def _more_data(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (MORE, at), (LESS, at)) for at in _columns(scores)])


def _larger(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (MORE, at), (SMALL, at)) for at in _columns(scores)])


def _over_resnet(scores: Scores) -> list[float]:
    return mean_of([minus(scores, (MORE, at), (RESNET, at)) for at in _columns(scores)])


STUDY = Study(
    name="table2",
    where="Table 2",
    title="pre-trained networks on several data sets",
    axis="data set",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("More images to pre-train on are better, on average over the data sets.", _more_data,
              paper={MORE: "ViT-L/16 (JFT)", LESS: "ViT-L/16 (I21k)"}),
        Claim("The larger ViT is better than the smaller one.", _larger,
              paper={MORE: "ViT-H/14 (JFT)", SMALL: "ViT-L/16 (JFT)"}),
        Claim("The ViT is better than the ResNet that costs as much.", _over_resnet,
              paper={MORE: "ViT-L/16 (JFT)", RESNET: "BiT-L (ResNet152x4)"}),
    ),
    published=printed(),
    quoted=("BiT-L (ResNet152x4)", "Noisy Student (EfficientNet-L2)"),
)  # fmt: skip
