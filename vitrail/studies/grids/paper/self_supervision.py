"""Section 4.6 and appendix B.1.2: masked patch prediction, MAE, BEiT and DINO beside labels and random weights.

All ways train the same network (BEiT with relative positions, as it is defined) for the same number of images. The
features are then measured on classes that no network has seen, and the network is fine-tuned with labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitrail.costs.published import published
from vitrail.durations import Percent, Steps
from vitrail.objective.settings import MaskedPatch
from vitrail.recipes.registry import recipe
from vitrail.studies.grids.paper.published_runs import IMAGENET, JFT, fine_tuned, pre_trained
from vitrail.studies.laptop import LABELS, SIDE, fine_tuning, pre_training
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, Scores, Stage, Study, Trained, minus
from vitrail.training.run import Model, Run
from vitrail.transfer.grid import changed

EPOCHS, TOKENIZER_EPOCHS = 4, 1
RANDOM, WITH_LABELS, COLOUR = "random weights", "labels", "masked patches: colour"
SMALL_PATCHES, PIXELS, LESS = "masked patches: 4x4 colours", "masked patches: pixels", "masked patches: colour, 15 %"
MAE, BEIT, DINO = "MAE", "BEiT", "DINO"
METRICS: tuple[Trained, ...] = ("5-shot", "20-NN", "linear")


def _small(name: str, epochs: float, **objective: Any) -> Run:
    """Return a recipe for small images on the laptop's data."""
    like = pre_training("ViT-128/4", epochs)
    run = changed(recipe(name), {f"objective.{key}": value for key, value in objective.items()})
    vit = Model() if run.vit == Model() else replace(run.vit, width=64, heads=2, mlp_dim=256)  # a tokenizer has none
    run = replace(run, vit=vit, duration=like.duration, data=like.data)
    return replace(run, image_size=SIDE, preprocess=like.preprocess, evaluate_every=Percent(100),
                   checkpoint_every=Percent(25))  # fmt: skip


def _ways() -> dict[str, Stage]:
    labels = pre_training("ViT-64/4", EPOCHS, pool="gap")
    untrained = replace(labels, duration=Steps(1), optim=replace(labels.optim, lr=1e-12, weight_decay=0.0))
    tokenizer = Stage(_small("tokenizer-small", TOKENIZER_EPOCHS))
    return {
        RANDOM: Stage(untrained),
        WITH_LABELS: Stage(labels),
        COLOUR: Stage(_small("masked-patch-small", EPOCHS)),
        SMALL_PATCHES: Stage(_small("masked-patch-small", EPOCHS, target="small")),
        PIXELS: Stage(_small("masked-patch-small", EPOCHS, target="pixels")),
        LESS: Stage(_small("masked-patch-small", EPOCHS, corrupt=0.15)),
        MAE: Stage(_small("mae-small", EPOCHS)),
        BEIT: Stage(_small("beit-small", EPOCHS), tokenizer=tokenizer),
        DINO: Stage(_small("dino-small", EPOCHS)),
    }


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return nine ways to pre-train, each measured by its features and after fine-tuning with labels."""
    at = f"{EPOCHS} epochs"
    cells = []
    for way, stage in _ways().items():
        cells += [Cell(way, at, stage, metric=metric) for metric in METRICS]
        tuned = fine_tuning(stage, "down")
        cells.append(Cell(way, at, tuned, metric="top-1", what=f"fine-tuned on {LABELS['down']}"))
    return cells


def paper() -> Sequence[Cell]:
    """Return B/16 pre-trained by each way, its 5-shot accuracy, and fine-tuned on ImageNet at each rate of Table 4."""
    masked = pre_trained("masked-patch", JFT)

    def other(**objective: Any) -> Stage:
        assert isinstance(masked.run.objective, MaskedPatch)
        return Stage(replace(masked.run, objective=replace(masked.run.objective, **objective)))

    ways = {
        "nothing": pre_trained("paper/vit-b16-imagenet", IMAGENET),
        WITH_LABELS: pre_trained("paper/vit-b16-jft", JFT),
        COLOUR: masked,
        SMALL_PATCHES: other(target="small"),
        PIXELS: other(target="pixels"),
        LESS: other(corrupt=0.15),
        MAE: pre_trained("mae", IMAGENET),
        BEIT: replace(pre_trained("beit", IMAGENET), tokenizer=pre_trained("tokenizer", IMAGENET)),
        DINO: pre_trained("dino", IMAGENET),
    }
    cells = []
    for way, stage in ways.items():
        first, *others = fine_tuned(stage, IMAGENET)
        cells += [Cell(way, "ImageNet", first, others, metric="top-1"), Cell(way, "ImageNet", stage)]
    return cells


def printed() -> dict[tuple[str, str, float | str], float]:
    """Return the three numbers of section 4.6, of which it prints one and two differences."""
    entry = published("self_supervision")
    masked = entry["imagenet_top1"]
    numbers = {
        "nothing": masked - entry["gain_over_scratch"],
        COLOUR: masked,
        WITH_LABELS: masked + entry["gap_to_supervised"],
    }
    return {(UNITS["top-1"], way, "ImageNet"): number for way, number in numbers.items()}


AT = f"{EPOCHS} epochs"
TUNED = f"fine-tuned on {LABELS['down']}"


def _minus(one: str, other: str) -> Any:
    def difference(scores: Scores) -> list[float]:
        return minus(scores, (one, AT), (other, AT))

    return difference


NAMES = {RANDOM: "nothing", AT: "ImageNet", TUNED: UNITS["top-1"]}
"""Row, column and table at laptop scale -> those of the paper."""
STUDY = Study(
    name="self-supervision",
    where="Section 4.6",
    title="pre-training without labels, beside labels and random weights",
    axis="length of pre-training",
    laptop=laptop,
    paper=paper,
    claims=(
        Claim("Masked patch prediction is better than training from scratch.", _minus(COLOUR, RANDOM), TUNED, NAMES),
        Claim("Pre-training with labels is better than masked patch prediction.", _minus(WITH_LABELS, COLOUR), TUNED,
              NAMES),
        Claim("Predicting pixels is worse than predicting colours.", _minus(COLOUR, PIXELS), UNITS["5-shot"],
              {AT: "ImageNet"}),
    ),
    published=printed(),
)  # fmt: skip
