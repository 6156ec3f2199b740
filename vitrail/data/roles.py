"""Which split serves as what: the ones trained on, the one to choose by, the one measured at the end."""

from __future__ import annotations

import numpy as np

from vitrail.data.item import ROLES, DataSet, Listed, Unlabelled, View, role_of
from vitrail.data.settings import Data
from vitrail.errors import DataError, UsageError, did_you_mean

NONE = "none"
"""In place of a split: use none."""


def of_role(found: DataSet, role: str) -> list[str]:
    """Names of the splits that serve as `role`, the usual name first."""
    lowered = {name.lower(): name for name in found.splits}
    return [lowered[name] for name in ROLES[role] if name in lowered]


def named_split(found: DataSet, wanted: str, path: str) -> str:
    """Return the split called `wanted`, or a usual other name of it. Raises UsageError with the splits there are."""
    if wanted in found.splits:
        return wanted
    role = role_of(wanted)
    if role and (names := of_role(found, role)):
        return names[0]
    there = [repr(name) for name in found.splits if name]
    listing = f"its splits are {', '.join(there)}" if there else "it is not split"
    raise UsageError(f"{path} has no split {wanted!r}: {listing}.{did_you_mean(wanted, list(found.splits))}")


def training_splits(found: DataSet, data: Data) -> list[str]:
    """Names of the splits to train on: one, or those that "train+val" joins. Raises UsageError."""
    if list(found.splits) == [""] and role_of(data.train) == "train":
        return [""]
    parts = [data.train] if data.train in found.splits else data.train.split("+")
    names = [named_split(found, part, data.path) for part in parts]
    if len(set(names)) < len(names):
        raise UsageError(f"data.train is {data.train!r}, which names the split {names[0]!r} twice")
    return names


def validation_split(found: DataSet, data: Data, train: list[str], test: str | None, *, labels: bool) -> str | None:
    """Return the split to choose by: the one named, else the validation split, if its classes are known.

    Never the test split unless it is named: a model chosen on it would look better than it is.
    """
    if data.validation == NONE:
        return None
    if data.validation is not None:
        return _apart(named_split(found, data.validation, data.path), "validation", data, train)
    for name in of_role(found, "validation"):
        if name in train or name == test:
            continue
        if not labels or np.all(found.splits[name].labels >= 0):
            return name
        found.findings.warnings.append(f"split {name!r} has images without a label: not used for validation")
    return None


def test_split(found: DataSet, data: Data, train: list[str]) -> str | None:
    """Return the split to measure at the end: the one named, else the test split; None for 'none'."""
    if data.test == NONE:
        return None
    if data.test is not None:
        return _apart(named_split(found, data.test, data.path), "test", data, train)
    return next((name for name in of_role(found, "test") if name not in train), None)


def _apart(name: str, role: str, data: Data, train: list[str]) -> str:
    """Return `name`. Raises UsageError where it is trained on."""
    if name in train:
        raise UsageError(f"data.{role} is the split {name!r} of {data.path}, which is trained on (data.train)")
    return name


def matched(found: DataSet, split: str, class_names: list[str], *, required: bool, labels: bool) -> Listed | None:
    """Return a split with its labels in `class_names`; one that does not fit goes without where none are needed, is
    refused where it is required, else left out."""
    try:
        return View(found.splits[split], class_names=class_names)
    except DataError as error:
        if not labels:
            return Unlabelled(found.splits[split], class_names)
        if required:
            raise DataError(f"split {split!r} has {error}") from error
        found.findings.warnings.append(f"split {split!r} left out: it has {error}")
        return None
