"""Parquet files and data sets of the Hugging Face hub: rows of image bytes and a label, read through a memory map.

Parquet cannot be read row by row (CIFAR-100's 25,000 images are one row group). So its rows are copied once, unchanged,
to an Arrow file in the cache folder. Hub data sets are opened by name or from a folder, through `datasets`.

Labels are one class or a list of classes in each row, or one column for each class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.cache import cached_table, pa, pc, pq, valid
from vitrail.data.item import UNKNOWN, DataSet, Findings, IndexedSource, Reader
from vitrail.data.labels.cells import read_cells, unsplit
from vitrail.data.labels.numbers import Numbers, target_names
from vitrail.data.labels.sets import Labels, LabelSets, Named, label_names, label_text, named, order_classes
from vitrail.data.settings import Columns
from vitrail.data.sources.folder import read_file
from vitrail.data.sources.table import (
    IMAGE_COLUMNS,
    find_column,
    group_by_split,
    label_columns,
    leaves,
    read_records,
    unused_columns,
)
from vitrail.errors import DataError, DecodeError
from vitrail.files import open_regular, state_of
from vitrail.words import is_class_name, listing


class LabelColumns(NamedTuple):
    """The columns that hold the labels of one split."""

    where: str
    columns: dict[str, pa.ChunkedArray]
    """A column of labels, or several columns of zeros and ones."""
    class_names: list[str] | None
    """Names of the classes that the whole numbers of a column stand for, if it has some."""


def _label_names(
    schema: pa.Schema, image: str, columns: Columns, where: str, column: Callable[[str], pa.ChunkedArray]
) -> tuple[str, ...]:
    """Return the names that `label_columns` returns for columns other than `image`; `column` reads one of them."""

    def holds_marks(name: str) -> bool:
        values = set(pc.unique(column(name)).to_pylist()) - {None} if _may_be_mark(schema.field(name).type) else set()
        return values <= {0, 1} and 1 in values

    holds = {name: partial(holds_marks, name) for name in schema.names if name != image}
    return label_columns(schema.names, columns, where, holds)[0]


def _may_be_mark(kind: pa.DataType) -> bool:
    """Return whether zeros and ones may have this type."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def read_labels(splits: Sequence[LabelColumns], columns: Columns, findings: Findings) -> list[Named]:
    """Return the labels of each split, read alike in all of them. Raises DataError, with the row, for a bad label."""
    first = splits[0]
    if columns.per_image == "numbers" and all(map(_holds_numbers, splits)):
        return [_numbers(split) for split in splits]
    if columns.classes or len(first.columns) > 1:
        findings.notes.append(f"each of the {len(first.columns)} columns {listing(list(first.columns))} is a class")
        return [_of_classes(split) for split in splits]
    if all(_is_list(_only(split).type) for split in splits):
        lists = [_List.of(split) for split in splits]
        marks = all(one.may_be_marks for one in lists) and any(one.lengths.max(initial=0) > 2 for one in lists)
        return [one.from_marks(lists[0]) if marks else one.from_classes() for one in lists]
    texts = all(split.class_names is None and _is_text(_only(split).type) for split in splits)
    found = _from_texts(splits, columns, findings) if texts else None
    return found or [encode_labels(_only(split), split.class_names, split.where) for split in splits]


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
    found, width = [], 1
    for column in split.columns.values():
        if _is_list(column.type):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            if (ragged := np.flatnonzero((lengths != lengths[0]) | (lengths == 0))).size:
                raise DataError(
                    f"{split.where}, row {ragged[0] + 1}: {lengths[ragged[0]]} numbers, and the first row has "
                    f"{lengths[0]}. Every image needs equally many, and at least one"
                )
            width = int(lengths[0])
            column = pa.chunked_array([pc.list_flatten(chunk) for chunk in column.chunks], column.type.value_type)
        found.append(np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64).reshape(-1, width))
    values = np.concatenate(found, axis=1)
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
        if not _may_be_mark(column.type):
            raise DataError(f"{split.where}: the column of class {name!r} holds {column.type}; valid are 0 and 1")
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
    places = ((split.where, pc.index(_only(split), cell).as_py()) for split in splits)
    return next(f"{where}, row {row + 1}" for where, row in places if row >= 0)


