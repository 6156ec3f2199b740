"""The dev split: which training images settings are chosen by, so that the test images have no part in it.

Appendix B.1.1: "small sub-splits from the training set" to choose by, then "we train on the entire training set and
evaluate on the respective test data". So there are two ways to open the data, one for each half of a sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vitrail.data.item import Listed, role_of
from vitrail.data.roles import NONE
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.errors import UsageError

VTAB_IMAGES = 1_000
"""VTAB's training images: 800 to train on, 200 to choose by."""


def dev_share(images: int) -> float:
    """Return the share of `images` training images to choose by, as the paper does for data sets of such a size.

    VTAB's 1,000: a fifth; Pets and Flowers: 10 %; CIFAR: 2 %; ImageNet: 1 % (appendix B.1.1). The limits between
    them are those of `vitrail.transfer.finetune.budget`.
    """
    if images <= VTAB_IMAGES:
        return 0.2
    if images < 20_000:
        return 0.1
    return 0.02 if images < 500_000 else 0.01


@dataclass(frozen=True)
class Arranged:
    """One data set, opened in two ways."""

    search: Data
    """To choose by: part of the training images, or the validation split; the test split stays unopened."""
    final: Data
    """To report: all training images, nothing to choose by, then the test split."""
    images: int
    """Trained on in the search."""
    dev: int
    """Images to choose by."""
    test: int
    """Images to report on; 0 where the data have none to spare."""
    how: str
    """In a sentence."""


def arrange(data: Data, share: float | None, seed: int) -> Arranged:
    """Decide what to choose by and what to report on; `share` of the training images, None decides by what is there.

    With a share, or without a validation split, a share of all training images (validation split included) is held
    out, the same one for every trial. Without one, a validation split is what it is for, and joins the training
    images in the end. Where nothing else can be the test split, the validation split is (ImageNet's, in the paper).

    Raises UsageError for a share outside 0..1 and where the test split is asked for to choose by; DataError as
    `open_data`.
    """
    if share is not None and not 0 < share < 1:
        raise UsageError(f"the share of the training images to choose by must lie between 0 and 1, not {share:g}")
    opened = open_data(replace(data, holdout=0.0), seed=seed)
    own = opened.held_out.get("validation")
    if own is not None and (role_of(own) == "test" or own == data.test):
        raise UsageError(
            f"settings chosen on the test split {own!r} make it no test any more: leave data.validation out, and part "
            "of the training images is held out to choose by"
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
        how = f"the validation split {own!r}, which joins the training images in the end"
    else:
        everything = len(opened.train) + (len(opened.validation) if own and opened.validation is not None else 0)
        held = dev_share(everything) if share is None else share
        search = replace(final, holdout=held, test=NONE)
        how = f"{100 * held:.3g} % of the training images"
    found = open_data(search, seed=seed)
    assert found.validation is not None  # a split or a share above 0
    count = 0 if test is None else len(test)
    return Arranged(search, final, len(found.train), len(found.validation), count, how)


def _labelled(source: Listed | None) -> bool:
    return source is not None and bool(np.any(source.labels >= 0))
