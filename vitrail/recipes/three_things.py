"""The follow-up's training procedure ("Three things everyone should know about Vision Transformers", section 2.2).

A2 of "ResNet strikes back" (Wightman et al. 2021): LAMB, batch 2048, weight decay 0.02, 5 epochs of warmup, cosine
to 1e-6, binary cross-entropy in which every mixed class counts fully, RandAugment of magnitude 7, mixup 0.1,
CutMix 1, three copies of each image, evaluation images resized to 236 and cropped to 224. The follow-up sets
learning rate and stochastic depth per network. It also trains with LayerScale, for 400 epochs instead of 300.

The deeper and parallel networks of section 3 use the same procedure. Their learning rates and stochastic depths are
not published, so those of Table 1 for the same width are used. Figure 2 has its widest networks with LayerScale ("even
though we used LS for this size"): `...-l24x1-300-ls` and `...-l12x2-300-ls`.

A difference that cannot be expressed: the authors normalise pixels with ImageNet's mean and standard deviation. What
the paper omits is from the authors' code (facebookresearch/deit, `models_v2.py`): all kernels, also that of the
classifier, start from a normal of 0.02, LayerScale starts at 1e-4, all blocks have one rate of stochastic depth, the
class token has no position embedding, and mixed targets have threshold 0. LAMB clips at norm 1, the default of timm's
and apex's LAMB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.durations import Epochs
from vitrail.objective.settings import Supervised
from vitrail.recipes import deit, deit3
from vitrail.recipes.preprocessing import bicubic
from vitrail.recipes.published import Recipe, by_name, published
from vitrail.training.run import Model, Optim, Run, Schedule


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
    *("S36x1", "S18x2", "S12x3", "S9x4", "S60x1", "S30x2", "S20x3"),  # Figure 1
    *("Ti24x1", "Ti12x2", "S24x1", "S12x2", "B24x1", "B12x2", "L24x1", "L12x2"),  # Figures 2 and 3
    *("B36x1", "B18x2", "S48x1", "S24x2"),  # Tables 2 and 3
)
"""Sequential and parallel networks, as layers x branches."""
SECTION_3_LAYER_SCALE = ("L24x1", "L12x2", "S36x1", "S18x2", "B36x1", "B18x2", "S48x1", "S24x2")
"""Those that the paper trains with LayerScale, too: width L in Figure 2, and the networks of Tables 2 and 3."""


def baseline(row: Row, layer_scale: bool = False) -> Run:
    """Return the run of a row, for 300 epochs or, with LayerScale, 400."""
    vit = Model(drop_path=row.drop_path, drop_path_shape="constant", cls_position=False, init="deit")
    return replace(
        bicubic(deit.base(row.model), 224, crop=0.95),
        vit=replace(vit, layer_scale=1e-4) if layer_scale else vit,
        objective=Supervised(loss="bce", bce_threshold=0.0),
        augment=replace(deit.CROP, randaugment=(2, 7.0), mixup=0.1, cutmix=1.0, repeats=3),
        optim=Optim(name="lamb", lr=row.lr, weight_decay=0.02, eps=1e-6, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Epochs(5), end=1e-6),
        duration=Epochs(400 if layer_scale else 300),
        batch_size=2048,
    )


def regrouped_run(network: str, layer_scale: bool = False) -> Run:
    """Return the run of a network of section 3, such as "S18x2", with the settings of Table 1 for its width.

    With LayerScale it takes 300 epochs as well, so that only LayerScale differs; the paper does not print the length.
    """
    width = network.rstrip("x0123456789")
    row = next(row for row in TABLE_1 if row.model == f"{width}/16")
    return replace(baseline(row, layer_scale), model=f"{network}/16", duration=Epochs(300))


def finetune() -> Run:
    """Return the run of section 4: attention alone is tuned at 384 pixels, otherwise as DeiT-III fine-tunes at 384."""
    run = deit3.tuned(deit3.ROWS[0])
    return replace(run, vit=Model(init="deit"), keep_head=False, tune="attention")


UNPRINTED = "a point in Figures 1 to 3 or a row of Tables 2 and 3, whose values are not in the paper's text."
EXPECTED = {("L24x1", False): "83 % on ImageNet (section 3.3)."}
"""(network, with LayerScale) -> what the text prints."""


def _recipes() -> Iterator[Recipe]:
    for row in TABLE_1:
        for suffix, layer_scale, top1 in (("-300", False, row.top1), ("-400-ls", True, row.top1_with_layer_scale)):
            length = "400 epochs with LayerScale" if layer_scale else "300 epochs"
            yield published(
                row.name + suffix,
                baseline(row, layer_scale),
                f"ViT-{row.model} on ImageNet for {length}, as in the follow-up (section 2.2).",
                expected=f"{top1} % on ImageNet (Table 1 of the follow-up).",
            )
    networks = [*((network, False) for network in SECTION_3), *((network, True) for network in SECTION_3_LAYER_SCALE)]
    for network, layer_scale in networks:
        length = "300 epochs with LayerScale" if layer_scale else "300 epochs"
        yield published(
            f"three-things/vit-{network.lower()}-300{'-ls' * layer_scale}",
            regrouped_run(network, layer_scale),
            f"ViT-{network}/16 on ImageNet for {length}, as in the follow-up (section 3).",
            expected=EXPECTED.get((network, layer_scale), UNPRINTED),
        )
    yield published(
        "three-things/finetune",
        finetune(),
        "Fine-tuning at 384 pixels, or on other images, as in the follow-up (section 4).",
        notes=(
            "The paper prints the resolution, 384 pixels, and what is tuned: attention here, --tune ffn or all for the "
            "comparison. It does not print learning rate, weight decay, length, batch and augmentation; they are those "
            "of DeiT-III's fine-tuning, by the same authors. For the same classes, keep the classifier: --keep-head."
        ),
        verb="finetune",
        expected="tuning attention alone is within 0.1 of tuning everything (Table 5).",
    )


THREE_THINGS = by_name(_recipes(), source=__name__)
