"""BiT (Kolesnikov et al. 2020, "Big Transfer"): the ResNets' own pre-training, and the BiT-HyperRule.

Pre-training is that of its section 3.3: SGD with momentum 0.9, learning rate 0.03 per 256 images of a batch of
4096, 5,000 steps of warmup, a tenth after 30, 60 and 80 of 90 epochs, or after 10, 23, 30 and 37 of 40 on JFT-300M.
Its weight decay of 1e-4 goes through the momentum, which makes ten times as much of it; big_vision (`bit_i21k.py`)
writes the same decoupled, 3e-5 beside a rate of 0.03, and so does `bit_i1k.py` with 1e-4 beside 0.1: 1e-3 of the
learning rate, which is how weight decay is written here. Losses and head bias are big_vision's. Its configurations
decay along a cosine and clip at norm 1: `--schedule.shape cosine --optim.clip 1`.

The ViT paper pre-trains ResNets with Adam (`vitrail.recipes.paper`) and compares with this (D.1, Table 7) over 7
epochs of JFT-300M; where the rate falls in those is not printed, and here it is at the same shares of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.config import Epochs, Percent, Steps
from vitrail.objective.settings import Supervised
from vitrail.recipes.preprocessing import PRE_TRAINING, bit, inception
from vitrail.recipes.published import HEAD_BIAS, TITLES, Pretrained, Recipe, by_name, passes, published
from vitrail.training.run import Optim, Run, Schedule

BATCH = 4096
RATE = 0.03 * BATCH / 256
DECAY = 1e-3
"""Weight decay as a multiple of the learning rate."""
JFT = "jft300m"

DROPS = {
    "imagenet": tuple(100 * epoch / 90 for epoch in (30, 60, 80)),
    "imagenet21k": tuple(100 * epoch / 90 for epoch in (30, 60, 80)),
    JFT: tuple(100 * epoch / 40 for epoch in (10, 23, 30, 37)),
}
"""Points at which the learning rate falls to a tenth, in percent of the run."""


@dataclass(frozen=True)
class Row(Pretrained):
    """A row of BiT's tables."""

    expected: str = "BiT publishes the weights, and numbers for the largest network."


TABLE = (
    Row("bit/r50x1-imagenet", "R50x1", "imagenet", 90),
    Row("bit/r50x3-imagenet", "R50x3", "imagenet", 90),
    Row("bit/r101x1-imagenet", "R101x1", "imagenet", 90),
    Row("bit/r101x3-imagenet", "R101x3", "imagenet", 90),
    Row("bit/r152x2-imagenet", "R152x2", "imagenet", 90),
    Row("bit/r152x4-imagenet", "R152x4", "imagenet", 90, "81.30 % on ImageNet, fine-tuned (BiT, Table 2)."),
    Row("bit/r50x1-imagenet21k", "R50x1", "imagenet21k", 90),
    Row("bit/r50x3-imagenet21k", "R50x3", "imagenet21k", 90),
    Row("bit/r101x1-imagenet21k", "R101x1", "imagenet21k", 90),
    Row("bit/r101x3-imagenet21k", "R101x3", "imagenet21k", 90),
    Row("bit/r152x2-imagenet21k", "R152x2", "imagenet21k", 90),
    Row("bit/r152x4-imagenet21k", "R152x4", "imagenet21k", 90, "85.39 % on ImageNet, fine-tuned (BiT, Table 2)."),
    Row("bit/r152x4-jft", "R152x4", JFT, 40, "87.54 % on ImageNet, fine-tuned (ViT paper, Table 2)."),
    Row("bit/r50x1-jft-7ep", "R50x1", JFT, 7, "78.24 % on ImageNet after fine-tuning (ViT paper, Table 7)."),
    Row("bit/r152x2-jft-7ep", "R152x2", JFT, 7, "84.37 % on ImageNet after fine-tuning (ViT paper, Table 7)."),
)


def pre_training(row: Row) -> Run:
    """Return the run of a row."""
    preset = inception()
    sigmoid = Supervised(loss="sigmoid", head_bias=HEAD_BIAS[row.data])
    return Run(
        model=row.model,
        image_size=PRE_TRAINING,
        objective=Supervised() if row.data == "imagenet" else sigmoid,
        augment=preset.augment,
        preprocess=preset.preprocess,
        optim=Optim(name="sgd", lr=RATE, momentum=0.9, weight_decay=DECAY, clip=None),
        schedule=Schedule(shape="step", warmup=Steps(5000), drops=DROPS[row.data]),
        duration=Epochs(row.epochs),
        batch_size=BATCH,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )


def hyperrule(images: int, side: int) -> Run:
    """Return BiT-HyperRule: fine-tuning whose settings follow from the data set alone (`bit_hyperrule.py`).

    images: in the training set; side: pixels of a usual image's side. Fewer than 20,000 images are a small task,
    fewer than 500,000 a medium one. Images of less than 96 x 96 pixels are resized to 160 and cropped to 128,
    larger ones to 512 and 480 (so the code; the paper has 448 and 384, and those for R152x4 alone).
    """
    small, medium = images < 20_000, images < 500_000
    preset = bit(128, resized=160) if side < 96 else bit(480, resized=512)
    return Run(
        image_size=preset.preprocess.image_size[0],
        augment=replace(preset.augment, mixup=0.0 if small else 0.1),
        preprocess=preset.preprocess,
        optim=Optim(name="sgd", lr=0.003, momentum=0.9, weight_decay=0.0, clip=None),
        schedule=Schedule(
            shape="step",
            warmup=Steps(100 if small else 500),
            drops=(40.0, 60.0, 80.0) if small else (30.0, 60.0, 90.0),
        ),
        duration=Steps(500 if small else 10_000 if medium else 20_000),
        batch_size=512,
        evaluate_every=Percent(10),
        checkpoint_every=Percent(10),
    )


def _where(row: Row) -> str:
    return "the ViT paper (D.1)" if row.epochs == 7 else "the BiT paper"


def _recipes() -> Iterator[Recipe]:
    for row in TABLE:
        yield published(
            row.recipe,
            pre_training(row),
            f"BiT-{row.model} pre-trained on {TITLES[row.data]} for {row.epochs} epochs with SGD, as in {_where(row)}.",
            module=__name__,
            cost=f"{passes(row.epochs, row.data)} at {PRE_TRAINING} pixels.",
            expected=row.expected,
        )
    yield published(
        "bit/hyperrule",
        hyperrule(images=50_000, side=224),
        "BiT-HyperRule: fine-tuning whose length, resolution and mixup follow from the data set.",
        notes=(
            "500 steps for fewer than 20,000 images, 10,000 for fewer than 500,000, else 20,000; mixup for 20,000 "
            "images or more; 128 pixels for images smaller than 96 x 96, else 480. The settings shown are those for "
            "50,000 photographs. If a crop or a mirror image would have another label, use --augment.crop center "
            "--augment.no-flip."
        ),
        verb="finetune",
        by_data=hyperrule,
        module=__name__,
        cost="500, 10,000 or 20,000 steps of 512 images.",
        expected="85.39 % on ImageNet for R152x4 from ImageNet-21k (BiT, Table 2).",
    )


BIT = by_name(_recipes())
