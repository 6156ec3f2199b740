"""Whether images have one label each, sets of labels or numbers: asked for or decided from the data, and reported.

Class names that a reader takes for one name cause a warning: equal but for case, spaces, the form of letters, or as
numbers.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from vitrail.data.item import DataSet, IndexedSource
from vitrail.data.labels.numbers import Numbers, parse_numbers, target_names
from vitrail.data.labels.sets import UNKNOWN, Answers, Labels, LabelSets, as_one, as_sets, class_counts
from vitrail.data.settings import Columns
from vitrail.errors import DataError
from vitrail.words import shown


def of_one_kind(found: DataSet, columns: Columns) -> DataSet:
    """Return the data set with labels of one kind in all splits, as `Data.labels_per_image` says.

    Raises DataError if it says "one", and an image has several labels or none; or if it says "numbers", and the labels
    are something else.
    """
    if any(isinstance(one.labels, LabelSets) and one.labels.what == "masks" for one in found.splits.values()):
        return found
    if any(isinstance(source.labels, Answers) for source in found.splits.values()):
        return found  # each answer has a kind of its own (`vitrail.data.labels.answers`)
    if columns.per_image == "numbers":
        return _as_numbers(found, columns)
    if columns.per_image == "several":
        return _changed(found, lambda source: as_sets(source.labels, len(source.class_names)))
    if not any(isinstance(source.labels, LabelSets) for source in found.splits.values()):
        return found
    for name, source in found.splits.items():
        if as_one(source.labels) is not None:
            continue
        if columns.per_image == "one":
            raise DataError(
                f"{_not_one(name, source)}, and data.labels_per_image is 'one'. Correct the labels, or leave "
                "data.labels_per_image out: then an image may have any number of labels"
            )
        return _changed(found, lambda source: as_sets(source.labels, len(source.class_names)))
    if columns.per_image == "auto":
        found.findings.warnings.append(
            "labels are written as lists, and each image has exactly one: they are used as one label per image. For "
            "sets of labels set data.labels_per_image to 'several'"
        )
    return _changed(found, lambda source: as_one(source.labels))


def _not_one(split: str, source: IndexedSource) -> str:
    assert isinstance(source.labels, LabelSets)
    counts = source.labels.counts
    index = int(np.flatnonzero((counts != 1) & source.labels.known)[0])
    where = f" of split {split!r}" if split else ""
    return f"image {source.id(index)!r}{where} has {counts[index]} labels"


def _as_numbers(found: DataSet, columns: Columns) -> DataSet:
    read = {
        name: _read(source, name, columns)
        for name, source in found.splits.items()
        if not isinstance(source.labels, Numbers)
    }
    widths = {name: values.shape[1] for name, values in read.items() if values.shape[1]}
    widths |= {name: len(source.class_names) for name, source in found.splits.items() if name not in read}
    if len(set(widths.values())) > 1:
        raise DataError(
            f"images have other numbers of targets in other splits: {widths}. Give all of them equally many"
        )
    width = next(iter(widths.values()), 1)
    splits = dict(found.splits)
    for name, values in read.items():  # of a split without any label, all numbers are unknown
        values = values if values.shape[1] else np.full((len(values), width), np.nan)
        changed: Any = _relabelled(splits[name], Numbers(values))
        changed.class_names = target_names(width, columns.target, columns.classes)
        splits[name] = changed
    return DataSet(splits, found.findings)


def _read(source: IndexedSource, split: str, columns: Columns) -> np.ndarray:
    """Return the numbers that the names of classes are, float64 [N, targets]; [N, 0] if no label is known.

    Raises DataError, which names an image, for another name.
    """
    if isinstance(source.labels, LabelSets):
        raise DataError(
            f"objective regression needs numbers, and the images{f' of split {split!r}' if split else ''} have sets of "
            "labels. Name the columns of the numbers in data.label_columns"
        )
    assert isinstance(source.labels, np.ndarray)
    used, first = np.unique(source.labels, return_index=True)
    read: dict[int, tuple[float, ...]] = {}
    for number, index in sorted(zip(used.tolist(), first.tolist(), strict=True), key=lambda pair: pair[1]):
        if number == UNKNOWN:
            continue
        text = source.class_names[number]
        where = f"image {source.id(index)!r}{f' of split {split!r}' if split else ''}"
        try:
            read[number] = parse_numbers(text, columns.separator)
        except ValueError:
            raise DataError(
                f"{where} has the label {shown(text)}, and objective regression needs finite numbers, such as 3.5, or "
                "3.5|2 for two. Numbers stand in a column (data.label_column), in several (data.label_columns), or in "
                "the names of files (data.label_from)"
            ) from None
        width = len(next(iter(read.values())))
        if len(read[number]) != width:
            raise DataError(
                f"{where} has the label {shown(text)}: {len(read[number])} numbers, and others have {width}"
            )
    width = len(next(iter(read.values()), ()))
    table = np.full((len(source.class_names) + 1, width), np.nan)  # UNKNOWN = -1 picks the last row
    for number, row in read.items():
        table[number] = row
    found: np.ndarray = table[source.labels]
    return found


def _changed(found: DataSet, labels_of: Any) -> DataSet:
    """Return the data set with other labels of the same images."""
    splits = {name: _relabelled(source, labels_of(source)) for name, source in found.splits.items()}
    return DataSet(splits, found.findings)


def _relabelled(source: IndexedSource, labels: Labels) -> IndexedSource:
    if labels is source.labels:
        return source
    changed: Any = copy(source)  # shares everything but the labels, which are an attribute of every reader
    changed.labels = labels
    return changed


def without_labels(labels: Labels, classes: int) -> bool:
    """Return whether no image has a label, so that nothing can be learned from these labels or measured on them."""
    return isinstance(labels, LabelSets) and bool(labels.known.any()) and not class_counts(labels, classes).any()


_SHOWN = 3
"""Number of groups of names in a warning."""


def alike(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of two or more names that are alike, each sorted, in the order of their first names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(set(names)):
        groups[_plain(name)].append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


def alike_classes(sources: Iterable[IndexedSource]) -> Iterator[str]:
    """Yield a warning if the classes of these splits have names that are alike. Targets of numbers are no classes."""
    names = {name for source in sources if not isinstance(source.labels, Numbers) for name in source.class_names}
    if groups := alike(names):
        shown = "; ".join(", ".join(map(repr, group)) for group in groups[:_SHOWN])
        more = f"; and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
        yield (
            "names of different classes are equal but for case, spaces, letters or the way a number is written: "
            f"{shown}{more}. If they are one class, give them one name"
        )


def _plain(name: str) -> str:
    """Return a name without what a reader overlooks: 7 for "007" and "7.0", cat for "Cat ", one form of each letter."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    try:
        number = float(text)
    except ValueError:
        return unicodedata.normalize("NFKC", text)
    # a long number is an identifier: as a float it would equal its neighbours
    digits = text.lstrip("+-0").replace(".", "")
    return repr(number + 0.0) if abs(number) < 2**53 and len(digits) <= 15 else text
