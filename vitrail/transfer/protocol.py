"""The paper's fine-tuning protocol, by the number of training images: how long to train, and what to choose by.

Appendix B.1.1: settings are chosen on "small sub-splits from the training set"; then "we train on the entire training
set and evaluate on the respective test data". So a sweep opens its data in two ways, once for each of these steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vitrail.data.item import IndexedSource, role_of
from vitrail.data.labels.sets import known
from vitrail.data.roles import NONE, SUBSET
from vitrail.data.settings import Data
from vitrail.durations import Percent, Steps
from vitrail.errors import UsageError
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.sources.open import OpenedData

VTAB_IMAGES = 1_000
"""VTAB's training images: 800 to train on, 200 to choose by."""
SMALL, LARGE = 20_000, 500_000
"""BiT's HyperRule: a data set is small below SMALL training images, and large from LARGE on."""


def budget(images: int) -> tuple[Steps, Percent]:
    """Return (duration, warmup) for fine-tuning on `images` training images.

    The steps are those of Table 4 for data sets of this size: Pets and Flowers 500, CIFAR 10,000, ImageNet 20,000.
    Warmup is 100 of 500 steps (big_vision's protocol for Pets and Flowers), otherwise 500 steps. It is a percentage, so
    that it stays in proportion in a run of another length.
    """
    if images < SMALL:
        return Steps(500), Percent(20)
    return (Steps(10_000), Percent(5)) if images < LARGE else (Steps(20_000), Percent(2.5))


def for_images(run: Run, images: int) -> Run:
    """Return `run` with the paper's duration and warmup for `images` training images.

    A batch has at most as many images as the data set, so that the images of a step differ.
    """
    duration, warmup = budget(images)
    batch = min(run.batch_size or 512, max(images, 1))
    return replace(run, duration=duration, schedule=replace(run.schedule, warmup=warmup), batch_size=batch)


def finetune_run(run: Run, weights: str, images: int) -> Run:
    """Return `run` starting from `weights` (anything `vitrail.load` takes), with duration and batch for `images`."""
    return replace(for_images(run, images), weights=weights)


def dev_share(images: int) -> float:
    """Return the share of `images` training images to choose by, as in the paper for data sets of this size.

    VTAB's 1,000 images: 20 %; Pets and Flowers: 10 %; CIFAR: 2 %; ImageNet: 1 % (appendix B.1.1).
    """
    if images <= VTAB_IMAGES:
        return 0.2
    if images < SMALL:
        return 0.1
    return 0.02 if images < LARGE else 0.01


@dataclass(frozen=True)
class DevSplit:
    """One data set opened in two ways: to choose settings, and to report a result."""

    search: Data
    """To choose by: a part of the training images or the validation split; the test split is not opened."""
    final: Data
    """To report: all training images, no images to choose by, and the test split."""
    images: int
    """Training images of the search."""
    classes: int
    """Classes of the images, or targets."""
    dev: int
    """Images to choose by."""
    test: int
    """Test images; 0 if the data have none."""
    how: str
    """Description of the images to choose by, for the user."""


def arrange(data: Data, share: float | None, seed: int, data_sets: OpenedData | None = None) -> DevSplit:
    """Decide which images to choose by and which to report on; `share` is a share of the training images.

    If a share is given, or there is no validation split, a share of all training images (with the validation split) is
    held out, the same images for every trial. Otherwise the validation split is used and joins the training images in
    the final runs. A `data.subset` is the training set of the sweep: the share is held out of it. If there is no test
    split, the validation split becomes the test split (as ImageNet's in the paper). `data_sets` are those of the
    command that may be open already.

    Raises UsageError for a share outside 0..1 or if settings would be chosen on the test split; DataError like
    `open_data`.
    """
    from vitrail.data.sources.open import OpenedData  # which imports torch: `finetune --help` must not

    if share is not None and not 0 < share < 1:
        raise UsageError(f"--dev is {share:g}. The share of the training images to choose by must be between 0 and 1.")
    if data.fold is not None:
        raise UsageError("a sweep chooses its own validation images, so that data.fold is not valid: use --dev")
    data_sets = data_sets or OpenedData()
    opened = data_sets.splits(replace(data, holdout=0.0), seed)
    own = opened.held_out.get("validation")
    if own is not None and (role_of(own) == "test" or own == data.test):
        raise UsageError(
            f"Settings cannot be chosen on the test split {own!r}: it would no longer be a test. Remove "
            "--data.validation; then a part of the training images is held out."
        )
    test = opened.test if _labelled(opened.test) else None
    joined, measured = data.train, data.test if test is not None else NONE
    if own is not None and test is None and data.validation is None:
        test, measured, own = opened.validation, own, None
    elif own is not None:
        joined = f"{data.train}+{own}"
    final = replace(data, train=joined, validation=NONE, holdout=0.0, test=measured)
    if own is not None and share is None:
        search = replace(data, validation=own, holdout=0.0, test=NONE)
        how = f"the validation split {own!r}, which the final runs train on as well"
    else:
        held_out = dev_share(len(opened.train)) if share is None else share
        search = replace(final, validation=NONE if data.subset is None else SUBSET, holdout=held_out, test=NONE)
        how = f"{100 * held_out:.3g} % of the training images"
    found = data_sets.splits(search, seed)
    assert found.validation is not None  # a split, or a share above 0
    sizes = (len(found.train), len(found.class_names), len(found.validation), 0 if test is None else len(test))
    return DevSplit(search, final, *sizes, how)


def _labelled(source: IndexedSource | None) -> bool:
    return source is not None and bool(known(source.labels).any())
