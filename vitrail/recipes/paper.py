"""Pre-training as in the ViT paper: every row of Table 3.

The table gives epochs, learning rate, decay, weight decay and dropout; its caption the batch of 4096, 10,000 steps
of warmup, 224 pixels, and clipping at norm 1 for ImageNet. Settings that the paper omits are from its authors' code and
answers (google-research/vision_transformer, issues 2, 34 and 124; big_vision): sigmoid loss and its head bias, a
tanh layer as wide as the network before the classifier, linear decay to 1e-5, clipping at 1 on ImageNet-21k too,
Inception crop and mirroring. The text also mentions tuned label smoothing on the smaller sets, without a value.

Differences that cannot be expressed: the authors' first moments are bfloat16, here float32; their GELU is the tanh
form, here the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config import Epochs, Percent, Steps
from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.model.variants import ViTConfig, variant
from vitrail.objective.settings import Supervised
from vitrail.recipes.preprocessing import PRE_TRAINING, inception
from vitrail.recipes.published import HEAD_BIAS, TITLES, Pretrained, Recipe, by_name, passes, published
from vitrail.training.run import Model, Optim, Run, Schedule

BATCH = 4096
WARMUP = 10_000
LINEAR_END = 1e-5
JFT = "jft300m"


@dataclass(frozen=True)
class Regularisation:
    """Settings of Table 3 that all networks on one data set share."""

    decay: Literal["linear", "cosine"]
    weight_decay: float
    dropout: float
    clip: float | None


REGULARISATION = {
    JFT: Regularisation("linear", weight_decay=0.1, dropout=0.0, clip=None),
    "imagenet21k": Regularisation("linear", weight_decay=0.03, dropout=0.1, clip=1.0),
    "imagenet": Regularisation("cosine", weight_decay=0.3, dropout=0.1, clip=1.0),
}


@dataclass(frozen=True)
class Row(Pretrained):
    """A row of Table 3."""

    lr: float
    top1: float | None
    """Accuracy in percent on ImageNet after fine-tuning at 384 pixels: Table 6 for JFT-300M, else Table 5."""
    exaflops: int | None = None
    """Compute of pre-training (Table 6)."""


# if the table has two lengths, the plain name is the longer run, whose network is in Table 2
TABLE_3 = (
    Row("paper/vit-b16-jft", "B/16", JFT, 7, 8e-4, 84.15, 224),
    Row("paper/vit-b32-jft", "B/32", JFT, 7, 8e-4, 80.73, 55),
    Row("paper/vit-l32-jft", "L/32", JFT, 7, 6e-4, 84.37, 196),
    Row("paper/vit-l16-jft", "L/16", JFT, 14, 4e-4, 87.12, 1567),
    Row("paper/vit-l16-jft-7ep", "L/16", JFT, 7, 4e-4, 86.30, 783),
    Row("paper/vit-h14-jft", "H/14", JFT, 14, 3e-4, 88.08, 4262),
    Row("paper/r50x1-jft", "R50x1", JFT, 7, 1e-3, 77.54, 50),
    Row("paper/r50x2-jft", "R50x2", JFT, 7, 1e-3, 82.12, 199),
    Row("paper/r101x1-jft", "R101x1", JFT, 7, 8e-4, 80.67, 96),
    Row("paper/r152x1-jft", "R152x1", JFT, 7, 6e-4, 81.88, 141),
    Row("paper/r152x2-jft", "R152x2", JFT, 7, 6e-4, 84.97, 563),
    Row("paper/r50-b16-jft", "R50+B/16", JFT, 7, 8e-4, 85.58, 274),
    Row("paper/r50-b32-jft", "R50+B/32", JFT, 7, 8e-4, 84.90, 106),
    Row("paper/r50-l32-jft", "R50+L/32", JFT, 7, 2e-4, 85.68, 246),
    Row("paper/r50-l16-jft", "R50+L/16", JFT, 14, 4e-4, 87.12, 1668),
    Row("paper/r50-l16-jft-7ep", "R50+L/16", JFT, 7, 4e-4, 86.60, 859),
    Row("paper/vit-b16-imagenet21k", "B/16", "imagenet21k", 90, 1e-3, 83.97),
    Row("paper/vit-b32-imagenet21k", "B/32", "imagenet21k", 90, 1e-3, 81.28),
    Row("paper/vit-l16-imagenet21k", "L/16", "imagenet21k", 90, 1e-3, 85.15),
    Row("paper/vit-l16-imagenet21k-30ep", "L/16", "imagenet21k", 30, 1e-3, None),
    Row("paper/vit-l32-imagenet21k", "L/32", "imagenet21k", 90, 1e-3, 80.99),
    Row("paper/vit-l32-imagenet21k-30ep", "L/32", "imagenet21k", 30, 1e-3, None),
    Row("paper/vit-b16-imagenet", "B/16", "imagenet", 300, 3e-3, 77.91),
    Row("paper/vit-b32-imagenet", "B/32", "imagenet", 300, 3e-3, 73.38),
    Row("paper/vit-l16-imagenet", "L/16", "imagenet", 300, 3e-3, 76.53),
    Row("paper/vit-l32-imagenet", "L/32", "imagenet", 300, 3e-3, 71.16),
)


def pre_training(row: Row) -> Run:
    """Return the run of a row: Adam with decoupled weight decay on kernels, as for all networks of the paper."""
    of = REGULARISATION[row.data]
    network = variant(row.model)
    preset = inception()
    return Run(
        model=row.model,
        vit=Model(pre_logits=network.width, dropout=of.dropout) if isinstance(network, ViTConfig) else Model(),
        image_size=PRE_TRAINING,
        objective=Supervised(loss="sigmoid", head_bias=HEAD_BIAS[row.data]),
        augment=preset.augment,
        preprocess=preset.preprocess,
        optim=Optim(name="adamw", lr=row.lr, betas=(0.9, 0.999), weight_decay=of.weight_decay, clip=of.clip),
        schedule=Schedule(of.decay, warmup=Steps(WARMUP), end=LINEAR_END if of.decay == "linear" else 0.0),
        duration=Epochs(row.epochs),
        batch_size=BATCH,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )


def _cost(row: Row) -> str:
    seen = passes(row.epochs, row.data)
    if row.exaflops is not None:
        return f"{row.exaflops:,} exaFLOPs (Table 6): {seen} at {PRE_TRAINING} pixels."
    known = next(other for other in TABLE_3 if other.model == row.model and other.exaflops is not None)
    assert known.exaflops is not None
    ratio = row.epochs * CATALOG[row.data].splits["train"] / (known.epochs * CATALOG[known.data].splits["train"])
    return f"about {known.exaflops * ratio:.0f} exaFLOPs, at Table 6's rate: {seen} at {PRE_TRAINING} pixels."


def _expected(row: Row) -> str:
    if row.top1 is None:
        return "no number is published for this length."
    table = "Table 6" if row.data == JFT else "Table 5"
    return f"{row.top1:.2f} % top-1 on ImageNet after fine-tuning at 384 pixels ({table})."


def _recipe(row: Row) -> Recipe:
    network = row.model if row.model.startswith("R") else f"ViT-{row.model}"
    return published(
        row.recipe,
        pre_training(row),
        f"{network} pre-trained on {TITLES[row.data]} for {row.epochs} epochs, as in the ViT paper (Table 3).",
        module=__name__,
        cost=_cost(row),
        expected=_expected(row),
    )


PAPER = by_name(_recipe(row) for row in TABLE_3)
