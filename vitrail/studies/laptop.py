"""The laptop protocol: pre-train on most classes of a data set, then measure on the others, or fine-tune.

All networks see small images. The metric is the paper's few-shot accuracy (section 4.1), the mean of ten draws. A
linear classifier on frozen features measures transfer: it is solved to its optimum, and a short fine-tuning is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vitrail.data.roles import NONE
from vitrail.data.settings import Augment, Data, Preprocess
from vitrail.durations import Epochs, Percent, Steps
from vitrail.objective.settings import Supervised
from vitrail.studies.claims import Column
from vitrail.studies.study import Cell, LaptopData, Stage, at_rate, best_of
from vitrail.training.run import Model, Optim, Run, Schedule

SIDE, LARGER_SIDE = 32, 48
"""Side of the images in pixels, for pre-training and for fine-tuning."""
HOLDOUT, SMALL_HOLDOUT = 0.02, 0.1
"""Share of the training images that is held out: of the images to pre-train on, and of smaller data sets (B.1.1)."""
RATES = 1e-3, 3e-3
"""Learning rates that are tried for steps of 128 images; `vitrail.studies.run.settled` tries more beyond the best."""
LABELS = {"up": "the classes of pre-training", "down": "other classes"}
"""Name of a data set -> what a table calls it (default: its name)."""

WIDE = Model(width=128, depth=6, heads=4, mlp_dim=512, patch=4, stem="linear", pool="cls")
NARROW = replace(WIDE, width=64, heads=2, mlp_dim=256)
NETWORKS: dict[str, tuple[str, Model]] = {
    "ViT-128/4": ("narrow/4", WIDE),
    "ViT-128/8": ("narrow/8", replace(WIDE, patch=8)),
    "ViT-64/4": ("narrow/4", NARROW),
    "ViT-64/8": ("narrow/8", replace(NARROW, patch=8)),
    "R50x1": ("R50x1", Model()),
    "R50x1/2": ("R50x1", Model(width=32)),
    "R50x1/4": ("R50x1", Model(width=16)),
}
"""Name -> the settings `model` and `vit`: ViT-width/patch with 6 blocks, and R50x1 at its width, half of it and a
quarter. ViT-128/4 costs as much as R50x1; ViT-128/8 and ViT-64/4 cost as much as R50x1/2."""


def pre_training(network: str, epochs: float = 1, *, tested: bool = False, **vit: Any) -> Run:
    """Return the run that pre-trains a network of `NETWORKS`, changed by `vit`, for `epochs` epochs.

    With `tested` its accuracy on the test images of its own classes is measured at the end.
    """
    model, shape = NETWORKS[network]
    return Run(
        model=model,
        vit=replace(shape, **vit),
        image_size=SIDE,
        data=Data(path="up", holdout=HOLDOUT, test=None if tested else NONE),
        objective=Supervised(smoothing=0.1),
        augment=Augment(crop="pad"),
        preprocess=Preprocess((SIDE, SIDE), resize="squash"),
        optim=Optim(name="adamw", lr=1e-3, weight_decay=0.05),
        schedule=Schedule(shape="cosine", warmup=Percent(5)),
        duration=Epochs(epochs),
        batch_size=128,
        evaluate_every=Percent(100),
        checkpoint_every=Percent(25),
    )


def at_rates(stage: Stage, *rates: float) -> list[Stage]:
    """Return the same training at several learning rates (default: `RATES`)."""
    return [at_rate(stage, rate) for rate in rates or RATES]


def at_laptop_scale(run: Run, epochs: float, *, tested: bool = False, **changes: Any) -> Run:
    """Return a recipe with the images and the length of `pre_training`, and further changes."""
    like = pre_training("ViT-64/8", epochs, tested=tested)
    run = replace(run, data=like.data, image_size=SIDE, preprocess=like.preprocess, duration=like.duration, **changes)
    return replace(run, evaluate_every=like.evaluate_every, checkpoint_every=like.checkpoint_every)


def fine_tuning(start: Stage, on: str, lr: float = 1e-3, side: int = LARGER_SIDE) -> Stage:
    """Return the fine-tuning of a pre-trained network on a data set at a higher resolution."""
    run = Run(
        image_size=side,
        data=Data(path=on, holdout=HOLDOUT if on == "up" else SMALL_HOLDOUT),
        augment=Augment(crop="pad", flip=on != "digits"),  # a mirrored digit is another digit or none
        preprocess=Preprocess((side, side), resize="squash"),
        optim=Optim(name="adamw", lr=lr, weight_decay=0.05),
        schedule=Schedule(shape="cosine", warmup=Percent(10)),
        duration=Steps(100),
        batch_size=64,
        evaluate_every=Percent(100),
        checkpoint_every=Percent(50),
    )
    return Stage(run, start)


def transferred(row: str, at: Column, starts: Sequence[Stage], given: LaptopData) -> Iterator[Cell]:
    """Yield a cell for the fine-tuning of the best of several networks on each data set."""
    for on in given.sets:
        yield best_of(row, at, [fine_tuning(start, on) for start in starts], tuned_on(on))


def tuned_on(name: str) -> str:
    """Return the name of the table of the networks that are fine-tuned on a data set."""
    return f"fine-tuned on {LABELS.get(name, name)}"
