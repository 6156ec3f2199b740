"""Fine-tuning as in the ViT paper: every row of Table 4, and the two runs at higher resolution of Table 2.

The table gives steps and learning rates to try, its caption cosine decay, batch 512, no weight decay, clipping at
norm 1, 384 pixels; the text gives SGD with momentum 0.9, a zero layer in place of the whole head (as
`vitrail finetune` does with any weights), and the share of the training images on which the learning rate is chosen
(appendix B.1.1), which is `data.holdout` here. The text uses ImageNet's rate of 0.06 for ResNets and hybrids only. The
warmup is from the authors' code, and so are the ways to prepare images (`vitrail.recipes.preprocessing`): vit_jax for
the plain name, big_vision for `...-big-vision`, and that of Kolesnikov et al. for `...-bit`.

The paper's final accuracies are from a second run on all training images with the chosen learning rate:
`--data.holdout 0`. A patch of 14 does not divide 384: for ViT-H/14 the side is the next multiple, 392.

Differences that cannot be expressed: the authors store momentum in bfloat16 (vitrail: float32); vit_jax resizes without
antialiasing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vitrail.data.settings import Augment, Data
from vitrail.durations import Percent, Steps
from vitrail.recipes.preprocessing import FINE_TUNING, Preset, big_vision, bit, vit_jax
from vitrail.recipes.published import Recipe, by_name, described, published
from vitrail.training.run import Average, Optim, Run, Schedule

POLYAK = Average(kind="ema", decay=0.9999)
"""The "Polyak averaging" of section 4.1. It has a factor, so it is an exponential average."""


@dataclass(frozen=True)
class Row:
    """A data set in Table 4."""

    recipe: str
    title: str
    steps: int
    warmup: int
    """Steps of warmup in vit_jax and big_vision."""
    grid: tuple[float, ...]
    """Learning rates that the paper tries."""
    holdout: float
    """Share of the training images held out to choose the learning rate."""
    expected: str
    crop: Literal["inception", "random"] = "inception"
    """Crop of the training images in big_vision."""

    @property
    def lr(self) -> float:
        """The default learning rate: vit_jax's 0.03, or the only one of the grid."""
        return self.grid[0] if len(self.grid) == 1 else 0.03


def _table_2(h14: str, l16: str, i21k: str) -> str:
    return f"{h14} % (ViT-H/14, JFT), {l16} % (ViT-L/16, JFT), {i21k} % (ViT-L/16, ImageNet-21k), in Table 2."


PREPARED = {"": "", "-big-vision": ", images prepared as by big_vision", "-bit": ", images prepared as for BiT"}
"""Suffix of a recipe -> how its images are prepared, in words."""

TABLE_5 = "88.04 % (ViT-H/14, JFT), 87.12 % (ViT-L/16, JFT), 85.15 % (ViT-L/16, ImageNet-21k), in Table 5."
GRID = (0.001, 0.003, 0.01, 0.03)
GRID_IMAGENET = (0.003, 0.01, 0.03, 0.06)
CONVOLUTIONAL_RATE = 0.06
"""Table 4 has this rate for ImageNet; the text has it for ResNets and hybrids only (appendix B.1.1)."""

IMAGENET = Row("paper/finetune-imagenet", "ImageNet", 20_000, 500, GRID_IMAGENET, 0.01, TABLE_5)
CIFAR_100 = Row(
    "paper/finetune-cifar100", "CIFAR-100", 10_000, 500, GRID, 0.02, _table_2("94.55", "93.90", "93.25"), "random"
)
CIFAR_10 = Row(
    "paper/finetune-cifar10", "CIFAR-10", 10_000, 500, GRID, 0.02, _table_2("99.50", "99.42", "99.15"), "random"
)
PETS = Row("paper/finetune-pets", "Oxford-IIIT Pets", 500, 100, GRID, 0.1, _table_2("97.56", "97.32", "94.67"))
FLOWERS = Row("paper/finetune-flowers", "Oxford Flowers-102", 500, 100, GRID, 0.1, _table_2("99.68", "99.74", "99.61"))
VTAB = Row("paper/finetune-vtab", "VTAB (19 tasks)", 2_500, 500, (0.01,), 0.2, _table_2("77.63", "76.28", "72.72"))
"""800 images to train on, 200 to choose by, prepared as in BiT, at 384 pixels for every task. The size before the crop
and the warmup are not published; they are 448 pixels and 500 steps here, as for the other data sets."""

