r"""A list of images: a CSV that assigns images of a data set to splits without copying them.

| column | what |
|---|---|
| path | where the image lies, empty if the image is not a file of its own; for people and other programs |
| label | its class, or its classes with '\|' between them; empty where it is not known |
| split | the split it is in by this list |
| id, from | its id, and the data set's own split in which that id is unique |
| data | the data set: an absolute path, or a name; the same in every row |
| label_from | `Data.label_from` of that data set, the same in every row; the column is there only if it is set |

Whatever reads data reads such a list too. Ids and class names are those of the data set, also of classes that the
list leaves out, so that the images drawn by id, and the network's outputs, are equal for all lists of one data set.
Names that are not UTF-8 are written as `as_text` writes them; lists with their bytes are read, too.

Index lists are the form in which copies of VTAB-1k are passed on, a text file per split: `train800.txt`, `val200.txt`,
`train800val200.txt` and `test.txt` hold lines "images/test/0001.jpg 17"; the paths are below the folder of the lists.
`train.txt`, `val.txt` and their kin are read too.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.item import Concatenated, DataSet, Findings, IndexedSource, Subset, role_of, split_title
from vitrail.data.labels.label_from import LabelRow, is_list_file, list_rows, read_texts
from vitrail.data.labels.sets import class_counts, distinct_names, label_text, order_classes
from vitrail.data.settings import Columns, Selection
from vitrail.data.sources.folder import file_of, file_source
from vitrail.data.spreadsheet import SafeWriter, unescape_formula
from vitrail.errors import DataError, UsageError
from vitrail.files import regular_descriptor, replacing_text
from vitrail.words import as_text, from_text, listing

COLUMNS = ("path", "label", "split", "id", "from", "data")
LABEL_FROM = "label_from"
"""Column after `COLUMNS`, if the data set has this setting."""


class Reference(NamedTuple):
    """The data set that a list refers to."""

    data: str
    label_from: str | None


def write_list(
    file: Path,
    data: str,
    found: DataSet,
    splits: Mapping[str, IndexedSource],
    *,
    label_from: str | None = None,
    raw: bool = False,
) -> None:
    """Write `splits`, each taken from the splits of `found`, the data set at `data` read with `label_from`.

    `raw` is SafeWriter's. Raises UsageError where the file cannot be written.
    """
    place = Path(data).expanduser()
    data = str(place.resolve()) if place.exists() else data
    names = {id(source): name for name, source in found.splits.items()}
    with replacing_text(file, UsageError) as stream:
        writer = SafeWriter(stream, raw=raw, read_back=True)
        writer.writerow((*COLUMNS, *([LABEL_FROM] if label_from else [])))
        for split, images in splits.items():
            for number in range(len(images)):
                source, index = images, number
                while id(source) not in names:
                    assert isinstance(source, Subset | Concatenated)
                    source, index = source.within(index)
                row = (file_of(source, index) or "", _class(source, index), split, source.id(index))
                writer.writerow((*row, names[id(source)], data, *([label_from] if label_from else [])))


def refers_to(file: Path) -> Reference | None:
    """Return the data set that a list refers to; None for a CSV that is not such a list."""
    try:
        with open(regular_descriptor(file), newline="", encoding="utf-8", errors="surrogateescape") as stream:
            rows = csv.reader(stream)
            header = tuple(next(rows, ()))
            first = next(rows, None) if header in (COLUMNS, (*COLUMNS, LABEL_FROM)) else None
    except csv.Error:  # the reader of tables says what is wrong
        return None
    if first is None or len(first) != len(header):
        return None
    data, *label_from = [unescape_formula(cell) for cell in first[len(COLUMNS) - 1 :]]
    if data == str(file.resolve()):
        raise DataError(f"{file} is a list of images that refers to itself. Name the data set in its column 'data'")
    if not Path(data).expanduser().exists() and Path(from_text(data)).exists():
        data = from_text(data)
    return Reference(data, label_from[0] if label_from else None)


@dataclass
class _Wanted:
    """The rows of one split of a list."""

    origin: str
    rows: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def read_list(file: Path, found: DataSet) -> DataSet:
    """Return the splits that the list `file` makes of `found`, the data set it refers to.

    Images that no longer exist are dropped with their row number; the header is row 1. Raises DataError if no
    image is left, if a label differs from that of the data set, or if a split mixes several splits of the data set.
    """
    findings = found.findings
    findings.kind = "list"
    splits: dict[str, IndexedSource] = {}
    for name, wanted in _read(file).items():
        if wanted.origin not in found.splits:
            there = listing(list(map(split_title, found.splits)), quoted=False)
            raise DataError(f"{file}: it refers to {split_title(wanted.origin)} of its data set, which has {there}")
        splits[name] = _chosen(file, found.splits[wanted.origin], wanted, findings)
    return DataSet(splits, findings)


def _read(file: Path) -> dict[str, _Wanted]:
    splits: dict[str, _Wanted] = {}
    data = refers_to(file)
    assert data is not None
    ends = [as_text(data.data), *([as_text(data.label_from)] if data.label_from is not None else [])]
    with open(regular_descriptor(file), newline="", encoding="utf-8", errors="surrogateescape") as stream:
        rows = csv.reader(stream)
        next(rows)
        for number, row in enumerate(rows, start=2):
            row = [unescape_formula(cell) for cell in row]
            if list(map(as_text, row[len(COLUMNS) - 1 :])) != ends:
                raise DataError(f"{file}, row {number}: not {', '.join(COLUMNS)} of {' '.join(ends)}")
            _, label, split, name, origin = row[: len(COLUMNS) - 1]
            wanted = splits.setdefault(split, _Wanted(origin))
            if wanted.origin != origin:
                raise DataError(
                    f"{file}, row {number}: {split_title(split)} of the list is from "
                    f"{split_title(wanted.origin)} and from {split_title(origin)} of its data set"
                )
            wanted.rows.append(number)
            wanted.labels.append(label)
            wanted.ids.append(name)
    return splits


def _chosen(file: Path, source: IndexedSource, wanted: _Wanted, findings: Findings) -> IndexedSource:
    """Return the images of one split of a list, in the order of the list."""
    there = _marks(source.id(index) for index in range(len(source)))
    order = np.argsort(there, kind="stable")
    asked = _marks(wanted.ids)
    places = order[np.searchsorted(there, asked, sorter=order).clip(max=len(source) - 1)]
    known = there[places] == asked
    for lost in np.flatnonzero(~known).tolist():
        reason = f"row {wanted.rows[lost]} of {file.name}: no such image in {split_title(wanted.origin)}"
        findings.drop(wanted.ids[lost], reason)
    if not known.any():
        raise DataError(f"{file}: none of the {len(known)} images it lists is there, the first is {wanted.ids[0]!r}")
    for number in np.flatnonzero(known).tolist():
        label = _class(source, int(places[number]))
        if as_text(label) != as_text(wanted.labels[number]):
            raise DataError(
                f"{file}, row {wanted.rows[number]}: {wanted.ids[number]!r} is {wanted.labels[number]!r} here and "
                f"{label!r} in the data it refers to; a list cannot change labels. If these were read from other "
                "columns (data.label_column, data.label_columns, data.answers), name them again"
            )
    return Subset(source, places[known])


EXCLUSION = ("split", "id")
"""Columns that name an image in a list of excluded images; it may have other columns."""


def without(found: DataSet, file: Path) -> DataSet:
    """Return `found` without the images that the CSV `file` names in the columns `EXCLUSION`.

    A warning counts the rows whose image does not exist. Raises DataError if the file cannot be read, has other columns
    or an unknown split, or leaves no image in a split.
    """
    excluded: dict[str, set[str]] = {}
    try:
        with open(regular_descriptor(file), newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
            rows = csv.DictReader(stream)
            if missing := [name for name in EXCLUSION if name not in (rows.fieldnames or ())]:
                raise DataError(
                    f"{file} has no column {missing[0]!r}. A list of excluded images has the columns "
                    f"{' and '.join(EXCLUSION)}"
                )
            for number, row in enumerate(rows, start=2):
                split, name = (unescape_formula(row[column] or "") for column in EXCLUSION)
                if split not in found.splits:
                    there = ", ".join(map(repr, found.splits))
                    raise DataError(f"{file}, row {number}: the data have no split {split!r}; there are {there}")
                excluded.setdefault(split, set()).add(as_text(name))
    except (OSError, csv.Error) as error:
        raise DataError(f"the list of excluded images {file} cannot be read: {error}") from error
    splits = dict(found.splits)
    for split, names in excluded.items():
        source = splits[split]
        stays = np.array([as_text(source.id(index)) not in names for index in range(len(source))], dtype=bool)
        if not stays.any():
            raise DataError(f"{file} excludes all {len(source)} images of {split_title(split)}")
        gone = len(source) - int(stays.sum())
        if gone < len(names):
            found.findings.warnings.append(f"{file.name}: {len(names) - gone} of its images are not in the data")
        splits[split] = Subset(source, np.flatnonzero(stays))
    return DataSet(splits, found.findings)


def select_images(found: DataSet, selection: Selection) -> DataSet:
    """Return the images that `Data.include` and `Data.exclude` leave, without classes that have lost all images.

    Readers of folders use the patterns while they list files, so that only other kinds of data are filtered here. A
    pattern of `Data.exclude` that fits no image causes a warning. Raises DataError as `without` does.
    """
    for file in selection.lists:
        found = without(found, Path(file).expanduser())
    findings = found.findings
    if selection.patterns and findings.kind not in ("folder", "labelled files", "masks"):
        left = {name: _left(name, source, selection, findings) for name, source in found.splits.items()}
        found = DataSet(left, findings)
    for pattern in selection.exclude:
        warning = f"data.exclude {pattern!r} fits no image"
        if not any(repr(pattern) in reason for reason in findings.ignored) and warning not in findings.warnings:
            findings.warnings.append(warning)
    return found


def _left(split: str, source: IndexedSource, selection: Selection, findings: Findings) -> IndexedSource:
    """Return the images of a split that the patterns leave."""
    rows = []
    for row in range(len(source)):
        if reason := selection.reason("/".join(filter(None, (split, source.id(row))))):
            findings.ignore(reason, source.id(row))
        else:
            rows.append(row)
    left = Subset(source, np.array(rows, dtype=np.int64))
    if not isinstance(left.labels, np.ndarray):
        return left
    counts = class_counts(left.labels, len(left.class_names))
    return Subset(left, class_names=[name for name, count in zip(left.class_names, counts, strict=True) if count])


def _class(source: IndexedSource, index: int) -> str:
    return label_text(source.labels, index, source.class_names)


def _marks(ids: Iterable[str]) -> np.ndarray:
    """Return a hash of 16 bytes for each id: a table that is smaller than the ids and fast to search."""
    hashes = (hashlib.blake2b(as_text(name).encode(), digest_size=16).digest() for name in ids)
    return np.frombuffer(b"".join(hashes), dtype="S16")


WHOLE, PARTS = "train800val200", ("train800", "val200")
"""A list that joins two others. It is left out if those exist, so that no validation image is a training image;
`train800+val200` gives the same images."""


def index_lists(path: Path) -> dict[str, Path]:
    """Return split -> its list, for the text files in `path` that are lists of images; {} without a training list."""
    found = {file.stem: file for file in sorted(path.glob("*.txt")) if role_of(file.stem) and is_list_file(file)}
    if all(part in found for part in PARTS):
        found.pop(WHOLE, None)
    return found if any(role_of(name) == "train" for name in found) else {}


def read_index_lists(path: Path, lists: Mapping[str, Path], columns: Columns = Columns()) -> DataSet:
    """Open a folder with these index lists (`index_lists`). Missing files are listed as dropped.

    Raises DataError for a line without a path and a label, and if no file of a list exists.
    """
    findings = Findings("lists")
    rows = [(file, row) for file in lists.values() for row in list_rows(file)]
    cells = read_texts([row.label for _, row in rows], columns, lambda k: f"{rows[k][0]}, {rows[k][1].where}", findings)
    read: dict[Path, list[tuple[str, Any, int]]] = {file: [] for file in lists.values()}
    for (file, row), label in zip(rows, cells, strict=True):
        if (found := _located(path, file, row, findings)) is not None:
            read[file].append((found[0], label, found[1]))
    if empty := [file for file, lines in read.items() if not lines]:
        reason = f": {findings.dropped[0].id}, {findings.dropped[0].reason}" if findings.dropped else ""
        raise DataError(f"{empty[0]} lists no existing image{reason}")
    class_names = order_classes(distinct_names(label for lines in read.values() for _, label, _ in lines))
    return DataSet({name: file_source(path, read[file], class_names) for name, file in lists.items()}, findings)


def _located(root: Path, file: Path, row: LabelRow, findings: Findings) -> tuple[str, int] | None:
    """Return the path below `root` of the image of a row, and its size in bytes; None, and dropped, without a file."""
    name = os.path.normpath(row.id)
    if os.path.isabs(name) or name.startswith(".."):
        findings.drop(row.id, f"{file.name}, {row.where}: not below {root}")
        return None
    try:
        return name, (root / name).stat().st_size
    except OSError:
        findings.drop(row.id, f"{file.name}, {row.where}: no such file below {root}")
        return None
