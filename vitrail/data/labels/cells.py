"""Labels as tables write them: several names in a cell, a list in a cell, or one column for each class."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from vitrail.data.labels.sets import SEPARATOR, distinct_names
from vitrail.data.settings import Columns
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.words import is_class_name, listing, shown

SEPARATORS = (SEPARATOR, ";")
"""Separators that are found without being named. A comma is often part of a class name."""
MISSING = frozenset(("", "nan", "none", "null", "na", "n/a"))
"""Texts of a cell without a label, in lower case."""
YES, NO = frozenset(("1", "1.0", "true")), frozenset(("0", "0.0", "false", "", "nan"))
"""Texts, in lower case, of a cell in the column of a class."""

Where = Callable[[int], str]
"""Number of a row, from 0 -> its place, for messages."""


def read_cells(cells: Sequence[str], columns: Columns, where: Where) -> list[str | tuple[str, ...]]:
    """Return the labels of each cell: a name, or several names if cells hold sets of labels.

    Cells hold sets if `columns` name a separator, if all are lists ("['cat', 'dog']"), or if one of `SEPARATORS` splits
    them into fewer names than there are different cells. That is so for sets, because a label occurs in many cells,
    but not for names that contain the character, such as a taxonomy "Animalia|Chordata". A separator is not looked for
    if each image has one label by `columns`. If it has several by `columns`, a cell may be empty. Cells of numbers are
    returned as they are. Raises DataError for a list that cannot be read, with its row.
    """
    if columns.per_image == "numbers":
        return list(cells)
    distinct = {cell.strip() for cell in set(cells)} - {""}
    filled = {cell for cell in distinct if cell.lower() not in MISSING}
    if filled and all(cell.startswith("[") and cell.endswith("]") for cell in filled):
        return [_list(cell, row, where) for row, cell in enumerate(cells)]
    separator = columns.separator or None
    if separator is None and columns.per_image != "one":
        separator = next((one for one in SEPARATORS if _splits(filled, one)), None)
    if separator is None and columns.per_image == "several":
        return [() if cell.strip().lower() in MISSING else (cell,) for cell in cells]
    if separator is None:
        return list(cells)
    parts = {cell: _parts(cell, separator) for cell in {*cells}}
    return [parts[cell] for cell in cells]


def _parts(cell: str, separator: str) -> tuple[str, ...]:
    names = (name.strip() for name in cell.split(separator))
    return tuple(name for name in names if name.lower() not in MISSING)


def _splits(cells: set[str], separator: str) -> bool:
    """Return whether cells are sets of labels with this separator (see `read_cells`)."""
    if not any(separator in cell for cell in cells):
        return False
    sets = [_parts(cell, separator) for cell in cells]
    return all(sets) and len({name for names in sets for name in names}) < len(cells)


def unsplit(cells: Iterable[str | tuple[str, ...]], columns: Columns) -> Iterator[str]:
    """Yield a warning if names of classes contain a separator that does not split them into sets. Numbers are no names.

    A comma is part of many names, so it counts only if it splits them into fewer names than there are cells.
    """
    if columns.per_image == "numbers":
        return
    names = distinct_names(set(cells)) - {""}
    inside = next((one for one in SEPARATORS if any(one in name for name in names)), None)
    inside = inside or ("," if _splits(names, ",") else None)
    if columns.separator is None and inside:
        yield (
            f"names of classes contain {inside!r}. If it stands between the labels of an image, set "
            f"data.label_separator to {inside!r}"
        )


def _list(cell: str, row: int, where: Where) -> tuple[str, ...]:
    if cell.strip().lower() in MISSING:
        return ()
    for read in (json.loads, ast.literal_eval):
        try:
            return names_in(read(cell), where(row))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise DataError(f'{where(row)}: the list of labels {shown(cell)} cannot be read. Write ["cat", "dog"]')


def names_in(value: object, where: str) -> tuple[str, ...]:
    """Return the names in a list of labels; whole numbers are names, too. Raises DataError for anything else."""
    if not isinstance(value, list | tuple):
        raise DataError(f'{where}: {shown(value)} is not a list of labels. Write ["cat", "dog"]')
    for one in value:
        if isinstance(one, bool) or not isinstance(one, str | int) or one == "" or not is_class_name(str(one)):
            raise DataError(
                f"{where}: a label in the list {shown(value)} is {shown(one)}; valid are names and whole numbers"
            )
    return tuple(str(one) for one in value)


def class_columns(
    columns: Mapping[str, Callable[[], bool]], wanted: tuple[str, ...] | None, where: str
) -> tuple[str, ...]:
    """Return the columns of a table that are classes: `wanted`, or all of two or more that hold zeros and ones.

    columns: Name -> function that tells whether the column holds nothing but zeros and ones, and at least one 1.
    Raises UsageError for a wanted column that does not exist.
    """
    for name in wanted or ():
        if name not in columns:
            raise UsageError(
                f"{where} has no column {name!r}; its columns are {listing(list(columns), quoted=False)}."
                f"{did_you_mean(name, columns)}"
            )
    if wanted:
        return wanted
    found = tuple(name for name, holds_marks in columns.items() if holds_marks())
    return found if len(found) > 1 else ()


def marked(cells: Sequence[str], names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the classes with a 1 in a row. Raises DataError for a cell that is neither 0 nor 1."""
    for cell, name in zip(cells, names, strict=True):
        if cell.strip().lower() not in YES and cell.strip().lower() not in NO:
            raise DataError(
                f"{where}: {shown(cell)} in the column of class {name!r}; valid are 1 for an image of the class and 0 "
                "for another. If this column is no class, name the columns of classes in data.label_columns"
            )
    return tuple(name for cell, name in zip(cells, names, strict=True) if cell.strip().lower() in YES)
