"""Several columns of a CSV as several answers for each image (`Data.answers`): the kind of each column, and its labels.

A row's cells arrive as one label, a JSON list, so that every reader and index carries them. They become `Answers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from vitrail.data.item import IndexedSource
from vitrail.data.labels.cells import MISSING, read_cells
from vitrail.data.labels.numbers import Numbers, parse_numbers
from vitrail.data.labels.sets import BETWEEN, Answers, Named, as_sets, named, names_of_text
from vitrail.data.settings import Columns, PerImage
from vitrail.errors import DataError, UsageError
from vitrail.words import listing, shown

KINDS = ("classes", "labels", "numbers")
"""Kinds of a column, as its name may end after a colon: those of `vitrail.tasks.catalog`."""
WHOLE = 20
"""Number of different whole numbers up to which a column of them holds the names of classes."""
MOST = 100
"""Maximum number of answers."""


def with_kind(text: str) -> tuple[str, str | None]:
    """Return the name of a column and its kind, None if it is not given: "weight_g:numbers"."""
    name, _, kind = text.rpartition(":")
    return (name, kind) if name and kind in KINDS else (text, None)


def read_answers(path: str, splits: Mapping[str, IndexedSource], columns: Columns) -> dict[str, IndexedSource]:
    """Return splits whose labels are lists of cells with labels of each column; a single column has these alone.

    Raises UsageError for names that do not work, and DataError for data that are no CSV, and for cells of another kind
    than that of their column, or of classes that cannot be told apart.
    """
    asked = dict(map(with_kind, columns.answers or ()))
    _check(asked, columns)
    names = {split: _rows(path, source, len(asked)) for split, source in splits.items()}
    found: dict[str, dict[str, Named]] = {split: {} for split in splits}
    for place, (name, kind) in enumerate(asked.items()):
        cells = {split: [row[place] for row in rows] for split, rows in names.items()}
        filled = sorted({cell for each in cells.values() for cell in each if _filled(cell)})
        found_kind, read = _kind(kind, filled, columns)
        for split, each in cells.items():
            found[split][name] = _read(path, splits[split], name, found_kind, each, read)
    changed: dict[str, IndexedSource] = {}
    for split, source in splits.items():
        if isinstance(source.labels, Answers):
            changed[split] = source
            continue
        answers = Answers(found[split])[source.labels]  # type: ignore[index]  # int64, one row for each label
        relabelled: Any = copy(source)
        only = next(iter(answers.parts.values()))
        relabelled.labels, relabelled.class_names = only if len(asked) == 1 else (answers, answers.class_names)
        changed[split] = relabelled
    return changed


def _check(asked: Mapping[str, object], columns: Columns) -> None:
    """Raise UsageError for settings that do not go with answers, and for their names."""
    given = {"data.label_column": columns.label, "data.label_columns": columns.classes}
    given |= {"data.labels_per_image": None if columns.per_image in ("auto", "numbers") else columns.per_image}
    given |= {"data.label_from": columns.label_from}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"data.answers names all columns that are labels: leave out {listing(wrong, quoted=False)}")
    if not 0 < len(asked) <= MOST or len(asked) < len(columns.answers or ()):
        raise UsageError(
            f"data.answers names {len(columns.answers or ())} columns, {len(asked)} of them different; valid are 1 to "
            f"{MOST}, each once"
        )
    if wrong := [name for name in asked if BETWEEN in name or not name.strip()]:
        raise UsageError(f"data.answers: {shown(wrong[0])} is no valid name of an answer. Rename the column")


def _rows(path: str, source: IndexedSource, count: int) -> list[list[str]]:
    """Return the cells of each label that occurs in a source. Raises DataError if its labels are no lists of cells."""
    if isinstance(source.labels, Answers):
        return []
    try:
        rows = [json.loads(name) for name in source.class_names]
        if isinstance(source.labels, np.ndarray) and all(isinstance(row, list) and len(row) == count for row in rows):
            return rows
    except ValueError:
        pass
    raise DataError(
        f"data.answers names columns of a CSV file that has a column of images, and {path} is none. Give such a file, "
        "or leave data.answers out"
    )


def _filled(cell: str) -> bool:
    return cell.strip().lower() not in MISSING


def _kind(kind: str | None, filled: Sequence[str], columns: Columns) -> tuple[str, dict[str, str | Sequence[str]]]:
    """Return the kind of a column with these cells, all different, and what each cell says; nothing of numbers.

    Numbers are told from classes that are called by numbers: one has a fraction, or there are many.
    """
    if kind is None and filled and all(map(_is_number, filled)):
        whole = all(float(cell).is_integer() for cell in filled)
        kind = "classes" if whole and len(filled) <= WHOLE else "numbers"
    if kind == "numbers":
        return kind, {}
    per_image: PerImage = "auto" if kind is None else "several" if kind == "labels" else "one"
    separator = None if kind == "classes" else columns.separator
    read = _names(filled, columns._replace(per_image=per_image, separator=separator))
    if kind is None:
        kind = "labels" if any(not isinstance(cell, str) for cell in read) else "classes"
    return kind, dict(zip(filled, read, strict=True))


def _names(filled: Sequence[str], columns: Columns) -> list[str | Sequence[str]]:
    if any(cell.startswith("\0") for cell in filled):  # sets as an index stores them
        return [names_of_text(cell) for cell in filled]
    return [*read_cells(filled, columns, lambda row: f"the cell {shown(filled[row])}")]


def _is_number(cell: str) -> bool:
    try:
        return len(parse_numbers(cell)) == 1
    except ValueError:
        return False


def _read(
    path: str, source: IndexedSource, name: str, kind: str, cells: list[str], read: Mapping[str, str | Sequence[str]]
) -> Named:
    """Return the labels that cells are, as they are `read`; an empty one is unknown.

    Raises DataError for a cell that is no number.
    """
    if kind == "numbers":
        if wrong := next((cell for cell in cells if _filled(cell) and not _is_number(cell)), None):
            where = source.id(int(np.flatnonzero(source.labels == cells.index(wrong))[0]))  # type: ignore[operator]
            raise DataError(
                f"{path}: the answer {name!r} of image {where!r} is {shown(wrong)}, and its column holds numbers. "
                f"Correct the cell, or leave it empty; for names of classes write {name}:classes in data.answers"
            )
        values = [parse_numbers(cell)[0] if _filled(cell) else np.nan for cell in cells]
        return Named(Numbers(np.array(values, dtype=np.float64).reshape(-1, 1)), [name])
    found = named([read.get(cell) for cell in cells])
    sets = kind == "labels" and isinstance(found.labels, np.ndarray)  # none of these images has any
    return Named(as_sets(found.labels, len(found.class_names)), found.class_names) if sets else found