def encode_labels(values: pa.ChunkedArray, class_names: list[str] | None, where: str) -> Named:
    """Return the labels of a column of integers or names.

    With `class_names` (a ClassLabel column) integers index them and -1 is UNKNOWN; otherwise the distinct
    values are the classes. Raises DataError with the row number for an empty label or one out of range."""
    kind = values.type
    valid = pa.types.is_integer(kind) or _is_text(kind)
    wrong_type = DataError(f"{where}: labels of type {kind}; valid are integers and names")
    # floats may be integers with nulls, and a column of nulls lacks every label: that is said below
    if not (valid or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise wrong_type
    array = values.to_numpy()
    if array.dtype.kind == "f":  # the type of a column of integers with nulls
        missing = np.flatnonzero(np.isnan(array))
    else:
        missing = np.flatnonzero([value is None or value == "" for value in array.tolist()])
    if missing.size:
        raise DataError(f"{where}, row {missing[0] + 1}: no label; {missing.size} rows lack one")
    if not valid and len(array):
        raise wrong_type
    if class_names is None or not pa.types.is_integer(kind):
        return Named(*_numbered(values))
    labels = array.astype(np.int64)
    _require_classes(labels, np.arange(len(labels)), class_names, where, least=UNKNOWN)
    return Named(labels, class_names)


def _numbered(values: Any) -> tuple[np.ndarray, list[str]]:
    """Return the number of each value's class, int64 [N], and the classes: the values of an Arrow array as texts."""
    texts = values.cast(pa.string())
    names = order_classes(set(pc.unique(texts).to_pylist()))
    return pc.index_in(texts, value_set=pa.array(names, pa.string())).to_numpy().astype(np.int64), names


def _require_classes(
    labels: np.ndarray, rows: np.ndarray, class_names: list[str], where: str, *, least: int = 0
) -> None:
    """Raise DataError, with its row, for the first label that is no number of a class."""
    if (outside := np.flatnonzero((labels < least) | (labels >= len(class_names)))).size:
        raise DataError(
            f"{where}, row {rows[outside[0]] + 1}: label {labels[outside[0]]} is not one of the {len(class_names)} "
            f"classes 0..{len(class_names) - 1}"
        )


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
            _require_classes(numbers, self.rows, names, self.split.where)
        else:
            numbers, names = _numbered(values)
        return Named(LabelSets.of_pairs(self.rows, numbers, len(self.lengths), len(names)), list(names))


_ROWS = 512  # rows copied at a time: the most of a data set that is in memory


class ArrowSource(Reader):
    """Images in the rows of Arrow columns; only the row asked for is copied into memory."""

    def __init__(
        self,
        name: str,
        images: pa.ChunkedArray,
        paths: pa.ChunkedArray | pa.Array,
        labels: Labels,
        class_names: list[str],
        root: Path,
        files: Sequence[Path],
    ) -> None:
        lengths = pc.fill_null(pc.binary_length(images), 0)
        super().__init__(labels, lengths.to_numpy().astype(np.int64), class_names, name)
        self._images = images
        self._paths = paths
        self._root = root
        self._state = "\0".join(map(state_of, files))

    def state(self, index: int) -> str:
        """See `Reader.state`: the state of all files with rows, and of the file that the row names."""
        path = None if self._images[index].is_valid else self._paths[index].as_py()
        return self._state and f"{self._state}\0{state_of(self._root / path) if path else ''}"

    def image(self, index: int) -> bytes:
        """See `Reader.image`: the bytes in the row, or those of the file that it names."""
        image: bytes | None = self._images[index].as_py()
        if image is not None:
            return image
        path = self._paths[index].as_py()
        if not path:
            raise DecodeError(f"{self.id(index)} holds neither bytes nor a path", reason="empty")
        return read_file(self._root / path)


class _Opened(NamedTuple):
    """The columns of one split before its labels are read."""

    images: pa.ChunkedArray
    paths: pa.ChunkedArray | pa.Array | None
    """None if `images` are paths."""
    labels: LabelColumns
    root: Path
    groups: list[str] | None
    """`Reader.groups`."""
    files: Sequence[Path]
    """The files that hold the rows; none if they are in memory."""


def read_parquet(path: Path, files: list[Path], columns: Columns) -> DataSet:
    """Open parquet files: rows of image bytes (the hub's layout) or of paths. Raises DataError,
    UsageError."""
    findings = Findings("parquet")
    opened: dict[str, _Opened] = {}
    groups = group_by_split(files)
    for name, group in groups.items():
        with _readable(group[0]):
            opened[name or path.stem * (len(groups) > 1)] = _open_group(group, columns, findings)
    return _labelled(opened, columns, findings, path.stem)


def _labelled(opened: dict[str, _Opened], columns: Columns, findings: Findings, title: str = "") -> DataSet:
    """Return the splits with their labels, which are read alike in all of them. `title` begins ids without a split."""
    read = read_labels([one.labels for one in opened.values()], columns, findings)
    found = DataSet({}, findings)
    for (name, one), (labels, class_names) in zip(opened.items(), read, strict=True):
        if one.paths is None:
            found.splits[name] = _files(one, labels, class_names, findings)
        else:
            source = ArrowSource(name or title, one.images, one.paths, labels, class_names, one.root, one.files)
            source.groups, found.splits[name] = one.groups, source
            if one.images.null_count and one.paths.null_count < len(one.paths):
                for path in one.paths.filter(pc.is_null(one.images)).drop_null().to_pylist():
                    if leaves(one.root, path):
                        findings.lies_outside(path)
    return found


def _open_group(files: list[Path], columns: Columns, findings: Findings) -> _Opened:
    with open_regular(files[0]) as file:
        schema = pq.read_schema(file)
    where = str(files[0])
    image = find_column(schema.names, columns.image, IMAGE_COLUMNS, "image", where)
    kind = schema.field(image).type
    labels = _label_names(schema, image, columns, where, lambda name: _read_columns(files, [name])[name])
    group = _group_column(schema.names, columns, where)
    groups = None if group is None else _texts(_read_columns(files, [group])[group], group, where)
    unused_columns(schema.names, {image, *labels, group}, files[0].name, findings)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        table = _read_columns(files, [image, *labels])
        return _Opened(table[image], None, _label_column(table, labels, schema, where), files[0].parent, groups, files)
    if not (pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"{where}: column {image!r} holds {kind}; valid are image bytes or paths")
    names = [f"label{number or ''}" for number in range(len(labels))]
    types = [schema.field(name).type for name in labels]
    kept = [kind.value_type if isinstance(kind, pa.DictionaryType) else kind for kind in types]
    target = pa.schema({"image": pa.large_binary(), "path": pa.string(), **dict(zip(names, kept, strict=True))})

    def copy(writer: pa.RecordBatchWriter) -> None:
        for file in files:
            for batch in _batches(file, image, labels, target):
                writer.write_batch(batch)

    settings: dict[str, object] = {"image": image, "label": labels[0] if len(labels) == 1 else list(labels)}
    table = cached_table(files, settings, target, copy)
    renamed = table.select(names).rename_columns(list(labels))
    labelled = _label_column(renamed, labels, schema, where)
    return _Opened(table["image"], table["path"], labelled, files[0].parent, groups, files)


def _group_column(names: list[str], columns: Columns, where: str) -> str | None:
    """Return the column that `Data.group` names; None if it names none. Raises UsageError if it does not exist."""
    return columns.group_column and find_column(names, columns.group_column, (), "group", where)


def _texts(column: pa.ChunkedArray, name: str, where: str) -> list[str]:
    """Return the cells of a column of groups. Raises DataError for cells that are no text, number or date."""
    try:
        return [cell or "" for cell in column.cast(pa.string()).to_pylist()]
    except pa.ArrowException as error:
        raise DataError(f"{where}: the column {name!r} (data.group) holds {column.type}; valid are texts") from error


def _read_columns(files: list[Path], names: list[str]) -> pa.Table:
    """Return some columns of all files."""
    tables = []
    for file in files:
        with open_regular(file) as stream:
            tables.append(pq.read_table(stream, columns=names))
    return valid(pa.concat_tables(tables))


def _label_column(table: pa.Table, labels: tuple[str, ...], schema: pa.Schema, where: str) -> LabelColumns:
    names = _class_names(schema, labels[0]) if len(labels) == 1 else None
    return LabelColumns(where, {name: table[name] for name in labels}, names)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Context that raises DataError for a parquet file that is damaged or whose columns differ from the others'."""
    try:
        yield
    except (pa.ArrowException, KeyError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


def _batches(file: Path, image: str, labels: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file with the columns of `schema`."""
    with _readable(file), open_regular(file) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(_ROWS, columns=[image, *labels]):
            batch.validate(full=True)
            columns = [*_bytes_and_paths(batch[image]), *(batch[name] for name in labels)]
            cast = [column.cast(kind) for column, kind in zip(columns, schema.types, strict=True)]
            yield pa.record_batch(cast, schema)


def _bytes_and_paths(images: Any) -> tuple[Any, Any]:
    """Split an image column, a struct {bytes, path} or plain bytes, in two."""
    if not pa.types.is_struct(images.type):
        return images, pa.nulls(len(images), pa.string())
    return pc.struct_field(images, "bytes"), pc.struct_field(images, "path")


def _files(opened: _Opened, labels: Labels, class_names: list[str], findings: Findings) -> IndexedSource:
    """Return the images that paths name."""
    several = isinstance(labels, LabelSets)
    name = label_names if several else label_text
    texts = labels.texts() if isinstance(labels, Numbers) else None
    groups: Sequence[str | None] = opened.groups or [None] * len(opened.images)
    rows = (
        (f"row {row + 1}", path.as_py() or "", texts[row] if texts else name(labels, row, class_names), "", groups[row])
        for row, path in enumerate(opened.images)
    )
    names = class_names if several else None
    (source,) = read_records(rows, opened.labels.where, opened.root, findings, names).values()
    return source


def _class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the names of a column of ClassLabel, or of lists of them, which the hub writes into a file's metadata."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        feature = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
        names = feature["names"] if feature["_type"] == "ClassLabel" else None
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):  # not written by the hub
        return None
    valid = isinstance(names, list) and all(isinstance(name, str) and is_class_name(name) for name in names)
    return names if valid else None


def read_hub(splits: dict[str, Any], root: Path, columns: Columns) -> DataSet:
    """Open the splits of a `datasets.DatasetDict`; its Arrow files are memory-mapped. Raises DataError,
    UsageError."""
    opened: dict[str, _Opened] = {}
    findings = Findings("hub")
    for name, split in splits.items():
        with _readable(root / name):
            valid(split.data.table)
        table = split.flatten_indices().data if split._indices is not None else split.data
        image = find_column(split.column_names, columns.image, IMAGE_COLUMNS, "image", name)
        names = _label_names(table.schema, image, columns, name, table.column)
        group = _group_column(split.column_names, columns, name)
        groups = None if group is None else _texts(table.column(group), group, name)
        unused_columns(split.column_names, {image, *names, group}, f"split {name!r}", findings)
        feature = split.features[names[0]] if len(names) == 1 else None
        class_names = getattr(getattr(feature, "feature", feature), "names", None)
        images, paths = _bytes_and_paths(table.column(image))
        labels = LabelColumns(name, {label: table.column(label) for label in names}, class_names)
        files = [Path(file["filename"]) for file in split.cache_files]
        opened[name] = _Opened(images, paths, labels, root, groups, files)
    return _labelled(opened, columns, findings)


def open_saved(path: Path, columns: Columns) -> DataSet:
    """Open a folder that `datasets` wrote with save_to_disk. Raises DataError, UsageError."""
    import datasets  # seconds to import

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises whatever JSON and Arrow raise
        raise DataError(f"{path} cannot be read as a saved hub data set: {error}. Save it again") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"": saved}
    return read_hub(dict(splits), path, columns)


def open_hub(name: str, columns: Columns) -> DataSet:
    """Open a hub data set by name: from its cache, or downloaded once. Never runs code of the data set."""
    import datasets  # seconds to import

    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # the library raises a dozen kinds, down to plain ValueError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"hub data set {name!r} is not in the cache {datasets.config.HF_DATASETS_CACHE} "
            f"and could not be loaded: {reason}. With a network once: hf download --repo-type dataset {name}; "
            "or give the folder that holds its parquet files"
        ) from error
    return read_hub(dict(loaded), Path(str(datasets.config.HF_DATASETS_CACHE)), columns)


def hub_cached(name: str) -> bool:
    """Return whether a data set `owner/name` is in the hub's cache on this machine."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        return False
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    fetched = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    return prepared.is_dir() or fetched.is_dir()
