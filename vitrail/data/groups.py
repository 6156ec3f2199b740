"""Images that belong together, such as those of a patient, a camera or a day: splits keep them on one side.

Otherwise a network is measured on images that are nearly those it has learned, and its accuracy says little about new
patients. `Data.group` says what belongs together; scikit-learn's grouped splitters divide whole groups, with about the
share of each class.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from vitrail.data.item import Findings, IndexedSource, origin, split_title
from vitrail.data.labels.label_from import KINDS, ImageFiles, compiled, labels_of, text_in_name
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Answers, LabelSets, class_counts
from vitrail.data.settings import FOLDER, Columns, Data
from vitrail.errors import DataError, UsageError
from vitrail.version import need
from vitrail.words import counted, listing, shown

FORMS = "'folder', 'name: PATTERN', 'table: FILE ID -> COLUMN', or a column of a CSV, a parquet file or a hub data set"


def groups_of(source: IndexedSource, data: Data) -> np.ndarray:
    """Return the group of each image by `Data.group`, StringDType [N].

    Raises UsageError for a setting that does not fit the data, DataError for an image without a group.
    """
    assert data.group is not None
    places = [origin(source, row) for row in range(len(source))]
    names = [one.id(row) for one, row in places]
    if data.group == FOLDER:
        found: list[str | None] = [os.path.dirname(name) for name in names]
    elif ":" in data.group:
        found = _by_kind(names, data)
    else:
        found = []
        for one, row in places:
            if (cells := getattr(one, "groups", None)) is None:
                raise UsageError(
                    f"data.group is {shown(data.group)}, a column, and the images of {data.path} have none. Valid are "
                    f"{FORMS}"
                )
            found.append(cells[row].strip())
    if lacking := [name for name, group in zip(names, found, strict=True) if not group and data.group != FOLDER]:
        raise DataError(
            f"{len(lacking):,} of {len(names):,} images belong to no group by data.group {data.group!r}: "
            f"{listing(lacking, 3)}. Every image needs one"
        )
    return np.array([group or "" for group in found], dtype=np.dtypes.StringDType())


def _by_kind(names: list[str], data: Data) -> list[str | None]:
    """Return the groups in names of files, or in two columns of a table."""
    assert data.group is not None
    kind, _, argument = data.group.partition(":")
    if kind.strip().lower() == "name":
        around = "what the images of a group share, as in 'name: ^(p[0-9]+)_'"
        pattern = compiled(argument.strip(), "data.group", around)
        return [text_in_name(pattern, name) for name in names]
    if kind.strip().lower() not in KINDS:
        raise UsageError(f"data.group is {shown(data.group)}; valid are {FORMS}")
    place = Path(data.path).expanduser()
    images = ImageFiles(place if place.is_dir() else place.parent, names)
    try:
        cells = labels_of(images, data.group, Columns(per_image="one"), Findings(""))
    except (DataError, UsageError) as error:
        raise type(error)(str(error).replace("data.label_from", "data.group")) from error
    return [cell if isinstance(cell, str) else None for cell in cells]


def grouped_folds(source: IndexedSource, groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the fold of each image, int64 [N] from 0 to count - 1: the images of a group are in one of them.

    Folds have about the same number of images of each class. Raises UsageError for fewer groups than folds, or if no
    class has as many images.
    """
    return _folds(_strata(source), groups, count, seed)


