"""Labels in Arrow columns: one class or a list of classes in each row, or one column for each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.arrow_package import pa, pc
from vitrail.data.item import Findings
from vitrail.data.labels.cells import class_columns, read_cells, unsplit
from vitrail.data.labels.numbers import Numbers, target_names
from vitrail.data.labels.sets import LabelSets, Named, named, order_classes
from vitrail.data.settings import Columns
from vitrail.data.sources.table import LABEL_COLUMNS, encode_labels, find_column
from vitrail.errors import DataError
from vitrail.words import listing


class LabelColumns(NamedTuple):
    """The columns that hold the labels of one split."""

    where: str
    columns: dict[str, pa.ChunkedArray]
    """A column of labels, or several columns of zeros and ones."""
    class_names: list[str] | None
    """Names of the classes that the whole numbers of a column stand for, if it has some."""


def label_columns(
    schema: pa.Schema, image: str, columns: Columns, where: str, column: Callable[[str], pa.ChunkedArray]
) -> tuple[str, ...]:
    """Return the name of the column of labels, or those of the columns that are classes; `column` reads a column.

    Raises UsageError for a column that does not exist, and DataError if there is no column of labels.
    """
    if not columns.classes:
        try:
            return (find_column(schema.names, columns.label, LABEL_COLUMNS, "label", where),)
        except DataError as error:
            missing = error
    holds = {
        name: partial(_holds_marks, schema.field(name).type, partial(column, name))
        for name in schema.names
        if name != image
    }
    if classes := class_columns(holds, columns.classes, where):
        return classes
    raise missing


def _holds_marks(kind: pa.DataType, column: Callable[[], pa.ChunkedArray]) -> bool:
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return False
    values = set(pc.unique(column()).to_pylist()) - {None}
    return values <= {0, 1} and 1 in values


def read_labels(splits: Sequence[LabelColumns], columns: Columns, findings: Findings) -> list[Named]:
    """Return the labels of each split, read alike in all of them. Raises DataError, with the row, for a bad label."""
    first = splits[0]
    if columns.per_image == "numbers" and all(map(_holds_numbers, splits)):
        return [_numbers(split) for split in splits]
    if columns.classes or len(first.columns) > 1:
        findings.warnings.append(f"each of the {len(first.columns)} columns {listing(list(first.columns))} is a class")
        return [_of_classes(split) for split in splits]
    if all(_is_list(_only(split).type) for split in splits):
        lists = [_List.of(split) for split in splits]
        marks = all(one.may_be_marks for one in lists) and any(one.lengths.max(initial=0) > 2 for one in lists)
        return [one.from_marks(lists[0]) if marks else one.from_classes() for one in lists]
    texts = [split for split in splits if split.class_names is None and _is_text(_only(split).type)]
    found = _from_texts(texts, columns, findings) if len(texts) == len(splits) else None
    return found or [Named(*encode_labels(_only(split), split.class_names, split.where)) for split in splits]


def _only(split: LabelColumns) -> pa.ChunkedArray:
    """Return the single column of labels; a dictionary becomes its values."""
    (column,) = split.columns.values()
    return column.cast(column.type.value_type) if isinstance(column.type, pa.DictionaryType) else column


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _holds_numbers(split: LabelColumns) -> bool:
    """Return whether all columns hold numbers, or one holds lists of them; texts are read as those of a CSV are."""
    kinds = [column.type for column in split.columns.values()]
    if len(kinds) == 1 and _is_list(kinds[0]):
        kinds = [kinds[0].value_type]
    if len(kinds) > 1 and not all(map(_is_number, kinds)):
        raise DataError(f"{split.where}: the columns {listing(list(split.columns))} hold {listing(kinds)}, not numbers")
    return split.class_names is None and all(map(_is_number, kinds))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _numbers(split: LabelColumns) -> Named:
    """Return the labels of columns of numbers, or of one column of lists of equal length."""
    found = []
    for column in split.columns.values():
        if _is_list(column.type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            if (ragged := np.flatnonzero((lengths != lengths[0]) | (lengths == 0))).size:
                raise DataError(
                    f"{split.where}, row {ragged[0] + 1}: {lengths[ragged[0]]} numbers, and the first row has "
                    f"{lengths[0]}. Every image needs equally many, and at least one"
                )
            column = pa.chunked_array([pc.list_flatten(chunk) for chunk in column.chunks], column.type.value_type)
        found.append(np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64))
    values = (
        np.stack(found, axis=1) if len(found) > 1 else found[0].reshape(len(next(iter(split.columns.values()))), -1)
    )
    if (missing := np.flatnonzero(~np.isfinite(values).all(axis=1))).size:
        raise DataError(
            f"{split.where}, row {missing[0] + 1}: no finite number; {missing.size} rows lack one. Give each image its "
            "numbers, or remove the row"
        )
    names = list(split.columns)
    one = names[0] if len(names) == 1 else None
    return Named(Numbers(values), target_names(values.shape[1], one, tuple(names) if one is None else None))


def _of_classes(split: LabelColumns) -> Named:
    """Return the labels of columns of zeros and ones; an empty cell is a zero."""
    marks = []
    for name, column in split.columns.items():
        kind = column.type
        if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{split.where}: the column of class {name!r} holds {kind}; valid are 0 and 1")
        values = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy()
        if (wrong := np.flatnonzero(~np.isin(values, (0.0, 1.0)))).size:
            raise DataError(
                f"{split.where}, row {wrong[0] + 1}: {values[wrong[0]]:g} in the column of class {name!r}; valid are 1 "
                "for an image of the class and 0 for another. If this column is no class, name the columns of classes "
                "in data.label_columns"
            )
        marks.append(values == 1)
    return Named(LabelSets.of_marks(np.stack(marks, axis=1)), list(split.columns))


def _from_texts(splits: Sequence[LabelColumns], columns: Columns, findings: Findings) -> list[Named] | None:
    """Return sets of labels that are written as text; None if the texts are names of classes."""
    distinct = pc.unique(pa.chunked_array([c for split in splits for c in _only(split).chunks])).to_pylist()
    cells = [cell or "" for cell in distinct]
    read = read_cells(cells, columns, lambda index: _place(splits, distinct[index]))
    findings.warnings += unsplit(read, columns)
    if all(isinstance(cell, str) for cell in read):
        return None
    names = dict(zip(distinct, read, strict=True))
    return [named([names[cell] for cell in _only(split).to_pylist()]) for split in splits]


def _place(splits: Sequence[LabelColumns], cell: str) -> str:
    """Return the place of the first row with this text."""
    for split in splits:
        if (row := pc.index(_only(split), cell).as_py()) >= 0:
            return f"{split.where}, row {row + 1}"
    raise KeyError(cell)


class _List(NamedTuple):
    """A column of lists: the values of all rows in sequence. A null is an empty list."""

    split: LabelColumns
    lengths: np.ndarray
    """int64 [N]: number of values in each row."""
    values: Any
    """Arrow array of all values."""

    @classmethod
    def of(cls, split: LabelColumns) -> _List:
        """Read a column. Raises DataError, with the row, for lists in lists and for values that are missing."""
        column = _only(split)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        values = pa.chunked_array([pc.list_flatten(chunk) for chunk in column.chunks], column.type.value_type)
        found = cls(split, lengths, values.combine_chunks())
        kind = values.type
        valid = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or _is_text(kind) or pa.types.is_null(kind)
        if not (valid or (pa.types.is_floating(kind) and found.may_be_marks)):
            raise DataError(f"{split.where}: labels are lists of {kind}; valid are lists of names and of whole numbers")
        if values.null_count:
            row = found.rows[int(np.flatnonzero(values.is_null().to_numpy())[0])]
            raise DataError(f"{split.where}, row {row + 1}: a label in the list is missing. Remove it or name it")
        return found

    @property
    def rows(self) -> np.ndarray:
        """int64: the row of each value."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def may_be_marks(self) -> bool:
        """Whether the lists may have a zero or a one for each class: names of classes would not be repeated."""
        kind = self.values.type
        if self.split.class_names is not None or _is_text(kind) or pa.types.is_nested(kind) or pa.types.is_null(kind):
            return False
        return set(pc.unique(self.values).to_pylist()) <= {0, 1}

    def from_marks(self, first: _List) -> Named:
        """Return the labels of lists of zeros and ones. Raises DataError for a list of another length."""
        width = int(first.lengths[0])
        if (ragged := np.flatnonzero(self.lengths != width)).size:
            raise DataError(
                f"{self.split.where}, row {ragged[0] + 1}: {self.lengths[ragged[0]]} values, and the first row has "
                f"{width}. Lists of zeros and ones need one value for each class in every row"
            )
        marks = np.asarray(self.values.cast(pa.float64()).to_numpy(zero_copy_only=False)).reshape(-1, width) == 1
        return Named(LabelSets.of_marks(marks), [str(number) for number in range(width)])

    def from_classes(self) -> Named:
        """Return the labels of lists of names or of whole numbers. Raises DataError for a number without a name."""
        values, names = self.values, self.split.class_names
        if names is not None and pa.types.is_integer(values.type):
            numbers = values.to_numpy(zero_copy_only=False)
            if (outside := np.flatnonzero((numbers < 0) | (numbers >= len(names)))).size:
                raise DataError(
                    f"{self.split.where}, row {self.rows[outside[0]] + 1}: label {numbers[outside[0]]} is not one of "
                    f"the {len(names)} classes 0..{len(names) - 1}"
                )
        else:
            encoded = values.cast(pa.string()).dictionary_encode()
            names = order_classes(set(encoded.dictionary.to_pylist()))
            position = {name: index for index, name in enumerate(names)}
            table = np.array([position[name] for name in encoded.dictionary.to_pylist()], dtype=np.int64)
            numbers = table[encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)]
        return Named(LabelSets.of_pairs(self.rows, numbers, len(self.lengths), len(names)), list(names))
