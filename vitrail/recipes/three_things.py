"""The follow-up's training procedure ("Three things everyone should know about Vision Transformers", section 2.2).

A2 of "ResNet strikes back" (Wightman et al. 2021): LAMB, batch 2048, weight decay 0.02, 5 epochs of warmup, cosine
to 1e-6, binary cross-entropy in which every mixed class counts fully, RandAugment of magnitude 7, mixup 0.1,
CutMix 1, three copies of each image, evaluation images resized to 236 and cropped to 224. The follow-up sets
learning rate and stochastic depth per network, and adds LayerScale, with which it trains for 400 epochs, not 300.

The deeper and parallel networks of section 3 use the same procedure. Their learning rates and stochastic depths are
not published, so those of Table 1 for the same width are used.

Differences that cannot be expressed: the authors normalise pixels with ImageNet's mean and deviation, and initialise
weights truncated-normal. Settings that the paper omits are from the authors' code (facebookresearch/deit,
`models_v2.py`): LayerScale starts at 1e-4, all blocks have one rate of stochastic depth, the class token has no
position embedding, and mixed targets have threshold 0. LAMB clips at norm 1, as timm's and apex's do by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.config import Epochs, Percent
from vitrail.objective.settings import Supervised
from vitrail.recipes.deit import CROP, bicubic
from vitrail.recipes.published import Recipe, by_name, passes, published
from vitrail.training.run import Model, Optim, Run, Schedule

EPOCHS = 300
EPOCHS_WITH_LAYER_SCALE = 400
LAYER_SCALE = 1e-4


@dataclass(frozen=True)
class Row:
    """A network in Table 1."""

    name: str
    model: str
    lr: float
    drop_path: float
    top1: float
    """Percent on ImageNet after 300 epochs."""
    top1_with_layer_scale: float
    """Percent on ImageNet after 400 epochs with LayerScale."""


TABLE_1 = (
    Row("three-things/vit-ti16", "Ti/16", 4e-3, 0.0, 72.7, 73.5),
    Row("three-things/vit-s16", "S/16", 4e-3, 0.05, 79.7, 80.7),
    Row("three-things/vit-b16", "B/16", 3e-3, 0.1, 82.2, 82.7),
    Row("three-things/vit-l16", "L/16", 3e-3, 0.4, 83.0, 84.0),
)

SECTION_3 = (
    *("S36x1", "S18x2", "S12x3", "S9x4", "S60x1", "S30x2", "S20x3"),
    *("Ti24x1", "Ti12x2", "B24x1", "B12x2", "L24x1", "L12x2"),
)
"""Sequential and parallel networks, as layers x branches."""


def baseline(row: Row, layer_scale: bool = False) -> Run:
    """Return the run of a row, for 300 epochs or, with LayerScale, 400."""
    vit = Model(drop_path=row.drop_path, drop_path_shape="constant", cls_position=False)
    return Run(
        model=row.model,
        vit=replace(vit, layer_scale=LAYER_SCALE) if layer_scale else vit,
        image_size=224,
        objective=Supervised(loss="bce", bce_threshold=0.0),
        augment=replace(CROP, randaugment=(2, 7.0), mixup=0.1, cutmix=1.0, repeats=3),
        preprocess=bicubic(224, crop=0.95),
        optim=Optim(name="lamb", lr=row.lr, weight_decay=0.02, eps=1e-6, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Epochs(5), end=1e-6),
        duration=Epochs(EPOCHS_WITH_LAYER_SCALE if layer_scale else EPOCHS),
        batch_size=2048,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )


def regrouped(network: str) -> Run:
    """Return the run of a network of section 3, such as "S18x2", with the settings of Table 1 for its width."""
    width = network.rstrip("x0123456789")
    row = next(row for row in TABLE_1 if row.model == f"{width}/16")
    return replace(baseline(row), model=f"{network}/16")


def _recipes() -> Iterator[Recipe]:
    for row in TABLE_1:
        for layer_scale in (False, True):
            name = f"{row.name}-400-ls" if layer_scale else f"{row.name}-300"
            epochs = EPOCHS_WITH_LAYER_SCALE if layer_scale else EPOCHS
            scaled = " with LayerScale" if layer_scale else ""
            top1 = row.top1_with_layer_scale if layer_scale else row.top1
            yield published(
                name,
                baseline(row, layer_scale),
                f"ViT-{row.model} on ImageNet for {epochs} epochs{scaled}, as in the follow-up (section 2.2).",
                module=__name__,
                cost=f"{passes(epochs, 'imagenet')} at 224 pixels.",
                expected=f"{top1} % on ImageNet (Table 1 of the follow-up).",
            )
    for network in SECTION_3:
        name = f"three-things/vit-{network.lower()}-300"
        yield published(
            name,
            regrouped(network),
            f"ViT-{network}/16 on ImageNet for {EPOCHS} epochs, as in the follow-up (section 3).",
            module=__name__,
            cost=f"{passes(EPOCHS, 'imagenet')} at 224 pixels.",
            expected="a point in Figures 1 to 3 of the follow-up, without a printed value; two branches are best.",
        )


THREE_THINGS = by_name(_recipes())
