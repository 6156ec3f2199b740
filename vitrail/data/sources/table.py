"""CSV files of paths and labels. Every rejected row is listed with its number; the header is row 1.

Ours rather than a data frame's reader, because an error must name the row it stands in.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np
import pyarrow as pa

from vitrail.data.item import UNKNOWN, DataSet, Findings, order_classes, role_of
from vitrail.data.sources.folder import FileSource, named_file_source
from vitrail.errors import DataError, UsageError, did_you_mean

IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "file_name", "filepath", "image_path", "jpg", "pixels")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "class_name", "category", "target", "cls", "species")
SUFFIXES = (".csv", ".tsv")
P = TypeVar("P", bound=PurePath)
_MISSING = frozenset(("", "nan", "none", "null", "na", "n/a"))


def find_column(names: Iterable[str], wanted: str | None, usual: tuple[str, ...], what: str, where: str) -> str:
    """Return the column called `wanted`, or the first column with a `usual` name, in upper or lower case.

    Raises UsageError if there is no column `wanted`, and DataError if no column has a usual name.
    """
    names = list(names)
    if wanted is not None:
        if wanted in names:
            return wanted
        raise UsageError(
            f"{where} has no column {wanted!r}; its columns are {', '.join(names)}.{did_you_mean(wanted, names)}"
        )
    by_key = {name.strip().lower(): name for name in reversed(names)}
    for key in usual:
        if key in by_key:
            return by_key[key]
    raise DataError(
        f"{where} has no {what} column: its columns are {', '.join(names)}; usual names are {', '.join(usual)} "
        f"(or name the column in data.{what}_column)"
    )


def split_of(path: PurePath) -> str:
    """Return the split that a file name contains ("train-00000-of-00002" -> "train"), "" if none."""
    words = path.stem.lower().replace("-", ".").replace("_", ".").split(".")
    return next((word for word in words if role_of(word)), "")


def group_by_split(files: Sequence[P]) -> dict[str, list[P]]:
    """Sort files into splits by name, or by the name of the folder each is in."""
    groups: dict[str, list[P]] = {}
    for file in files:
        name = split_of(file) or (file.parent.name if role_of(file.parent.name) else "")
        groups.setdefault(name, []).append(file)
    return groups


def read_tables(
    path: Path, files: list[Path], image_column: str | None = None, label_column: str | None = None
) -> DataSet:
    """Open CSV files; several are splits by name, one may have a column "split". Raises DataError,
    UsageError."""
    findings = Findings("csv")
    if len(files) == 1:
        rows = Rows(files[0].parent, findings)
        splits = rows.read(_records(files[0], image_column, label_column), str(files[0]))
        return DataSet(dict(splits), findings)
    found = DataSet({}, findings)
    for name, group in group_by_split(files).items():
        if len(group) > 1 or not name:
            raise DataError(
                f"{path} holds several tables, not one per split: {', '.join(f.name for f in group)}. Choose one"
            )
        rows = Rows(group[0].parent, findings)
        for source in rows.read(_records(group[0], image_column, label_column), str(group[0])).values():
            found.splits[name] = source
    return found


def _records(file: Path, image_column: str | None, label_column: str | None) -> Iterator[tuple[str, str, str, str]]:
    """Yield (row, path, label, split) of a CSV. Raises DataError for a file that is not such a table."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(",;\t", key=first.count) if file.suffix.lower() == ".csv" else "\t"
            reader = csv.reader(stream, delimiter=delimiter)
            header = next(reader, [])
            image = header.index(find_column(header, image_column, IMAGE_COLUMNS, "image", str(file)))
            label = header.index(find_column(header, label_column, LABEL_COLUMNS, "label", str(file)))
            lowered = [name.strip().lower() for name in header]
            split = lowered.index("split") if "split" in lowered else None
            for number, row in enumerate(reader, start=2):
                if not any(row):
                    continue
                row += [""] * (len(header) - len(row))
                yield (
                    f"row {number}",
                    row[image].strip(),
                    row[label].strip(),
                    "" if split is None else row[split].strip(),
                )
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{file} is not a readable CSV: {error}") from error


class Rows:
    """Turns (row, path, label, split) records into one `FileSource` per split, checking every row."""

    def __init__(self, root: Path, findings: Findings) -> None:
        self._root = root
        self._findings = findings

    def read(self, records: Iterable[tuple[str, str, str, str]], where: str) -> dict[str, FileSource]:
        """Return split -> source. A row is dropped, with its number, if its file is missing or was listed in
        an earlier row. Raises DataError for a row without a label, and for a table without any usable row."""
        seen: dict[str, str] = {}
        rows: dict[str, list[tuple[str, str, int]]] = {}
        for row, name, label, split in records:
            if label.lower() in _MISSING:
                raise DataError(
                    f"{where}, {row}: no label for {name!r} (found {label!r}). Give it a label or remove the row"
                )
            file, size = self._locate(name)
            if size is None:
                self._findings.drop(name, f"{row}: no such file below {self._root}")
            elif file in seen:
                self._findings.drop(name, f"{row}: listed before, in {seen[file]}")
            else:
                seen[file] = row
                rows.setdefault(split, []).append((file, label, size))
        if not rows:
            dropped = self._findings.dropped
            reason = f"; the first: {dropped[0].id!r}, {dropped[0].reason}" if dropped else ""
            raise DataError(f"{where} lists no image that is there ({len(dropped)} rows left out{reason})")
        return {split: self._source(entries) for split, entries in rows.items()}

    def _locate(self, name: str) -> tuple[str, int | None]:
        """Return (name relative to the root, size or None if there is no such file)."""
        for candidate in (name, name.replace("\\", "/")):
            path = self._root / candidate
            if candidate and path.is_file():
                return os.path.normpath(candidate), path.stat().st_size
        return name, None

    def _source(self, entries: list[tuple[str, str, int]]) -> FileSource:
        return named_file_source(self._root, entries, order_classes({label for _, label, _ in entries}))


def encode_labels(values: pa.ChunkedArray, class_names: list[str] | None, where: str) -> tuple[np.ndarray, list[str]]:
    """Return (labels int64 [N], class names) of a column of integers or names.

    With `class_names` (a ClassLabel column) integers index them and -1 is UNKNOWN; otherwise the distinct
    values are the classes. Raises DataError with the row number for an empty label or one out of range."""
    if isinstance(values.type, pa.DictionaryType):
        values = values.cast(values.type.value_type)
    plain = values.to_numpy()
    if plain.dtype.kind == "f":  # how a column of integers with nulls arrives
        missing = np.flatnonzero(np.isnan(plain))
    else:
        missing = np.flatnonzero([value is None or value == "" for value in plain.tolist()])
    if missing.size:
        raise DataError(f"{where}, row {missing[0] + 1}: no label; {missing.size} rows lack one")
    if class_names is not None and pa.types.is_integer(values.type):
        labels = plain.astype(np.int64)
        outside = np.flatnonzero((labels < UNKNOWN) | (labels >= len(class_names)))
        if outside.size:
            row = outside[0]
            raise DataError(
                f"{where}, row {row + 1}: label {labels[row]} is not one of the {len(class_names)} classes "
                f"0..{len(class_names) - 1}"
            )
        return labels, class_names
    if not (
        pa.types.is_integer(values.type) or pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    ):
        raise DataError(f"{where}: labels of type {values.type}; valid are integers and names")
    distinct, inverse = np.unique(plain.astype(str), return_inverse=True)
    names = order_classes(set(distinct.tolist()))
    position = {name: index for index, name in enumerate(names)}
    return np.array([position[name] for name in distinct.tolist()], dtype=np.int64)[inverse], names
