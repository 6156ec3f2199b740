"""Which splits are used for training, for validation and for the final test."""

from __future__ import annotations

import numpy as np

from vitrail.data.item import ROLES, DataSet, IndexedSource, Subset, Unlabelled, is_usual, role_of, split_title
from vitrail.data.labels.kind import without_labels
from vitrail.data.labels.sets import class_counts, known
from vitrail.data.settings import Data
from vitrail.data.split import folds
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.words import listing

NONE = "none"
"""Value of a setting that names a split: use no split for this role."""
SUBSET = "subset"
"""Value of `Data.validation`: hold out a share of the images of `Data.subset`, not of all training images."""


def of_role(found: DataSet, role: str) -> list[str]:
    """Return the names of the splits for `role`: the usual names, or else those that contain one ("test_set")."""
    lowered = {name.lower(): name for name in found.splits}
    usual = [lowered[name] for name in ROLES[role] if name in lowered]
    return usual or [name for name in found.splits if role_of(name) == role]


def named_split(found: DataSet, wanted: str, path: str) -> str:
    """Return the split called `wanted`, or by another usual name of it. Raises UsageError that lists the splits."""
    if wanted in found.splits:
        return wanted
    role = role_of(wanted) if is_usual(wanted) else None
    if role and (names := of_role(found, role)):
        if len(names) > 1 and not is_usual(names[0]):
            raise UsageError(
                f"{path} has {len(names)} splits that {wanted!r} may mean: {listing(names, 5)}. Name one, or several "
                f"for training: {'+'.join(names[:2])!r} (data.train, data.validation, data.test)"
            )
        return names[0]
    there = [repr(name) for name in found.splits if name]
    splits = f"its splits are {', '.join(there)}" if there else "it is not split"
    raise UsageError(f"{path} has no split {wanted!r}: {splits}.{did_you_mean(wanted, list(found.splits))}")


def training_splits(found: DataSet, data: Data) -> list[str]:
    """Return the names of the splits to train on: one, or several for "train+val". Raises UsageError."""
    if list(found.splits) == [""] and is_usual(data.train) and role_of(data.train) == "train":
        return [""]
    parts = [data.train] if data.train in found.splits else data.train.split("+")
    names = [named_split(found, part, data.path) for part in parts]
    if len(set(names)) < len(names):
        raise UsageError(
            f"data.train is {data.train!r}, which names the split {names[0]!r} twice. Name each split once"
        )
    return names


def validation_split(found: DataSet, data: Data, train: list[str], test: str | None, *, labels: bool) -> str | None:
    """Return the split for validation: the named one, else the validation split if all its images have labels.

    The test split is used only if it is named: a model chosen on it would look better than it is.
    """
    if data.validation in (NONE, SUBSET):
        return None
    if data.validation is not None:
        return _apart(named_split(found, data.validation, data.path), "validation", data, train)
    for name in of_role(found, "validation"):
        if name in train or name == test:
            continue
        source = found.splits[name]
        if labels and without_labels(source.labels, len(source.class_names)):
            found.findings.warnings.append(f"no image of split {name!r} has a label: not used for validation")
            continue
        if not labels or known(source.labels).all():
            return name
        found.findings.warnings.append(f"split {name!r} has images without a label: not used for validation")
    return None


def fold_of(
    found: DataSet, names: list[str], train: IndexedSource, data: Data, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices for training, indices of the fold `data.fold` for validation), int64, each ascending.

    names: The splits that `train` consists of. A validation split that is not used causes a warning, and so do classes
    with fewer images than folds. Raises UsageError if a validation split is named, and for more folds than images.
    """
    assert data.fold is not None
    if data.validation is not None:
        raise UsageError(
            f"data.fold is {data.fold!r} and data.validation is {data.validation!r}: both choose the validation "
            "images. Remove one of them"
        )
    number, count = map(int, data.fold.split("/"))
    found.findings.warnings += [
        f"split {name!r} is not used: data.fold validates on training images. To divide its images, too, set "
        f"data.train to '{data.train}+{name}'"
        for name in of_role(found, "validation")
        if name not in names
    ]
    part = folds(train, count, seed) == number - 1
    sizes = class_counts(train.labels, len(train.class_names))
    if rare := [name for name, size in zip(train.class_names, sizes, strict=True) if 0 < size < count]:
        found.findings.warnings.append(
            f"classes with fewer images than the {count} folds are missing from some of them: {listing(rare, 5)}"
        )
    return np.flatnonzero(~part), np.flatnonzero(part)


def test_split(found: DataSet, data: Data, train: list[str]) -> str | None:
    """Return the split for the final test: the named one, else the test split; None for 'none'."""
    if data.test == NONE:
        return None
    if data.test is not None:
        return _apart(named_split(found, data.test, data.path), "test", data, train)
    return next((name for name in of_role(found, "test") if name not in train), None)


def _apart(name: str, role: str, data: Data, train: list[str]) -> str:
    """Return `name`. Raises UsageError if the split is also used for training."""
    if name in train:
        raise UsageError(
            f"data.{role} is {split_title(name)} of {data.path}, which is also used for training "
            f"(data.train). Choose another split, or {NONE!r}"
        )
    return name


def matched(
    found: DataSet, split: str, class_names: list[str], *, required: bool, labels: bool
) -> IndexedSource | None:
    """Return a split with its labels as indices into `class_names`.

    A split whose classes do not match is used without labels (`labels` is False), rejected with DataError
    (`required`), or left out with a warning."""
    try:
        return Subset(found.splits[split], class_names=class_names)
    except DataError as error:
        if not labels:
            return Unlabelled(found.splits[split], class_names)
        if required:
            raise DataError(f"{split_title(split)} has {error}") from error
        found.findings.warnings.append(f"{split_title(split)} left out: it has {error}")
        return None
