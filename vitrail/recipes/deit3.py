"""DeiT-III (Touvron et al. 2022, "Revenge of the ViT"): the commands of its `README_revenge.md`, one recipe each.

ImageNet from scratch: LAMB, binary cross-entropy in which every mixed class counts fully, 3-Augment, three copies of
each image, LayerScale, stochastic depth of one rate for all blocks, small images first and then fine-tuning at 224.
ImageNet-21k: cross-entropy with smoothing, CutMix alone, a simple random crop; then ImageNet.

Differences that cannot be expressed: DeiT-III sets the learning rate once an epoch, starts at 1e-6 and includes the
warmup in the cosine (here: every step, from 0, after the warmup). Its simple random crop first pads by 4 mirrored
pixels. It normalises pixels with ImageNet's mean and deviation. If the patch size 14 does not divide the side, it
drops the last pixels (160 and 128; here 154 and 126, with the same number of tokens). LAMB clips at norm 1, as apex's
does by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitrail.config import Epochs, Percent
from vitrail.data.settings import Augment
from vitrail.objective.settings import Supervised
from vitrail.recipes.deit import CROP, bicubic
from vitrail.recipes.published import Recipe, by_name, passes, published
from vitrail.training.run import Model, Optim, Run, Schedule

BATCH = 2048
LAYER_SCALE = 1e-4
BCE = Supervised(loss="bce", bce_threshold=0.0)
SMOOTHED = Supervised(loss="softmax", smoothing=0.1)
THREE = replace(CROP, three_augment=True, color_jitter=0.3)
"""3-Augment with its colour jitter."""
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
    """Image side and stochastic depth of the fine-tuning after it."""
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


def _run(model: str, side: int, drop_path: float, epochs: int, lr: float, decay: float, lamb: bool) -> Run:
    """Return the settings that all runs of DeiT-III share."""
    return Run(
        model=model,
        vit=Model(drop_path=drop_path, drop_path_shape="constant"),
        image_size=side,
        preprocess=bicubic(side, crop=1.0),
        optim=Optim("lamb", lr, decay, eps=1e-6, clip=1.0) if lamb else Optim("adamw", lr, decay, clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(5), end=1e-5),
        duration=Epochs(epochs),
        batch_size=BATCH,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )


def _from_scratch(run: Run) -> Run:
    """Return `run` with the changes to the network: LayerScale, and a class token without a position embedding."""
    return replace(run, vit=replace(run.vit, layer_scale=LAYER_SCALE, cls_position=False))


def imagenet(row: Row) -> Run:
    """Return the run on ImageNet from scratch: 800 epochs of small images."""
    run = _run(row.model, row.side, row.drop_path, 800, row.lr, 0.05, lamb=True)
    augment = replace(THREE, mixup=0.8, cutmix=1.0, repeats=3)
    return _from_scratch(replace(run, objective=BCE, augment=augment))


def tuned(row: Row) -> Run:
    """Return the fine-tuning at the final resolution that follows `imagenet`, with the pretrained classifier."""
    side, drop_path = row.tuned
    run = _run(row.model, side, drop_path, 20, 1e-5, 0.1, lamb=False)
    augment = replace(CROP, randaugment=(2, 9.0), mixup=0.8, cutmix=1.0)
    return replace(run, keep_head=True, objective=SMOOTHED, augment=augment, batch_size=512)


def imagenet21k(row: Row) -> Run:
    """Return the run on ImageNet-21k from scratch."""
    run = _run(row.model, row.side_21k, row.drops_21k[0], row.epochs_21k, 1e-3, 0.02, lamb=True)
    return _from_scratch(replace(run, objective=SMOOTHED, augment=SIMPLE))


def tuned_from_21k(row: Row) -> Run:
    """Return the fine-tuning on ImageNet that follows `imagenet21k`."""
    run = _run(row.model, 224, row.drops_21k[1], 50, 3e-4, 0.02, lamb=True)
    return replace(run, objective=SMOOTHED, augment=SIMPLE)


def _recipe(name: str, run: Run, what: str, expected: str, data: str = "imagenet", *, tuning: bool = False) -> Recipe:
    assert isinstance(run.duration, Epochs)
    return published(
        name,
        run,
        f"{what} (DeiT-III).",
        verb="finetune" if tuning else "train",
        module=__name__,
        cost=f"{passes(run.duration.value, data)} at {run.image_size} pixels.",
        expected=expected,
    )


def _recipes() -> Iterator[Recipe]:
    for row in ROWS:
        network, side = f"ViT-{row.model}", row.tuned[0]
        first, second = f"deit3/{row.name}-imagenet", f"deit3/{row.name}-imagenet21k"
        reached = f"{row.top1} % on ImageNet at 224 pixels (README_revenge.md)"
        then = "." if row.side == 224 else f", after deit3/finetune-{row.name}-{side}."
        yield _recipe(first, imagenet(row), f"{network} on ImageNet for 800 epochs", reached + then)
        at = f"{reached}." if side == 224 else "83.4 % on ImageNet at 384 pixels (README_revenge.md)."
        what = f"Fine-tuning {network} at {side} pixels after {first}"
        yield _recipe(f"deit3/finetune-{row.name}-{side}", tuned(row), what, at, tuning=True)
        reached = f"{row.top1_21k} % on ImageNet at 224 pixels (README_revenge.md)"
        what = f"{network} on ImageNet-21k for {row.epochs_21k} epochs"
        yield _recipe(
            second, imagenet21k(row), what, f"{reached}, after deit3/finetune-{row.name}-from-21k.", "imagenet21k"
        )
        what = f"Fine-tuning {network} on ImageNet after {second}"
        yield _recipe(f"deit3/finetune-{row.name}-from-21k", tuned_from_21k(row), what, f"{reached}.", tuning=True)


DEIT3 = by_name(_recipes())
