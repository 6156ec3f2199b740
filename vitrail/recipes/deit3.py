"""DeiT-III (Touvron et al. 2022, "Revenge of the ViT"): the commands of its `README_revenge.md`, one recipe each.

ImageNet from scratch: LAMB, binary cross-entropy in which every mixed class counts fully, 3-Augment, three copies of
each image, LayerScale, stochastic depth with one rate for all blocks, small images, then fine-tuning at 224.
ImageNet-21k: cross-entropy with smoothing, CutMix alone, a simple random crop; then fine-tuning on ImageNet.

Differences that cannot be expressed: DeiT-III sets the learning rate once per epoch, starts at 1e-6 and includes the
warmup in the cosine (vitrail: once per step, from 0, after the warmup). Its simple random crop first pads by 4
mirrored pixels. It normalises pixels with ImageNet's mean and standard deviation. If the patch size 14 does not divide
the side, it drops the last pixels: 160 and 128 here become 154 and 126, with the same number of tokens. LAMB clips at
norm 1, which is the default of apex's LAMB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.data.settings import Augment
from vitrail.durations import Epochs
from vitrail.objective.settings import Supervised
from vitrail.recipes import deit
from vitrail.recipes.preprocessing import bicubic
from vitrail.recipes.published import Recipe, by_name, published
from vitrail.training.run import Model, Optim, Run

LAMB = Optim("lamb", lr=1e-3, weight_decay=0.02, eps=1e-6, clip=1.0)
"""The optimiser on ImageNet-21k."""
SIMPLE = Augment(crop="random", three_augment=True, color_jitter=0.3, cutmix=1.0)
"""3-Augment after a simple random crop, for ImageNet-21k and the fine-tuning after it."""


@dataclass(frozen=True)
class Row:
    """A network and the settings that differ by network."""

    name: str
    model: str
    side: int
    """Image side in pixels while training on ImageNet from scratch."""
    lr: float
    drop_path: float
    top1: float
    """Accuracy in percent on ImageNet at 224 pixels, trained on ImageNet alone."""
    tuned: tuple[int, float]
    """Image side and stochastic depth of the fine-tuning afterwards."""
    side_21k: int
    epochs_21k: int
    drops_21k: tuple[float, float]
    """Stochastic depth on ImageNet-21k, and on ImageNet afterwards."""
    top1_21k: float
    """Accuracy in percent on ImageNet at 224 pixels, after ImageNet-21k."""


ROWS = (
    Row("vit-s16", "S/16", 224, 4e-3, 0.05, 81.4, (384, 0.0), 224, 240, (0.05, 0.05), 83.1),
    Row("vit-b16", "B/16", 192, 3e-3, 0.2, 83.8, (224, 0.2), 224, 240, (0.1, 0.15), 85.7),
    Row("vit-l16", "L/16", 192, 3e-3, 0.45, 84.9, (224, 0.45), 224, 240, (0.3, 0.4), 87.0),
    Row("vit-h14", "H/14", 154, 3e-3, 0.6, 85.2, (224, 0.55), 126, 90, (0.5, 0.45), 87.2),
)


def _run(model: str, side: int, drop_path: float, epochs: int, optim: Optim) -> Run:
    """Return the settings that all runs of DeiT-III share, with the augmentation of those that use ImageNet-21k."""
    return replace(
        bicubic(deit.base(model), side, crop=1.0),
        vit=Model(drop_path=drop_path, drop_path_shape="constant", init="deit"),
        augment=SIMPLE,
        optim=optim,
        duration=Epochs(epochs),
        batch_size=2048,
    )


def _from_scratch(run: Run) -> Run:
    """Return `run` with the changes to the network: LayerScale, and a class token without a position embedding."""
    return replace(run, vit=replace(run.vit, layer_scale=1e-4, cls_position=False))


def imagenet(row: Row) -> Run:
    """Return the run on ImageNet from scratch: 800 epochs of small images."""
    run = _run(row.model, row.side, row.drop_path, 800, replace(LAMB, lr=row.lr, weight_decay=0.05))
    augment = replace(deit.CROP, three_augment=True, color_jitter=0.3, mixup=0.8, cutmix=1.0, repeats=3)
    return _from_scratch(replace(run, objective=Supervised(loss="bce", bce_threshold=0.0), augment=augment))


def tuned(row: Row) -> Run:
    """Return the fine-tuning at the final resolution that follows `imagenet`, with the pretrained classifier."""
    run = _run(row.model, *row.tuned, 20, Optim("adamw", lr=1e-5, weight_decay=0.1, clip=None))
    augment = replace(deit.CROP, randaugment=(2, 9.0), mixup=0.8, cutmix=1.0)
    return replace(run, keep_head=True, augment=augment, batch_size=512)


def imagenet21k(row: Row) -> Run:
    """Return the run on ImageNet-21k from scratch."""
    return _from_scratch(_run(row.model, row.side_21k, row.drops_21k[0], row.epochs_21k, LAMB))


def tuned_from_21k(row: Row) -> Run:
    """Return the fine-tuning on ImageNet that follows `imagenet21k`."""
    return _run(row.model, 224, row.drops_21k[1], 50, replace(LAMB, lr=3e-4))


def _recipes() -> Iterator[Recipe]:
    for row in ROWS:
        network, side = f"ViT-{row.model}", row.tuned[0]
        first, first_tuned = f"deit3/{row.name}-imagenet", f"deit3/finetune-{row.name}-{side}"
        second, second_tuned = f"deit3/{row.name}-imagenet21k", f"deit3/finetune-{row.name}-from-21k"
        reached = f"{row.top1} % on ImageNet at 224 pixels (README_revenge.md)"
        reached_tuned = reached if side == 224 else "83.4 % on ImageNet at 384 pixels (README_revenge.md)"
        reached_21k = f"{row.top1_21k} % on ImageNet at 224 pixels (README_revenge.md)"
        then = "" if row.side == 224 else f", after {first_tuned}"
        what_21k = f"{network} on ImageNet-21k for {row.epochs_21k} epochs"
        stages = (
            (first, imagenet(row), f"{network} on ImageNet for 800 epochs", reached + then),
            (first_tuned, tuned(row), f"Fine-tuning {network} at {side} pixels after {first}", reached_tuned),
            (second, imagenet21k(row), what_21k, f"{reached_21k}, after {second_tuned}"),
            (second_tuned, tuned_from_21k(row), f"Fine-tuning {network} on ImageNet after {second}", reached_21k),
        )
        for name, run, what, expected in stages:
            yield published(
                name,
                run,
                f"{what} (DeiT-III).",
                verb="finetune" if "/finetune-" in name else "train",
                data="imagenet21k" if name == second else "imagenet",
                expected=f"{expected}.",
            )


DEIT3 = by_name(_recipes(), source=__name__)
