"""Which splits are used for training, for validation and for the final test."""

from __future__ import annotations

from vitrail.data.item import ROLES, DataSet, Listed, Unlabelled, View, role_of, split_title
from vitrail.data.labels.kind import without_labels
from vitrail.data.labels.sets import known
from vitrail.data.settings import Data
from vitrail.errors import DataError, UsageError, did_you_mean

NONE = "none"
"""Value of a setting that names a split: use no split for this role."""
SUBSET = "subset"
"""Value of `Data.validation`: hold out a share of the images of `Data.subset`, not of all training images."""


def of_role(found: DataSet, role: str) -> list[str]:
    """Return the names of the splits for `role`, the usual name first."""
    lowered = {name.lower(): name for name in found.splits}
    return [lowered[name] for name in ROLES[role] if name in lowered]


def named_split(found: DataSet, wanted: str, path: str) -> str:
    """Return the split called `wanted`, or by another usual name of it. Raises UsageError that lists the splits."""
    if wanted in found.splits:
        return wanted
    role = role_of(wanted)
    if role and (names := of_role(found, role)):
        return names[0]
    there = [repr(name) for name in found.splits if name]
    listing = f"its splits are {', '.join(there)}" if there else "it is not split"
    raise UsageError(f"{path} has no split {wanted!r}: {listing}.{did_you_mean(wanted, list(found.splits))}")


def training_splits(found: DataSet, data: Data) -> list[str]:
    """Return the names of the splits to train on: one, or several for "train+val". Raises UsageError."""
    if list(found.splits) == [""] and role_of(data.train) == "train":
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


def matched(found: DataSet, split: str, class_names: list[str], *, required: bool, labels: bool) -> Listed | None:
    """Return a split with its labels as indices into `class_names`.

    A split whose classes do not match is used without labels (`labels` is False), rejected with DataError
    (`required`), or left out with a warning."""
    try:
        return View(found.splits[split], class_names=class_names)
    except DataError as error:
        if not labels:
            return Unlabelled(found.splits[split], class_names)
        if required:
            raise DataError(f"{split_title(split)} has {error}") from error
        found.findings.warnings.append(f"{split_title(split)} left out: it has {error}")
        return None
