"""AugReg (Steiner et al. 2021, "How to train your ViT?"): how much augmentation and regularisation for how much data.

One procedure, with seven strengths of augmentation and two of regularisation: Adam with decoupled weight decay 0.03
or 0.1, learning rate 1e-3, batch 4096, 10,000 steps of warmup, cosine, 300 epochs, clipping at norm 1, dropout and
stochastic depth both 0 or both 0.1, no hidden layer before the classifier. Sources: big_vision
(`configs/vit_i21k.py`, `vit_i1k.py`) for the procedure and the strengths; for each network the settings are those
in the name of the weights that google-research/vision_transformer recommends (ImageNet-21k) or publishes
(ImageNet); the losses are big_vision's.

Differences that cannot be expressed: AugReg's RandAugment applies every operation that it draws, here each is applied
half of the time; its operations include cut-out, and its colour operations only strengthen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.config import Epochs, Percent, Steps
from vitrail.objective.settings import Supervised
from vitrail.recipes.preprocessing import PRE_TRAINING, inception
from vitrail.recipes.published import HEAD_BIAS, TITLES, Recipe, by_name, passes, published
from vitrail.training.run import Model, Optim, Run, Schedule

STRENGTHS: dict[str, tuple[tuple[int, float] | None, float]] = {
    "none": (None, 0.0),
    "light1": ((2, 0.0), 0.0),  # magnitude 0 still applies autocontrast, equalize and invert
    "light2": ((2, 10.0), 0.2),
    "medium1": ((2, 15.0), 0.2),
    "medium2": ((2, 15.0), 0.5),
    "strong1": ((2, 20.0), 0.5),
    "strong2": ((2, 20.0), 0.8),
}
"""Strength of augmentation: RandAugment as (operations, magnitude), and mixup's alpha."""

EPOCHS = 300


@dataclass(frozen=True)
class Row:
    """A network on a data set, with the settings of its published weights."""

    recipe: str
    model: str
    data: str
    strength: str
    weight_decay: float
    drop: float
    """Dropout and stochastic depth."""
    top1: float | None = None
    """Accuracy in percent on ImageNet after fine-tuning at 384 pixels (README of vision_transformer)."""


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


def pre_training(row: Row) -> Run:
    """Return the run of a row."""
    preset = inception()
    randaugment, mixup = STRENGTHS[row.strength]
    return Run(
        model=row.model,
        vit=Model(dropout=row.drop, drop_path=row.drop),
        image_size=PRE_TRAINING,
        objective=Supervised(loss="sigmoid", head_bias=HEAD_BIAS[row.data]),
        augment=replace(preset.augment, randaugment=randaugment, mixup=mixup),
        preprocess=preset.preprocess,
        optim=Optim(name="adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=row.weight_decay, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Steps(10_000)),
        duration=Epochs(EPOCHS),
        batch_size=4096,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )


def _regularised(row: Row) -> str:
    drop = f"dropout and stochastic depth {row.drop:g}" if row.drop else "no dropout"
    return f"weight decay {row.weight_decay:g}, {drop}"


def _recipes() -> Iterator[Recipe]:
    for row in TABLE:
        reached = "the weights are published; our sources have no accuracy for them."
        if row.top1 is not None:
            reached = f"{row.top1:.2f} % on ImageNet after fine-tuning at 384 pixels (their README)."
        yield published(
            row.recipe,
            pre_training(row),
            f"{row.model} on {TITLES[row.data]} with augmentation {row.strength!r}, {_regularised(row)} (AugReg).",
            module=__name__,
            cost=f"{passes(EPOCHS, row.data)} at {PRE_TRAINING} pixels.",
            expected=reached,
        )
    for strength, (randaugment, mixup) in STRENGTHS.items():
        row = Row(f"augreg/{strength}", "S/16", "imagenet", strength, 0.1, 0.0)
        operations = f"RandAugment {randaugment[0]} x {randaugment[1]:g}" if randaugment else "no RandAugment"
        yield published(
            row.recipe,
            pre_training(row),
            f"AugReg's augmentation {strength!r} ({operations}, mixup {mixup:g}) for S/16 and any other network.",
            notes=(
                "Another network: --model B/16. More regularisation: --vit.dropout 0.1 --vit.drop-path 0.1; less: "
                "--optim.weight-decay 0.03."
            ),
            module=__name__,
            cost=f"{EPOCHS} epochs at {PRE_TRAINING} pixels.",
            expected="less data and larger networks need stronger augmentation.",
        )


AUGREG = by_name(_recipes())