TABLE_4 = (IMAGENET, CIFAR_100, CIFAR_10, PETS, FLOWERS, VTAB)


def finetune() -> Run:
    """SGD with momentum 0.9, cosine decay, no weight decay, gradients clipped at norm 1, batch 512.

    Inception crop and mirroring; a zero classifier replaces the pretrained one, and positions are resampled to the new
    resolution. Duration and warmup are shorter for smaller data sets (`vitrail.transfer.protocol.budget`); the settings
    shown are those for 500,000 images or more. The paper tries learning rates 0.003, 0.01, 0.03 and 0.06.

    Command: `vitrail finetune DIR --from runs/x --recipe finetune`
    Cost: 500 to 20,000 steps of 512 images, depending on the size of the data set.
    """
    return Run(
        augment=Augment(crop="inception"),
        optim=Optim(name="sgd", lr=0.03, momentum=0.9, weight_decay=0.0, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Percent(2.5)),
        duration=Steps(20_000),
        batch_size=512,
        evaluate_every=Percent(10),
        checkpoint_every=Percent(10),
    )


def fine_tuning(row: Row, preset: Preset) -> Run:
    """Return the run of a row with one of the ways to prepare images. `--from` names the weights."""
    run = preset.of(finetune())
    return replace(
        run,
        data=Data(holdout=row.holdout),
        optim=replace(run.optim, lr=row.lr),
        schedule=replace(run.schedule, warmup=Steps(row.warmup)),
        duration=Steps(row.steps),
    )


def _recipe(row: Row, name: str, run: Run, of: str, expected: str) -> Recipe:
    side = run.image_size
    grid = ", ".join(f"{lr:g}" for lr in row.grid)
    tried = f"The paper tries the learning rates {grid}" if len(row.grid) > 1 else f"The learning rate is {grid}"
    return published(
        name,
        run,
        f"Fine-tuning on {row.title} at {side} pixels, as in the ViT paper ({of}).",
        notes=f"{tried}. It trains on {100 * (1 - row.holdout):.0f} % of the training images and chooses on the rest.",
        verb="finetune",
        cost=f"{row.steps:,} steps of {run.batch_size} images of {side} x {side} pixels.",
        expected=expected,
    )


def _recipes() -> Iterator[Recipe]:
    for row in TABLE_4:
        kolesnikov = bit(FINE_TUNING, resized=448)
        presets = {"": vit_jax(), "-big-vision": big_vision(crop=row.crop), "-bit": kolesnikov}
        if row is VTAB:
            presets = {"": kolesnikov}
        for suffix, preset in presets.items():
            of = f"Table 4{PREPARED[suffix]}"
            yield _recipe(row, row.recipe + suffix, fine_tuning(row, preset), of, row.expected)
    for side, expected in (
        (512, "87.76 % for ViT-L/16 from JFT, 85.30 % from ImageNet-21k (Table 2)."),
        (518, "88.55 % for ViT-H/14 from JFT (Table 2)."),
    ):
        run = replace(fine_tuning(IMAGENET, vit_jax(side)), average=POLYAK)
        yield _recipe(IMAGENET, f"{IMAGENET.recipe}-{side}", run, "section 4.1, Polyak averaging 0.9999", expected)


def _by_data(images: int, side: int) -> Run:
    from vitrail.transfer.protocol import for_images  # which imports numpy: every --help would wait for it

    return for_images(finetune(), images)


FINETUNE = replace(described(finetune, "finetune"), by_data=_by_data)
PAPER_FINETUNE = by_name(_recipes(), source=__name__)

ROW_OF = {name: next(row for row in TABLE_4 if name.startswith(row.recipe)) for name in PAPER_FINETUNE}
"""Name of a recipe -> its row of Table 4, with the learning rates to try and the share of the images to choose by.

CIFAR-100 precedes CIFAR-10 in the table, because its recipe's name starts with that of CIFAR-10."""
