"""BiT (Kolesnikov et al. 2020, "Big Transfer"): pre-training of ResNets, and the BiT-HyperRule.

Pre-training follows section 3.3: SGD with momentum 0.9, learning rate 0.03 per 256 images of a batch of
4096, 5,000 steps of warmup, a tenth after 30, 60 and 80 of 90 epochs, or after 10, 23, 30 and 37 of 40 on JFT-300M.
BiT's weight decay of 1e-4 passes through the momentum, which makes it ten times as strong. big_vision decouples it:
3e-5 with a learning rate of 0.03 (`bit_i21k.py`) and 1e-4 with 0.1 (`bit_i1k.py`), which is 1e-3 times the learning
rate. vitrail writes weight decay as this factor. Losses and head bias are big_vision's. Its configurations also decay
along a cosine and clip at norm 1: `--schedule.shape cosine --optim.clip 1`.

The ViT paper pre-trains ResNets with Adam (`vitrail.recipes.paper`) and compares with SGD over 7
epochs of JFT-300M (D.1, Table 7). It does not print where the rate falls in these 7 epochs; here it falls at the same
shares of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.durations import Steps
from vitrail.objective.settings import Supervised
from vitrail.recipes.paper_finetune import finetune
from vitrail.recipes.preprocessing import bit
from vitrail.recipes.published import TITLES, Recipe, by_name, pre_training, published
from vitrail.training.run import Optim, Run, Schedule

JFT = "jft300m"

DROPS = {
    "imagenet": tuple(100 * epoch / 90 for epoch in (30, 60, 80)),
    "imagenet21k": tuple(100 * epoch / 90 for epoch in (30, 60, 80)),
    JFT: tuple(100 * epoch / 40 for epoch in (10, 23, 30, 37)),
}
"""Points of the run, in percent, at which the learning rate is divided by ten."""


@dataclass(frozen=True)
class Row:
    """A row of BiT's tables."""

    recipe: str
    model: str
    data: str
    epochs: int
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


def run_of(row: Row) -> Run:
    """Return the run of a row."""
    run = pre_training(row.model, row.data, row.epochs)
    return replace(
        run,
        objective=Supervised() if row.data == "imagenet" else run.objective,
        optim=Optim(name="sgd", lr=0.03 * 4096 / 256, momentum=0.9, weight_decay=1e-3, clip=None),
        schedule=Schedule(shape="step", warmup=Steps(5000), drops=DROPS[row.data]),
    )


def hyperrule(images: int, side: int) -> Run:
    """Return BiT-HyperRule: fine-tuning whose settings follow from the data set alone (`bit_hyperrule.py`).

    `images` is the number of training images, `side` the side of a typical image in pixels. Fewer than 20,000 images
    are a small task, fewer than 500,000 a medium one. Images smaller than 96 x 96 pixels are resized to 160 and cropped
    to 128, larger ones to 512 and 480. These sizes are the code's; the paper has 448 and 384, for R152x4 alone.
    """
    small, medium = images < 20_000, images < 500_000
    preset = bit(128, resized=160) if side < 96 else bit(480, resized=512)
    drops = (40.0, 60.0, 80.0) if small else (30.0, 60.0, 90.0)
    return replace(
        preset.of(finetune()),
        augment=replace(preset.augment, mixup=0.0 if small else 0.1),
        optim=Optim(name="sgd", lr=0.003, momentum=0.9, weight_decay=0.0, clip=None),
        duration=Steps(500 if small else 10_000 if medium else 20_000),
        schedule=Schedule(shape="step", warmup=Steps(100 if small else 500), drops=drops),
    )


def _recipes() -> Iterator[Recipe]:
    for row in TABLE:
        source = "the ViT paper (D.1)" if row.epochs == 7 else "the BiT paper"
        yield published(
            row.recipe,
            run_of(row),
            f"BiT-{row.model} pre-trained on {TITLES[row.data]} for {row.epochs} epochs with SGD, as in {source}.",
            data=row.data,
            expected=row.expected,
        )
    yield published(
        "bit/hyperrule",
        hyperrule(images=50_000, side=224),
        "BiT-HyperRule: fine-tuning. The data set decides on the length, the resolution and mixup.",
        notes=(
            "500 steps for fewer than 20,000 images, 10,000 for fewer than 500,000, else 20,000; mixup for 20,000 "
            "images or more; 128 pixels for images smaller than 96 x 96, else 480. The settings shown are those for "
            "50,000 photographs. If cropping or mirroring would change the label, use --augment.crop center "
            "--augment.no-flip."
        ),
        verb="finetune",
        by_data=hyperrule,
        cost="500, 10,000 or 20,000 steps of 512 images.",
        expected="85.39 % on ImageNet for R152x4 from ImageNet-21k (BiT, Table 2).",
    )


BIT = by_name(_recipes(), source=__name__)
