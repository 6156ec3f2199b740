"""The loaders of a run, and its training batches as one endless stream that can begin at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from vitrail import world
from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.item import Listed
from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError
from vitrail.objective.settings import DINO
from vitrail.training.run import Run


def training_loader(run: Run, source: Listed) -> Loader:
    """Return a loader of this process's share of `source`, augmented. `run` has every decision made."""
    assert run.batch_size is not None
    shown = _shown(run)
    return Loader(
        source,
        transform=train_transform(run.augment, shown),
        batch_size=run.batch_size // world.size(),
        repeats=run.augment.repeats,
        together=run.data.together,
        **{**_common(run), "image_size": shown.image_size},
    )


def _shown(run: Run) -> Preprocess:
    """Return how training images are prepared: like the others, but whole and larger if crops are cut from them."""
    assert run.preprocess is not None
    if not isinstance(run.objective, DINO):
        return run.preprocess
    height, width = (round(side * run.objective.view) for side in run.preprocess.image_size)
    return replace(run.preprocess, image_size=(height, width), crop=1.0)


def micro_batch(run: Run) -> int:
    """Return how many images each process has in the network at once; `run` has every decision made."""
    assert run.batch_size is not None
    return -(-run.batch_size // (world.size() * (run.accumulate or 1)))


def evaluation_loader(run: Run, source: Listed) -> Loader:
    """Return a loader of this process's share of `source` without augmentation, each image once."""
    assert run.preprocess is not None and run.batch_size is not None
    return Loader(
        source,
        transform=eval_transform(run.preprocess),
        batch_size=2 * micro_batch(run),  # fits: nothing is kept for a backward pass
        shuffle=False,
        drop_last=False,
        **_common(run),
    )


def endless(
    loader: Loader, step: int, *, max_bad: float = 1.0, tell: Callable[[str, str], None] | None = None
) -> Iterator[Batch]:
    """Yield the batches of a run from step number `step` on, epoch after epoch.

    `tell(image, reason)` is called once for each unreadable image. Raises DataError if their share of the images
    exceeds `max_bad`, or if all images of a class are unreadable.
    """
    told = 0
    while True:
        epoch, start = divmod(step, len(loader))
        for batch in loader.epoch(epoch, start):
            for image, reason in loader.bad[told:]:
                if tell is not None:
                    tell(image, reason)
            if told < len(loader.bad):
                _refuse_if_many(loader, max_bad)
                _refuse_if_a_class_is_gone(loader, loader.bad_index[told:])
                told = len(loader.bad)
            yield batch
            step += 1


def _refuse_if_many(loader: Loader, max_bad: float) -> None:
    bad, images = len(loader.bad), loader.share
    if bad > max_bad * images:
        name, reason = loader.bad[0]
        raise DataError(
            f"{bad} of {images:,} training images cannot be read, more than the {max_bad:.1%} of data.max_bad; the "
            f"first is {name} ({reason}). `vitrail data check` lists them all; --data.max-bad goes on without them"
        )


def _refuse_if_a_class_is_gone(loader: Loader, newly: list[int]) -> None:
    """Raise DataError if no image of a class is readable in this process any more."""
    if not isinstance(loader.source, Listed):
        return
    labels = loader.source.labels
    for label in np.unique(labels[newly][labels[newly] >= 0]).tolist():
        bad = int(np.count_nonzero(labels[loader.bad_index] == label))
        if bad == np.count_nonzero(labels == label):
            what = "the only training image" if bad == 1 else f"all {bad} training images"
            raise DataError(
                f"{what} of class {loader.source.class_names[label]!r} cannot be read: the network could never learn "
                "it. `vitrail data check` says why; repair them, or take the class out"
            )


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
