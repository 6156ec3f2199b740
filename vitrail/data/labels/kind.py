"""Whether the images of a data set have one label each or sets of labels: decided from the data, and reported."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from vitrail.data.item import DataSet, Listed
from vitrail.data.labels.sets import Labels, LabelSets, as_one, as_sets, class_counts
from vitrail.data.settings import Columns
from vitrail.errors import DataError


def one_or_several(found: DataSet, columns: Columns) -> DataSet:
    """Return the data set with labels of one kind in all splits, as `Data.labels_per_image` says.

    Raises DataError if it says "one", and an image has several labels or none.
    """
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


def _not_one(split: str, source: Listed) -> str:
    assert isinstance(source.labels, LabelSets)
    counts = source.labels.counts
    index = int(np.flatnonzero((counts != 1) & source.labels.known)[0])
    where = f" of split {split!r}" if split else ""
    return f"image {source.id(index)!r}{where} has {counts[index]} labels"


def _changed(found: DataSet, labels_of: Any) -> DataSet:
    """Return the data set with other labels of the same images."""
    return DataSet(
        {name: _relabelled(source, labels_of(source)) for name, source in found.splits.items()}, found.findings
    )


def _relabelled(source: Listed, labels: Labels) -> Listed:
    if labels is source.labels:
        return source
    changed: Any = copy(source)  # shares everything but the labels, which are an attribute of every reader
    changed.labels = labels
    return changed


def without_labels(labels: Labels, classes: int) -> bool:
    """Return whether no image has a label, so that nothing can be learned from these labels or measured on them."""
    return isinstance(labels, LabelSets) and bool(labels.known.any()) and not class_counts(labels, classes).any()