def _folds(strata: np.ndarray, groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `grouped_folds` of images of these `strata` (see `_strata`)."""
    number = np.unique(groups, return_inverse=True)[1]
    there, largest = int(number.max(initial=-1)) + 1, _largest(strata)
    few = f"data.group divides the {len(strata):,} training images into {counted(there, 'group')}"
    if there < count:
        raise UsageError(f"{few}, too few for {count} parts")
    if largest < count:
        raise UsageError(
            f"{few}, and no class has more than {counted(largest, 'image')}, too few for {count} parts with a share of "
            "each class"
        )
    need("sklearn")
    from sklearn.model_selection import StratifiedGroupKFold

    found = np.empty(len(strata), dtype=np.int64)
    divide = StratifiedGroupKFold(count, shuffle=True, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class")  # its images are in fewer parts, as they must be
        for fold, (_, held) in enumerate(divide.split(number, strata, number)):
            found[held] = fold
    return found


MOST_PARTS = 20
"""Number of parts of which some are held out; more for a share that is smaller than one of them."""


def hold_out_groups(
    source: IndexedSource, groups: np.ndarray, share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices for training, indices held out), int64, each ascending: about this share of each class.

    share: Between 0 and 1. With few groups, or few images of each class, it is the nearest that they allow. Something
    is held out and something stays. Raises UsageError for a single group, or if each class has a single image.
    """
    strata = _strata(source)
    most = min(len(np.unique(groups)), _largest(strata), max(MOST_PARTS, round(1 / share)))

    def out(parts: int) -> int:
        return min(parts - 1, max(1, round(share * parts)))

    parts = min(range(2, most + 1), key=lambda parts: abs(out(parts) / parts - share), default=2)
    held = _folds(strata, groups, parts, seed) < out(parts)
    return np.flatnonzero(~held), np.flatnonzero(held)


def _largest(strata: np.ndarray) -> int:
    """Return the number of images of the largest class."""
    return int(np.unique(strata, return_counts=True)[1].max(initial=0))


def _strata(source: IndexedSource) -> np.ndarray:
    """Return the class of each image by which folds are alike; of several labels the rarest, of numbers none."""
    labels = source.labels.strata() if isinstance(source.labels, Answers) else source.labels
    if isinstance(labels, Numbers):
        return np.zeros(len(source), dtype=np.int64)
    if not isinstance(labels, LabelSets):
        return labels
    counts = class_counts(labels, labels.width)
    every = (np.atleast_1d(labels.at(number)) for number in range(len(labels)))
    return np.array([its[counts[its].argmin()] if its.size else labels.width for its in every], dtype=np.int64)


def said_of_groups(source: IndexedSource, groups: np.ndarray, data: Data) -> str:
    """Return how many groups there are and how large they are, and what is wrong with them."""
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    said = (
        f"data.group {data.group!r} divides {len(groups):,} images into {counted(len(sizes), 'group')} of "
        f"{sizes.min():,} to {sizes.max():,}"
    )
    if len(sizes) == 1:
        return f"{said}: no group can be held out"
    if isinstance(source.labels, np.ndarray) and len(sizes) <= len(np.unique(source.labels)):
        pairs = {*zip(number.tolist(), source.labels.tolist(), strict=True)}
        if len(pairs) <= len(np.unique(source.labels)):
            return f"{said}: each class is in one group alone, so that a group that is held out has classes to itself"
    return said


def on_both_sides(parts: Mapping[str, np.ndarray], data: Data, class_names: Iterable[str]) -> list[str]:
    """Return a warning for each two splits that have images of the same group; parts: the groups of their images.

    The folder of a class is in every split, and no group of images that are alike.
    """
    groups = {name: Counter(part.tolist()) for name, part in parts.items()}
    harmless = {*class_names} if data.group == FOLDER else set[str]()
    found, names = [], list(groups)
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            if both := sorted((groups[first].keys() & groups[second].keys()) - harmless):
                images = sum(groups[second][group] for group in both)
                found.append(
                    f"{len(both):,} groups of data.group {data.group!r} are in {split_title(first)} and in "
                    f"{split_title(second)} ({images:,} images there): {listing(both, 3)}. What is measured on them "
                    "says little about new groups"
                )
    return found


_NUMBERED = re.compile(r"(.+?)[-_. ]?\(?[0-9]+\)?\.[^.]+")
"""A name that ends in a number, and what stands before it."""
SERIES = 3
"""Images per name before the numbers from which names look like series."""


def series_advice(names: Iterable[str], classes: int) -> str:
    """Return the sentence on images whose names look like series, such as p01_1.jpg and p01_2.jpg; "" if none do.

    names: Ids of images. They are series if most names end in a number and far more names than classes stand before it,
    each with several images.
    """
    files = [os.path.basename(name) for name in names]
    before = [match[1] for file in files if (match := _NUMBERED.fullmatch(file))]
    series = Counter(before)
    if len(before) < 0.8 * len(files) or len(series) < 2 * max(classes, 2) or len(before) < SERIES * len(series):
        return ""
    return (
        f"the names of the images look like series: {len(series):,} names such as {shown(before[0])} stand before "
        f"numbers, each of {len(before) / len(series):.1f} images on average. Those of one series may be nearly alike, "
        "and a random split then shows validation images that are nearly known. Keep each series on one side: "
        r"--data.group 'name: ^(.+?)[-_. ]?\(?[0-9]+\)?\.[^.]+$'"
    )
