"""Pre-training as in the ViT paper: every row of Table 3, and the networks that only Tables 5 and 6 have.

The table gives epochs, learning rate, decay, weight decay and dropout; its caption the batch of 4096, 10,000 steps
of warmup, 224 pixels, and clipping at norm 1 for ImageNet. Settings that the paper omits are from its authors' code and
answers (google-research/vision_transformer, issues 2, 34 and 124; big_vision): sigmoid loss and its head bias, a
tanh layer as wide as the network before the classifier, linear decay to 1e-5, clipping at 1 on ImageNet-21k too,
Inception crop and mirroring. The text also mentions tuned label smoothing on the smaller sets, without a value.

Differences that cannot be expressed: the authors store Adam's first moments in bfloat16 (vitrail: float32), and use the
tanh form of GELU (vitrail: the exact form).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.durations import Steps
from vitrail.model.variants import ViTConfig, variant
from vitrail.recipes.published import TITLES, Recipe, by_name, length, pre_training, published
from vitrail.training.run import Model, Optim, Run, Schedule

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
class Row:
    """A row of Table 3."""

    recipe: str
    model: str
    data: str
    epochs: int
    lr: float
    top1: float | None
    """Accuracy in percent on ImageNet after fine-tuning at 384 pixels: Table 6 for JFT-300M, else Table 5."""
    exaflops: int | None = None
    """Compute of pre-training (Table 6)."""
    settings_of: str = ""
    """Recipe whose learning rate this is, for a network that Table 3 lacks."""


# if the table has two lengths for a network, the name without a suffix is the longer run: Table 2 has its network
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


BEYOND_TABLE_3 = (
    Row("paper/vit-h14-imagenet21k", "H/14", "imagenet21k", 90, 1e-3, 85.13, None, "paper/vit-l16-imagenet21k"),
    Row("paper/r152x2-jft-14ep", "R152x2", JFT, 14, 6e-4, 85.56, 1126, "paper/r152x2-jft"),
    Row("paper/r200x3-jft-14ep", "R200x3", JFT, 14, 6e-4, 87.22, 3306, "paper/r152x2-jft"),
)
"""Networks of Tables 5 and 6 whose settings are not in Table 3: those of the nearest network that is."""


def run_of(row: Row) -> Run:
    """Return the run of a row: Adam with decoupled weight decay on kernels, as for all networks of the paper."""
    shared = REGULARISATION[row.data]
    transformer = isinstance(variant(row.model), ViTConfig)
    return replace(
        pre_training(row.model, row.data, row.epochs),
        vit=Model(pre_logits="width", dropout=shared.dropout) if transformer else Model(),
        optim=Optim(name="adamw", lr=row.lr, betas=(0.9, 0.999), weight_decay=shared.weight_decay, clip=shared.clip),
        schedule=Schedule(shared.decay, warmup=Steps(10_000), end=1e-5 if shared.decay == "linear" else 0.0),
    )


def _compute(row: Row) -> str:
    """Return the compute of a row in words. If Table 6 lacks it, it is scaled from another run of the same network."""
    if row.exaflops is not None:
        return f"{row.exaflops:,} exaFLOPs (Table 6)"
    known = next(other for other in TABLE_3 if other.model == row.model and other.exaflops is not None)
    assert known.exaflops is not None
    ratio = row.epochs * CATALOG[row.data].splits["train"] / (known.epochs * CATALOG[known.data].splits["train"])
    return f"about {known.exaflops * ratio:.0f} exaFLOPs, at Table 6's rate"


def _expected(row: Row) -> str:
    if row.top1 is None:
        return "no number is published for this length."
    table = "Table 6" if row.data == JFT else "Table 5"
    return f"{row.top1:.2f} % top-1 on ImageNet after fine-tuning at 384 pixels ({table})."


def _recipe(row: Row) -> Recipe:
    network = row.model if row.model.startswith("R") else f"ViT-{row.model}"
    run = run_of(row)
    table = 3 if not row.settings_of else 6 if row.data == JFT else 5
    return published(
        row.recipe,
        run,
        f"{network} pre-trained on {TITLES[row.data]} for {row.epochs} epochs, as in the ViT paper (Table {table}).",
        notes=f"Table 3 lacks this run; its learning rate is that of {row.settings_of}." if row.settings_of else "",
        cost=f"{_compute(row)}: {length(run, row.data)}",
        expected=_expected(row),
    )


REGULARISED = frozenset(row.recipe for row in TABLE_3 if row.data == "imagenet")
REGULARISATION_GRID = {
    "optim.weight_decay": (0.03, 0.1, 0.3),
    "vit.dropout": (0.0, 0.1),
    "objective.smoothing": (0.0, 0.1),
}
"""What section 4.3 tunes on the smaller data sets: weight decay, dropout and label smoothing. It prints no values;
these are Table 3's and the usual smoothing. `vitrail sweep DIR --recipe paper/vit-b16-imagenet` tries them all."""

PAPER = by_name((_recipe(row) for row in (*TABLE_3, *BEYOND_TABLE_3)), source=__name__)
