"""Divide a data set into images for training, for validation and for the final test: its splits, or a part of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.groups import groups_of, on_both_sides, said_of_groups
from vitrail.data.item import (
    ROLES,
    Concatenated,
    DataSet,
    Findings,
    IndexedSource,
    Subset,
    Unlabelled,
    is_usual,
    role_of,
    split_title,
)
from vitrail.data.labels.kind import without_labels
from vitrail.data.labels.sets import LabelSets, class_counts, known
from vitrail.data.settings import Data
from vitrail.data.sources.flat import label_advice
from vitrail.data.sources.folder import EXPECTED, Located
from vitrail.data.split import fingerprint, folds, hold_out, subset
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.words import listing

NONE = "none"
"""Value of a setting that names a split: use no split for this role."""
SUBSET = "subset"
"""Value of `Data.validation`: hold out a share of the images of `Data.subset`, not of all training images."""


_WITHOUT_COLUMNS = ("folder", "masks", "shards", "packed", "digits")
"""Kinds of data (`Findings.kind`) without columns and cells."""


def without_effect(data: Data, kind: str) -> Iterator[str]:
    """Yield a warning for each setting that says how labels are read and changes nothing on data of this kind."""
    unused = {"image_column": kind in _WITHOUT_COLUMNS, "ignore": kind not in ("masks", "list", "own")}
    if data.labels_per_image != "numbers":  # else they name the targets, or divide the numbers in a name
        of_cells = ("label_column", "label_columns", "label_separator")
        unused |= dict.fromkeys(of_cells, kind in _WITHOUT_COLUMNS)
    for name in (name for name, here in unused.items() if here):
        value, usual = getattr(data, name), getattr(Data(), name)
        if value is not None and value != usual and value != list(usual or ()):
            yield f"data.{name} has no effect on images of this kind ({kind})"


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


@dataclass
class Splits:
    """Data opened for training. The labels of all splits are indices into `class_names`."""

    train: IndexedSource
    validation: IndexedSource | None
    test: IndexedSource | None
    class_names: list[str]
    report: Findings
    fingerprint: str
    held_out: dict[str, Any] = field(default_factory=dict)
    """Origin of the validation images: {"validation": split name} if the data have such a split, else
    {"seed", "share", "from", "ids": [...]} of the images held out, with "fold" in place of "share" for `Data.fold`,
    and "paths", which are below the data."""

    def in_order(self, class_names: list[str]) -> Splits:
        """Return the splits with their classes in this order, such as that of a run; as they are if others are there.

        Runs of an earlier version have another order of the classes of folders that are numbers.
        """
        if self.class_names == class_names or sorted(self.class_names) != sorted(class_names):
            return self
        train = Subset(self.train, class_names=class_names)
        held = (
            None if part is None else Subset(part, class_names=class_names) for part in (self.validation, self.test)
        )
        validation, test = held
        return replace(self, train=train, validation=validation, test=test, class_names=list(class_names))


def split_data_set(
    found: DataSet, data: Data, seed: int = 0, *, labels: bool = True, known_classes: Sequence[str] = ()
) -> Splits:
    """Split the data set at `data.path` for training. Raises as `open_data` does.

    known_classes: Classes that images of any split may have, though no training image has them. `Splits.class_names`
    ends with them.
    """
    findings = found.findings
    names = training_splits(found, data)
    name = "+".join(names)
    train = found.splits[name] if len(names) == 1 else Concatenated({part: found.splits[part] for part in names})
    class_names = train.class_names
    if labels:
        _require_labels(train, name, data.path, findings, known_classes)
    further = [one for one in known_classes if one not in class_names]
    if further and isinstance(train.labels, np.ndarray):
        class_names = [*class_names, *further]
        train = Subset(train, class_names=class_names)
    mark = fingerprint(found.splits)
    measured = test_split(found, data, names)
    chosen = validation_split(found, data, names, measured, labels=labels) if data.fold is None else None
    asked = {chosen, measured if data.test is not None else None}
    others = {
        split: matched(found, split, class_names, required=split in asked, labels=labels)
        for split in found.splits
        if split not in names
    }
    findings.warnings += _not_used(found, [*names, chosen, measured], others)
    if data.strict:
        findings.require_whole(data.path)
    findings.warnings += without_effect(data, findings.kind)
    test = None if measured is None else others[measured]
    if data.subset is not None and data.validation == SUBSET:  # the validation images are some of the subset
        train = Subset(train, subset(train, data.subset, seed))
    known_groups: dict[str, np.ndarray] = {}
    if chosen is not None:
        validation, origin = others[chosen], dict[str, Any](validation=chosen)
    elif data.fold is not None or data.holdout > 0:
        groups = None if data.group is None else groups_of(train, data)
        remaining, held, origin = _held_out(found, names, train, data, seed, groups)
        train, validation = Subset(train, remaining), Subset(train, held)
        if groups is not None:
            known_groups = {"training": groups[remaining], "validation": groups[held]}
    else:
        validation, origin = None, {}
    if data.validation == SUBSET and data.subset is None:
        findings.warnings.append(f"data.validation {SUBSET!r} has no effect without data.subset")
    used = [("training", train), ("validation", validation), ("test", test)]
    parts = {role: part for role, part in used if part is not None}
    if data.group is not None and len(parts) > 1:
        others_groups = {role: groups_of(part, data) for role, part in parts.items() if role not in known_groups}
        findings.warnings += on_both_sides({**known_groups, **others_groups}, data, class_names)
    elif data.group is not None:
        findings.warnings.append("data.group has no effect: no image is held out (data.holdout, data.validation)")
    if data.subset is not None and data.validation != SUBSET:
        train = Subset(train, subset(train, data.subset, seed))
    return Splits(train, validation, test, list(class_names), findings, mark, origin)


def _not_used(found: DataSet, used: Sequence[str | None], others: Mapping[str, IndexedSource | None]) -> Iterator[str]:
    """Yield a warning for each split without a use: its name has no role, or is that of a used one but for case."""
    lowered = {name.lower() for name in used if name is not None}
    for name, source in others.items():
        if name not in used and source is not None and (role_of(name) is None or name.lower() in lowered):
            yield (
                f"split {name!r} is not used: its {len(source):,} images are for no part of the training. To use them, "
                "name the split in data.train, data.validation or data.test"
            )


def _held_out(
    found: DataSet, names: list[str], train: IndexedSource, data: Data, seed: int, groups: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return (indices for training, indices held out for validation, `Splits.held_out`); indices int64, ascending.

    names: The splits that `train` consists of. The images are the fold `data.fold`, or a share of them; with `groups`,
    the group of each image, whole groups. With a fold, a validation split that is not used causes a warning, and so do
    classes with fewer images than folds. Raises DataError if no image can be held out, and UsageError if a validation
    split is named beside a fold, and for more folds than images.
    """
    name = "+".join(names)
    part: dict[str, Any] = {"share": data.holdout}
    if groups is not None:
        found.findings.warnings.append(said_of_groups(train, groups, data))
    if data.fold is None:
        remaining, held = hold_out(train, data.holdout, seed, groups)
    else:
        if data.validation is not None:
            raise UsageError(
                f"data.fold is {data.fold!r} and data.validation is {data.validation!r}: both choose the validation "
                "images. Remove one of them"
            )
        number, count = map(int, data.fold.split("/"))
        found.findings.warnings += [
            f"split {other!r} is not used: data.fold validates on training images. To divide its images, too, set "
            f"data.train to '{data.train}+{other}'"
            for other in of_role(found, "validation")
            if other not in names
        ]
        fold = folds(train, count, seed, groups) == number - 1
        remaining, held = np.flatnonzero(~fold), np.flatnonzero(fold)
        sizes = class_counts(train.labels, len(train.class_names))
        if rare := [one for one, size in zip(train.class_names, sizes, strict=True) if 0 < size < count]:
            found.findings.warnings.append(
                f"classes with fewer images than the {count} folds are missing from some of them: {listing(rare, 5)}"
            )
        shown = Located(train, name if len(names) == 1 < len(found.splits) else "", data.path)
        part = {"fold": data.fold, "paths": [shown.id(int(index)) for index in held]}
    if not len(held):
        raise DataError(
            f"no image of {data.path} can be held out for validation, because no class has two images or more. Add "
            "images, name a validation split (data.validation), or set data.holdout to 0"
        )
    if groups is not None:
        part |= {"group": data.group, "groups": sorted({*groups[held].tolist()})}
    return remaining, held, {"seed": seed, **part, "from": name, "ids": [train.id(int(index)) for index in held]}


