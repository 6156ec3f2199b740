"""CSV files of paths and labels. Every rejected row is listed with its number; the header is row 1.

Ours and not a data frame library's, because an error must name its row.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar

from vitrail.data.item import DataSet, Findings, is_usual, split_word
from vitrail.data.labels.answers import KINDS, with_kind
from vitrail.data.labels.cells import MISSING, NO, YES, class_columns, marked, read_cells, unsplit
from vitrail.data.labels.sets import SEPARATOR
from vitrail.data.settings import Columns
from vitrail.data.sources.folder import FileSource, file_source
from vitrail.data.spreadsheet import LABEL_PREDICTIONS, PREDICTIONS, unescape_formula
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.files import regular_descriptor
from vitrail.words import from_text, listing, with_slashes

IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "file_name", "filepath", "image_path", "jpg", "pixels")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "class_name", "category", "target", "cls", "species")
TABLE_SUFFIXES = (".csv", ".tsv")
_SPLIT_COLUMNS = frozenset(
    ("split", "splits", "set", "subset", "fold", "partition", "is_valid", "is_val", "is_test", "is_train", "phase")
)
"""Names of columns that say in which split an image is, in lower case."""
P = TypeVar("P", bound=PurePath)


def find_column(names: Iterable[str], wanted: str | None, usual: tuple[str, ...], what: str, where: str) -> str:
    """Return the column called `wanted`, or the first column with a `usual` name, in upper or lower case.

    Raises UsageError if there is no column `wanted`, and DataError if no column has a usual name.
    """
    names = list(names)
    if wanted is not None:
        if wanted in names:
            return wanted
        kinds = f" Kinds of an answer, behind a colon, are {', '.join(KINDS)}." * (what == "answer" and ":" in wanted)
        raise UsageError(
            f"{where} has no column {wanted!r}; its columns are {', '.join(names)}.{kinds}{did_you_mean(wanted, names)}"
        )
    by_key = {name.strip().lower(): name for name in reversed(names)}
    for key in usual:
        if key in by_key:
            return by_key[key]
    raise DataError(
        f"{where} has no {what} column: its columns are {', '.join(names)}; usual names are {', '.join(usual)} "
        f"(or name the column in data.{what}_column)"
    )


def group_by_split(files: Sequence[P]) -> dict[str, list[P]]:
    """Sort files into splits by name, or by the name of the folder each is in."""
    groups: dict[str, list[P]] = {}
    folders = {file.parent for file in files}
    for file in files:
        parent = file.parent.name
        # the only folder is the one that the user gave, whose name says less about the files in it
        name = split_word(file.stem) or (split_word(parent) if len(folders) > 1 or is_usual(parent) else "")
        groups.setdefault(name, []).append(file)
    return groups


class CsvTable(NamedTuple):
    """The rows of a CSV, as far as they are used. All lists have an entry for each row."""

    file: Path
    rows: list[str]
    """Name of each row, for messages."""
    paths: list[str]
    labels: list[str | tuple[str, ...]]
    """A cell, or the names of the classes whose column holds a 1."""
    splits: list[str]
    groups: list[str | None]
    """Cells of the column `Data.group`; None without this column."""
    classes: tuple[str, ...]
    """Columns that are classes; empty if there is a column of labels."""
    predictions: bool
    """Whether `vitrail predict` wrote it for a network that predicts several labels."""


def read_tables(path: Path, files: list[Path], columns: Columns) -> DataSet:
    """Open CSV files; several are splits by name, one may have a column "split". Raises DataError,
    UsageError."""
    findings = Findings("csv")
    groups = group_by_split(files) if len(files) > 1 else {"": files}
    for name, group in groups.items():
        if len(group) > 1 or (not name and len(files) > 1):
            raise DataError(
                f"{path} holds several tables, not one per split: {', '.join(f.name for f in group)}. Choose one"
            )
    tables = {name: read_table(group[0], columns, findings) for name, group in groups.items()}
    found = DataSet({}, findings)
    for (name, table), labels in zip(tables.items(), _labels(list(tables.values()), columns, findings), strict=True):
        # of several tables each is a split, whatever a column in it says
        splits = table.splits if len(files) == 1 else [""] * len(table.rows)
        if len(files) > 1 and len({*table.splits}) > 1:
            findings.warnings.append(f"column 'split' of {table.file.name} is not used: each of the tables is a split")
        records = zip(table.rows, table.paths, labels, splits, table.groups, strict=True)
        read = read_records(records, str(table.file), table.file.parent, findings, table.classes)
        for split, source in read.items():
            found.splits[name if len(files) > 1 else split] = source
    return found


def _labels(tables: list[CsvTable], columns: Columns, findings: Findings) -> Iterator[list[str | tuple[str, ...]]]:
    """Yield the labels of each table: those in cells are read alike in all tables of a data set."""
    if columns.answers is not None:  # read by `vitrail.data.labels.answers`
        yield from (table.labels for table in tables)
        return
    if columns.per_image not in ("one", "numbers") and any(table.predictions for table in tables):
        columns = columns._replace(separator=columns.separator or SEPARATOR)
    cells = [label for table in tables for label in table.labels if isinstance(label, str)]
    places = [(table, row) for table in tables if not table.classes for row in table.rows]
    read = read_cells(cells, columns, lambda cell: f"{places[cell][0].file}, {places[cell][1]}")
    findings.warnings += unsplit(read, columns)
    remaining = iter(read)
    for table in tables:
        yield [next(remaining) if isinstance(label, str) else label for label in table.labels]


def read_table(
    file: Path, columns: Columns, findings: Findings, image_columns: tuple[str, ...] = IMAGE_COLUMNS
) -> CsvTable:
    """Return the rows of a CSV. Raises DataError for a file that is not such a table.

    image_columns: Usual names of the column that names the images.

    Names stand as they are, but in the CSV of `vitrail predict` as a spreadsheet shows them.
    """
    header, rows = read_rows(file)
    lowered = [name.strip().lower() for name in header]
    image = header.index(find_column(header, columns.image, image_columns, "image", str(file)))
    split = lowered.index("split") if "split" in lowered else None
    others = {name: place for place, name in enumerate(header) if place not in (image, split)}
    holds = {name: partial(_holds_marks, rows, place) for name, place in others.items()}
    answers = [find_column(header, name, (), "answer", str(file)) for name, _ in map(with_kind, columns.answers or ())]
    labels, are_classes = (tuple(answers), False) if answers else label_columns(header, columns, str(file), holds)
    named = columns.group_column
    group = None if named is None else header.index(find_column(header, named, (), "group", str(file)))
    used = {header[place] for place in (image, split, group) if place is not None} | {*labels}
    unused_columns(header, used, file.name, findings)
    predictions = any(tuple(header[: len(names)]) == names for names in (PREDICTIONS, LABEL_PREDICTIONS))
    text = unescape_formula if predictions else str
    predicted = tuple(header[: len(LABEL_PREDICTIONS)]) == LABEL_PREDICTIONS
    numbers = columns.per_image == "numbers"
    table = CsvTable(file, [], [], [], [], [], labels if are_classes and not numbers else (), predicted)
    places = [header.index(name) for name in labels]
    for number, row in rows:
        where = f"row {number}"
        if answers and all(_cell(row, place).lower() in MISSING for place in places):
            findings.drop(text(_cell(row, image)), f"{where}: no cell of {listing(answers)} is filled")
            continue
        table.rows.append(where)
        table.paths.append(text(_cell(row, image)))
        table.splits.append("" if split is None else _cell(row, split))
        table.groups.append(None if group is None else _cell(row, group))
        if are_classes:
            if len(row) != len(header):
                raise DataError(
                    f"{file}, {where}: {len(row)} cells, and the header has {len(header)}. Add or remove cells"
                )
            cells = [row[place] for place in places]
            if not numbers:
                table.labels.append(marked(cells, labels, f"{file}, {where}"))
            else:  # a row that lacks a number has no label
                lacks = any(cell.strip().lower() in MISSING for cell in cells)
                table.labels.append("" if lacks else SEPARATOR.join(cells))
        elif answers:
            table.labels.append(json.dumps([_cell(row, place) for place in places]))
        else:
            cell = text(_cell(row, places[0]))
            table.labels.append(from_text(cell) if predictions else cell)
    if are_classes:
        kind = "target" if numbers else "class"
        findings.notes.append(f"each of the {len(labels)} columns {listing(labels)} is a {kind} ({file.name})")
    return table


def unused_columns(names: Iterable[str], used: Iterable[str | None], where: str, findings: Findings) -> None:
    """List the columns of a table that are not used, with a warning for those that may say the split of an image."""
    used = {*used}
    for name in names:
        if name in used:
            continue
        findings.ignore(f"column of {where} that is not used", name)
        if name.strip().lower() in _SPLIT_COLUMNS:
            findings.warnings.append(
                f"column {name!r} of {where} is not used, and its name says that it divides the images into splits. "
                "Splits are read from a column 'split' of a .csv file, with values such as train, val and test"
            )


def _cell(row: list[str], place: int) -> str:
    """Return a cell of a row, which may be shorter than the header."""
    return row[place].strip() if place < len(row) else ""


def read_rows(file: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header of a CSV and (number, cells) of each row that is not empty. Raises DataError."""
    try:
        with open(regular_descriptor(file), newline="", encoding="utf-8-sig") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(",;\t", key=first.count) if file.suffix.lower() == ".csv" else "\t"
            reader = csv.reader(stream, delimiter=delimiter)
            return next(reader, []), [(number, row) for number, row in enumerate(reader, start=2) if any(row)]
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{file} is not a readable CSV: {error}") from error


