"""AugReg (Steiner et al. 2021, "How to train your ViT?"): how much augmentation and regularisation for how much data.

There is one procedure, with seven strengths of augmentation and two of regularisation: Adam with decoupled weight
decay 0.03 or 0.1, learning rate 1e-3, batch 4096, 10,000 steps of warmup, cosine, 300 epochs, clipping at norm 1,
dropout and stochastic depth both 0 or both 0.1, no hidden layer before the classifier. The procedure, the strengths
and the losses are from big_vision (`configs/vit_i21k.py`, `vit_i1k.py`). The settings of each network are in the name
of the weights that google-research/vision_transformer recommends (ImageNet-21k) or publishes (ImageNet).

Differences that cannot be expressed: AugReg's RandAugment includes cut-out, and its code changes contrast around a grey
that depends on the size of the image, not on its content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.durations import Steps
from vitrail.recipes.preprocessing import PRE_TRAINING, inception
from vitrail.recipes.published import TITLES, Recipe, by_name, pre_training, published
from vitrail.training.run import Model, Optim, Run, Schedule

CROP = inception().augment
STRENGTHS = {
    "none": CROP,
    "light1": replace(CROP, randaugment=(2, 0.0), randaugment_form="big_vision"),  # magnitude 0 is not nothing
    "light2": replace(CROP, randaugment=(2, 10.0), randaugment_form="big_vision", mixup=0.2),
    "medium1": replace(CROP, randaugment=(2, 15.0), randaugment_form="big_vision", mixup=0.2),
    "medium2": replace(CROP, randaugment=(2, 15.0), randaugment_form="big_vision", mixup=0.5),
    "strong1": replace(CROP, randaugment=(2, 20.0), randaugment_form="big_vision", mixup=0.5),
    "strong2": replace(CROP, randaugment=(2, 20.0), randaugment_form="big_vision", mixup=0.8),
}
"""The strengths of augmentation."""

EPOCHS = 300


@dataclass(frozen=True)
class Row:
    """A network on a data set, with the settings of the published weights."""

    recipe: str
    model: str
    data: str
    strength: str
    weight_decay: float
    drop: float
    """Probability of dropout and of stochastic depth."""
    top1: float | None = None
    """Top-1 accuracy in percent on ImageNet after fine-tuning at 384 pixels (README of vision_transformer)."""


TABLE = (
    Row("augreg/vit-ti16-imagenet21k", "Ti/16", "imagenet21k", "none", 0.03, 0.0, 78.22),
    Row("augreg/vit-s32-imagenet21k", "S/32", "imagenet21k", "none", 0.1, 0.0, 79.58),
    Row("augreg/vit-s16-imagenet21k", "S/16", "imagenet21k", "light1", 0.03, 0.0, 83.73),
    Row("augreg/vit-b32-imagenet21k", "B/32", "imagenet21k", "light1", 0.1, 0.0, 83.59),
    Row("augreg/vit-b16-imagenet21k", "B/16", "imagenet21k", "medium1", 0.1, 0.0, 85.49),
    Row("augreg/vit-l16-imagenet21k", "L/16", "imagenet21k", "strong1", 0.1, 0.0, 85.59),
    Row("augreg/r-ti16-imagenet21k", "R+Ti/16", "imagenet21k", "none", 0.03, 0.0, 75.40),
    Row("augreg/r26-s32-imagenet21k", "R26+S/32", "imagenet21k", "light1", 0.1, 0.0, 83.85),
    Row("augreg/r50-l32-imagenet21k", "R50+L/32", "imagenet21k", "medium1", 0.1, 0.1, 85.99),
    Row("augreg/vit-s16-imagenet", "S/16", "imagenet", "medium2", 0.1, 0.0),
    Row("augreg/vit-b32-imagenet", "B/32", "imagenet", "medium2", 0.1, 0.1),
    Row("augreg/vit-b16-imagenet", "B/16", "imagenet", "strong2", 0.1, 0.1),
)


def run_of(row: Row) -> Run:
    """Return the run of a row."""
    return replace(
        pre_training(row.model, row.data, EPOCHS),
        vit=Model(dropout=row.drop, drop_path=row.drop),
        augment=STRENGTHS[row.strength],
        optim=Optim(name="adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=row.weight_decay, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Steps(10_000)),
    )


def _recipes() -> Iterator[Recipe]:
    for row in TABLE:
        expected = "the weights are published; our sources give no accuracy for them."
        if row.top1 is not None:
            expected = f"{row.top1:.2f} % on ImageNet after fine-tuning at 384 pixels (their README)."
        drop = f"dropout and stochastic depth {row.drop:g}" if row.drop else "no dropout"
        yield published(
            row.recipe,
            run_of(row),
            f"{row.model} on {TITLES[row.data]} with augmentation {row.strength!r}, weight decay {row.weight_decay:g}, "
            f"{drop} (AugReg).",
            data=row.data,
            expected=expected,
        )
    for strength, augment in STRENGTHS.items():
        row = Row(f"augreg/{strength}", "S/16", "imagenet", strength, 0.1, 0.0)
        operations = "RandAugment {} x {:g}".format(*augment.randaugment) if augment.randaugment else "no RandAugment"
        strong = f"{strength!r} ({operations}, mixup {augment.mixup:g})"
        yield published(
            row.recipe,
            run_of(row),
            f"AugReg's augmentation {strong} for S/16 and any other network.",
            notes=(
                "Another network: --model B/16. More regularisation: --vit.dropout 0.1 --vit.drop-path 0.1; less: "
                "--optim.weight-decay 0.03."
            ),
            cost=f"{EPOCHS} epochs at {PRE_TRAINING} pixels.",
            expected="less data and larger networks need stronger augmentation.",
        )


AUGREG = by_name(_recipes(), source=__name__)
