"""Training from scratch on small data sets: narrow networks, short sequences, light augmentation.

The paper's networks need millions of images (section 4.3). With thousands, a
network learns more in the same time if it has fewer parameters, patches that keep the sequence short, and augmentation
that keeps the object in view.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import Epochs, Percent, Steps
from vitrail.data.settings import Augment, Data
from vitrail.objective.settings import Supervised
from vitrail.recipes.published import Recipe, by_name
from vitrail.training.run import Model, Optim, Progressive, Run, Schedule


def smoke() -> Run:
    """Twenty steps of a tiny ViT on the embedded digits, to test an installation.

    Command: `vitrail train --recipe smoke`
    Cost: seconds on one core.
    """
    return Run(
        name="smoke",
        data=Data(path="digits"),
        model="Ti/2",
        vit=Model(width=32, depth=2, heads=2, mlp_dim=64),
        augment=Augment(crop="center", flip=False),
        optim=Optim(lr=2e-3),
        duration=Steps(20),
        batch_size=64,
        evaluate_every=Steps(10),
        checkpoint_every=Steps(10),
    )


def digits() -> Run:
    """A tiny ViT on the 1,797 embedded handwritten digits of 8x8 pixels, a token for every 2x2 of them.

    Command: `vitrail train --recipe digits` (and `vitrail demo`)
    Cost: about a minute on two cores.
    Expected: at least 97 % top-1 on the test digits.
    """
    return Run(
        name="digits",
        data=Data(path="digits"),
        model="Ti/4",
        vit=Model(width=96, depth=4, heads=3, mlp_dim=192),
        image_size=16,  # twice their size, so that crops can shift and stretch them by fractions of a pixel
        objective=Supervised(smoothing=0.1),
        augment=Augment(scale=(0.75, 1.0), flip=False),  # a mirrored digit is a different digit or none
        optim=Optim(lr=2e-3),
        schedule=Schedule(warmup=Percent(10)),
        duration=Epochs(80),
        batch_size=64,
        evaluate_every=Epochs(10),
        checkpoint_every=Epochs(20),
    )


def scratch_small() -> Run:
    """From scratch on a few thousand to 100,000 small images, such as CIFAR (up to about 96 pixels).

    A convolutional stem and patches of 4 pixels, in a network narrow enough for many epochs. The first images have a
    quarter of the side, and so a sixteenth of the tokens. Settings were chosen on images held out of CIFAR-100's
    training set.

    Command: `vitrail train DIR --recipe scratch-small`
    Cost: 30 epochs, or the minutes given with --time-limit.
    Expected: CIFAR-100 in 10 minutes on two cores: 47.2 % of the test images, three seeds (benchmarks.learn).
    """
    return Run(
        name="scratch-small",
        model="Ti/4",
        vit=Model(width=128, depth=6, heads=4, mlp_dim=512, stem="early", pool="gap"),
        objective=Supervised(smoothing=0.1),
        augment=Augment(crop="pad"),
        optim=Optim(lr=1.5e-3, weight_decay=0.05),
        schedule=Schedule(warmup=Percent(5)),
        progressive=Progressive(start=0.25, until=Percent(80)),
        duration=Epochs(30),
        batch_size=128,
    )


def scratch_photos() -> Run:
    """From scratch on photographs, shrunk to 96 pixels: 144 tokens of 8x8.

    If pretrained weights are available, `vitrail finetune` is better.

    Command: `vitrail train DIR --recipe scratch-photos`
    Cost: 60 epochs, or the minutes given with --time-limit.
    """
    return replace(
        scratch_small(),
        name="scratch-photos",
        model="Ti/8",
        image_size=96,
        augment=Augment(crop="inception", scale=(0.3, 1.0)),
        batch_size=None,
        duration=Epochs(60),
    )


SMALL = by_name(
    [
        Recipe("smoke", smoke, brings_data=True),
        Recipe("digits", digits, brings_data=True),
        Recipe("scratch-small", scratch_small),
        Recipe("scratch-photos", scratch_photos),
    ]
)