def label_columns(
    names: Sequence[str], columns: Columns, where: str, holds: Mapping[str, Callable[[], bool]]
) -> tuple[tuple[str, ...], bool]:
    """Return the column of labels, or the columns that are classes, and whether they are classes.

    names: All columns. holds: The columns that may be classes, as for `class_columns`. Raises UsageError for a column
    that does not exist, and for both settings, and DataError if there is no column of labels.
    """
    if columns.label is not None and columns.classes:
        raise UsageError(
            f"data.label_column is {columns.label!r} and data.label_columns is {listing(columns.classes)}: each says "
            "where the labels are. Name one column in the first, or several in the second; data.answers names columns "
            "of different kinds"
        )
    if not columns.classes:
        try:
            return (find_column(names, columns.label, LABEL_COLUMNS, "label", where),), False
        except DataError as error:
            missing = error
    if classes := class_columns(holds, columns.classes, where):
        return classes, True
    raise missing


def _holds_marks(rows: list[tuple[int, list[str]]], place: int) -> bool:
    cells = {_cell(row, place).lower() for _, row in rows}
    return cells <= YES | NO and not cells.isdisjoint(YES)


def read_records(
    records: Iterable[tuple[str, str, str | Sequence[str], str, str | None]],
    where: str,
    root: Path,
    findings: Findings,
    class_names: Sequence[str] | None = None,
) -> dict[str, FileSource]:
    """Return split -> source of (row, path, label, split, group) records; paths are relative to `root`.

    A row is dropped, with its number, if its file is missing or was listed in an earlier row. A label is a name, or the
    names of a set. Raises DataError for a row without a name, and for a table without any usable row.
    """
    seen: dict[str, str] = {}
    rows: dict[str, list[tuple[str, str | Sequence[str], int]]] = {}
    groups: dict[str, list[str | None]] = {}
    for row, name, label, split, group in records:
        if isinstance(label, str) and label.lower() in MISSING:
            raise DataError(
                f"{where}, {row}: no label for {name!r} (found {label!r}). Give it a label or remove the row. If "
                "images have several labels or none, set data.labels_per_image to 'several', and "
                "data.label_separator to the text between labels. If columns are answers, some of which an image may "
                "lack, name them in data.answers"
            )
        file, size = _located(root, name)
        if size is None:
            findings.drop(name, f"{row}: no such file below {root}")
        elif file in seen:
            findings.drop(name, f"{row}: listed before, in {seen[file]}")
        else:
            seen[file] = row
            if leaves(root, file):
                findings.lies_outside(name)
            rows.setdefault(split, []).append((file, label, size))
            groups.setdefault(split, []).append(group)
    if not rows:
        dropped = findings.dropped
        reason = f"; the first: {dropped[0].id!r}, {dropped[0].reason}" if dropped else ""
        raise DataError(f"{where} lists no existing image ({len(dropped)} rows left out{reason})")
    found = {split: file_source(root, entries, class_names or None) for split, entries in rows.items()}
    for split, source in found.items():
        source.groups = [group for group in groups[split] if group is not None] or None
    return found


def _located(root: Path, name: str) -> tuple[str, int | None]:
    """Return (name relative to the root, size or None if there is no such file)."""
    for candidate in (name, from_text(name), name.replace("\\", "/")):
        path = root / candidate
        if candidate and path.is_file():
            return with_slashes(os.path.normpath(candidate)), path.stat().st_size
    return name, None


def leaves(root: Path, path: str) -> bool:
    """Return whether a path in a table leads out of the folder `root` that it is relative to, by itself or by links."""
    folder, name = os.path.split(os.path.join(os.path.abspath(root), path))
    real = os.path.join(_real_folder(folder), name)
    real = os.path.realpath(real) if os.path.islink(real) else real
    return not real.startswith(os.path.join(_real_folder(os.path.abspath(root)), ""))


@lru_cache(10_000)
def _real_folder(folder: str) -> str:
    """Return a folder without links. Tables name the same folders in many rows."""
    return os.path.realpath(folder)
