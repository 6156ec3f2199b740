"""Fine-tuning as a `Run`: weights from elsewhere, a zero classifier, the paper's schedule for so much data.

What a new classifier and a new resolution mean for the tensors is in `vitrail.weights.load.load`.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import Percent, Steps
from vitrail.training.run import Run


def budget(images: int) -> tuple[Steps, Percent]:
    """Return (duration, warmup) for fine-tuning on `images` training images.

    The steps are Table 4's for data sets of such a size: Pets and Flowers 500, CIFAR 10,000, ImageNet 20,000;
    the limits between them are those of BiT's HyperRule. Warmup is 100 of 500 steps (big_vision's protocol for
    Pets and Flowers), else 500, as a share of the run, so that it stays in proportion in a run of another length.
    """
    if images < 20_000:
        return Steps(500), Percent(20)
    return (Steps(10_000), Percent(5)) if images < 500_000 else (Steps(20_000), Percent(2.5))


def finetune_run(run: Run, weights: str, images: int) -> Run:
    """Return `run` starting from `weights` (anything `vitrail.load` takes), with length and batch for `images`.

    A batch is at most the data set, so that every step sees different images.
    """
    duration, warmup = budget(images)
    batch = min(run.batch_size or 512, max(images, 1))
    return replace(
        run,
        weights=weights,
        duration=duration,
        schedule=replace(run.schedule, warmup=warmup),
        batch_size=batch,
    )