def _require_labels(
    train: IndexedSource, split: str, path: str, findings: Findings, known_classes: Sequence[str]
) -> None:
    """Raise DataError unless the training images all have a label and are of at least two classes, or beside others."""
    warnings = "".join(f". {line}" for line in findings.warnings[:3])
    unlabelled = int(np.count_nonzero(~known(train.labels)))
    where = f"split {split!r} of {path}" if split else path
    if unlabelled:
        raise DataError(
            f"{unlabelled} of {len(train)} images of {where} ({findings.kind}) have no label. "
            f"Label them, remove them, or choose a recipe that needs no labels{warnings}"
        )
    if without_labels(train.labels, len(train.class_names)):
        raise DataError(
            f"none of the {len(train)} images of {where} ({findings.kind}) has any of its {len(train.class_names)} "
            f"labels, so there is nothing to learn. Check the labels{warnings}"
        )
    if isinstance(train.labels, LabelSets):
        counts = class_counts(train.labels, len(train.class_names))
        if names := [name for name, count in zip(train.class_names, counts, strict=True) if not count]:
            title = split_title(split)
            findings.warnings.append(
                f"no image of {title} has the labels {listing(names)}: the network cannot learn them"
            )
    if not isinstance(train.labels, np.ndarray):
        return
    if len(train.class_names) < 2 and not known_classes:
        tree = f". {label_advice(Path(path))}.\nWithout this setting, {EXPECTED}" if findings.kind == "folder" else ""
        if train.class_names == ["images"]:
            tree = f". If each image has a mask, the folder {Path(path) / 'masks'} is missing{tree}"
        raise DataError(
            f"{path} has one class only, {train.class_names[0]!r}. A classifier needs at least two classes"
            f"{warnings}{tree}"
        )
