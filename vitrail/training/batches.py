"""The loaders of a run, and its training batches as one endless stream that can begin at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from vitrail import world
from vitrail.data.image_names import bad_kinds
from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.item import IndexedSource
from vitrail.data.labels.sets import class_counts
from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError
from vitrail.objective.settings import DINO
from vitrail.training.run import Run


def training_loader(run: Run, source: IndexedSource) -> Loader:
    """Return a loader of this process's share of `source`, augmented. `run` has every decision made."""
    assert isinstance(run.preprocess, Preprocess) and run.batch_size is not None
    preprocess = run.preprocess
    if isinstance(run.objective, DINO):  # whole images, and larger, because crops are cut from them
        height, width = (round(side * run.objective.view) for side in preprocess.image_size)
        preprocess = replace(preprocess, image_size=(height, width), crop=1.0)
    return Loader(
        source,
        transform=train_transform(run.augment, preprocess),
        image_size=preprocess.image_size,
        batch_size=run.batch_size // world.size(),
        repeats=run.augment.repeats,
        together=run.data.together,
        sampler=run.data.sampler,
        **_common(run),
    )


def micro_batch(run: Run) -> int:
    """Return the number of images that each process has in the network at once. `run` has every decision made."""
    assert run.batch_size is not None
    return -(-run.batch_size // (world.size() * (run.accumulate or 1)))


def evaluation_loader(run: Run, source: IndexedSource) -> Loader:
    """Return a loader of this process's share of `source` without augmentation, each image once."""
    assert isinstance(run.preprocess, Preprocess)
    return Loader(
        source,
        transform=eval_transform(run.preprocess),
        image_size=run.preprocess.image_size,
        batch_size=2 * micro_batch(run),  # fits in memory, because no activations are kept for a backward pass
        shuffle=False,
        drop_last=False,
        **_common(run),
    )


def _common(run: Run) -> dict[str, Any]:
    cache, workers = run.cache == "yes", run.workers or 0
    return {"seed": run.seed, "workers": workers, "rank": world.rank(), "world": world.size(), "cache": cache}


def endless(
    loader: Loader, step: int, *, max_bad: float = 1.0, report: Callable[[str, str], None] = lambda image, reason: None
) -> Iterator[Batch]:
    """Yield the batches of a run from step number `step` on, epoch after epoch.

    `report(image, reason)` is called once for each unreadable image. Raises DataError if their share of the images
    exceeds `max_bad`, or if all images of a class are unreadable.
    """
    reported = 0
    while True:
        epoch, start = divmod(step, len(loader))
        for batch in loader.epoch(epoch, start):
            if reported < len(loader.bad):
                for image, reason in loader.bad[reported:]:
                    report(image, reason)
                _refuse_if_many(loader, max_bad)
                _refuse_if_a_class_is_gone(loader, loader.bad_index[reported:])
                reported = len(loader.bad)
            yield batch
            step += 1


def _refuse_if_many(loader: Loader, max_bad: float) -> None:
    bad, images = len(loader.bad), loader.share
    if bad > max_bad * images:
        (name, reason), kinds = loader.bad[0], bad_kinds(loader.bad)
        raise DataError(
            f"{bad} of {images:,} training images cannot be read, more than data.max_bad, {max_bad:.1%}: {kinds}. The "
            f"first is {name} ({reason}). `vitrail data check` lists them all; a larger --data.max-bad trains "
            "without them"
        )


def _refuse_if_a_class_is_gone(loader: Loader, newly: list[int]) -> None:
    """Raise DataError if no image of a class is readable in this process any more."""
    labels, classes = loader.source.labels, len(loader.source.class_names)
    new, all_bad, total = (
        class_counts(some, classes) for some in (labels[np.array(newly)], labels[np.array(loader.bad_index)], labels)
    )
    for label in np.flatnonzero(new).tolist():
        bad = int(all_bad[label])
        if bad == total[label]:
            what = "the only training image" if bad == 1 else f"all {bad} training images"
            raise DataError(
                f"{what} of class {loader.source.class_names[label]!r} cannot be read, so the network could never "
                "learn it. `vitrail data check` says why. Repair the images, or remove the class"
            )
