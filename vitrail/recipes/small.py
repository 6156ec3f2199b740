"""Training from scratch on small data sets: small networks, short sequences, light augmentation.

The paper's networks need millions of images (section 4.3). With thousands of images, a network learns more in the same
time if it has fewer parameters, a short sequence of patches, and augmentation that does not crop the object away.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.settings import Augment, Data
from vitrail.durations import Epochs, Percent, Steps
from vitrail.objective.settings import Supervised
from vitrail.recipes.by_data import PHOTOGRAPH_PATCH, PHOTOGRAPH_SIDE
from vitrail.recipes.published import by_name, described
from vitrail.training.run import Optim, Progressive, Run, Schedule


def smoke() -> Run:
    """Twenty steps of a tiny ViT on the embedded digits, to test an installation.

    Command: `vitrail train --recipe smoke`
    Cost: seconds on one core.
    """
    return Run(
        data=Data(path="digits"),
        model="smoke/2",
        augment=Augment(crop="center", flip=False),
        optim=Optim(lr=2e-3),
        duration=Steps(20),
        batch_size=64,
        evaluate_every=Steps(10),
        checkpoint_every=Steps(10),
    )


def digits() -> Run:
    """A tiny ViT on the 1,797 embedded handwritten digits of 8 x 8 pixels, with one token for every 2 x 2 pixels.

    Command: `vitrail train --recipe digits` (and `vitrail demo`)
    Cost: about a minute on two cores.
    Expected: at least 97 % top-1 on the test digits.
    """
    return Run(
        data=Data(path="digits"),
        model="digits/4",
        image_size=16,  # twice the digits' size, so that crops can shift and stretch them by fractions of a pixel
        objective=Supervised(smoothing=0.1),
        augment=Augment(scale=(0.75, 1.0), flip=False),  # a mirrored digit is another digit or none
        optim=Optim(name="muon", lr=8e-3, weight_decay=0.05),
        schedule=Schedule(warmup=Percent(10)),
        duration=Epochs(80),
        batch_size=64,
        evaluate_every=Epochs(10),
        checkpoint_every=Epochs(20),
    )


def scratch_small() -> Run:
    """From scratch on a few thousand to 100,000 small images, such as CIFAR (up to about 96 pixels).

    The network, small/4, has a convolutional stem, patches of 4 pixels, and four layers of width 128 with LayerScale
    and MLPs of twice the width. The first images have a quarter of the side, so a sixteenth of the tokens. Settings
    were chosen on images held out of CIFAR-100's training set.

    Command: `vitrail train DIR --recipe scratch-small`
    Cost: 30 epochs, or the minutes given with --time-limit.
    Expected: CIFAR-100 in 10 minutes on two cores: 59.8 % of the test images, three seeds (benchmarks.learn).
    """
    return Run(
        model="small/4",
        objective=Supervised(smoothing=0.1),
        augment=Augment(crop="pad"),
        optim=Optim(name="muon", lr=8e-3, weight_decay=0.05),
        schedule=Schedule("linear", warmup=Percent(5)),
        progressive=Progressive(start=0.25, until=Percent(80)),
        duration=Epochs(30),
        batch_size=256,
    )


def scratch_photos() -> Run:
    """From scratch on photographs, resized to 96 pixels: 144 tokens of 8 x 8 pixels.

    The network is small/8, that of scratch-small with larger patches. If pretrained weights are available,
    `vitrail finetune` is better.

    Command: `vitrail train DIR --recipe scratch-photos`
    Cost: 60 epochs, or the minutes given with --time-limit.
    Expected: 12 kinds of flowers, 720 images, in 1.5 minutes on two cores: 88.1 % of the test images, three seeds
    (benchmarks.transfer).
    """
    return replace(
        scratch_small(),
        model=f"small/{PHOTOGRAPH_PATCH}",
        image_size=PHOTOGRAPH_SIDE,
        augment=Augment(crop="inception", scale=(0.3, 1.0)),
        optim=Optim(name="muon", lr=4e-3, weight_decay=0.05),
        batch_size=None,
        duration=Epochs(60),
    )


SMALL = by_name(
    [
        described(smoke, brings_data=True),
        described(digits, brings_data=True),
        *map(described, (scratch_small, scratch_photos)),
    ]
)
