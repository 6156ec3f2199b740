"""The loaders of a run, and its training batches as one endless stream that can begin at any step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitrail import world
from vitrail.data.item import Listed
from vitrail.data.loader import Batch, Loader
from vitrail.data.ops import eval_transform, train_transform
from vitrail.train.run import Run


def training_loader(run: Run, source: Listed) -> Loader:
    """Return this process's augmented share of `source`; `run` has every decision made."""
    assert run.preprocess is not None and run.batch_size is not None
    return Loader(
        source,
        transform=train_transform(run.augment, run.preprocess),
        batch_size=run.batch_size // world.size(),
        repeats=run.augment.repeats,
        **_common(run),
    )


def evaluation_loader(run: Run, source: Listed) -> Loader:
    """Return this process's share of `source` as it is, each image once."""
    assert run.preprocess is not None and run.batch_size is not None
    micro = -(-run.batch_size // (world.size() * (run.accumulate or 1)))
    return Loader(
        source,
        transform=eval_transform(run.preprocess),
        batch_size=2 * micro,  # fits: nothing is kept for a backward pass
        shuffle=False,
        drop_last=False,
        **_common(run),
    )


def endless(loader: Loader, step: int) -> Iterator[Batch]:
    """Yield the batches of a run from step number `step` on, epoch after epoch."""
    while True:
        epoch, start = divmod(step, len(loader))
        for batch in loader.epoch(epoch, start):
            yield batch
            step += 1


def _common(run: Run) -> dict[str, Any]:
    assert run.preprocess is not None
    return {
        "image_size": run.preprocess.image_size,
        "seed": run.seed,
        "workers": run.workers or 0,
        "rank": world.rank(),
        "world": world.size(),
        "cache": run.cache == "yes",
    }
