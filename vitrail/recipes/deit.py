"""DeiT (Touvron et al. 2021, "Training data-efficient image transformers"): ImageNet from scratch in 300 epochs.

The values are the defaults of DeiT's `main.py` and the commands in its `README_deit.md`: AdamW 5e-4 per 512 images of a
batch of 1024, weight decay 0.05, 5 epochs of warmup, cosine to 1e-5, label smoothing, RandAugment, random erasing,
mixup or CutMix, three copies of each image, stochastic depth 0.1.

Differences that cannot be expressed: DeiT sets the learning rate once per epoch, starts the warmup at 1e-6 and the
cosine at epoch 0 (vitrail: once per step, at 0, and after the warmup). It normalises pixels with ImageNet's mean and
standard deviation (vitrail: 0.5). Distillation is not implemented.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vitrail.data.settings import Augment
from vitrail.durations import Epochs, Percent
from vitrail.objective.settings import Supervised
from vitrail.recipes.preprocessing import bicubic
from vitrail.recipes.published import Recipe, by_name, published
from vitrail.training.run import Model, Optim, Run, Schedule

CROP = Augment(crop="inception", scale=(0.08, 1.0))
"""timm's RandomResizedCrop, and mirroring."""


def base(model: str) -> Run:
    """Return DeiT's run for one of its networks."""
    run = Run(
        model=model,
        vit=Model(drop_path=0.1, init="deit"),
        objective=Supervised(loss="softmax", smoothing=0.1),
        augment=replace(CROP, randaugment=(2, 9.0), erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3),
        optim=Optim(name="adamw", lr=5e-4 * 1024 / 512, weight_decay=0.05, clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(5), end=1e-5),
        duration=Epochs(300),
        batch_size=1024,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )
    return bicubic(run, 224, crop=0.875)


def at_384() -> Run:
    """Return DeiT's fine-tuning at 384 pixels: 30 epochs at a constant rate, with the pretrained classifier."""
    run = bicubic(base("B/16"), 384, crop=0.875)
    return replace(
        run,
        keep_head=True,
        optim=replace(run.optim, lr=5e-6, weight_decay=1e-8),
        schedule=replace(run.schedule, end=5e-6),
        duration=Epochs(30),
        batch_size=512,
    )


def _recipes() -> Iterator[Recipe]:
    for name, model, top1 in (("vit-ti16", "Ti/16", 72.2), ("vit-s16", "S/16", 79.9), ("vit-b16", "B/16", 81.8)):
        yield published(
            f"deit/{name}",
            base(model),
            f"ViT-{model} on ImageNet for 300 epochs, strongly augmented, without distillation (DeiT).",
            expected=f"{top1} % on ImageNet (README_deit.md).",
        )
    yield published(
        "deit/finetune-384",
        at_384(),
        "Fine-tuning a DeiT at 384 pixels for 30 epochs (DeiT).",
        verb="finetune",
        expected="82.9 % on ImageNet for B/16 (README_deit.md).",
    )


DEIT = by_name(_recipes(), source=__name__)
