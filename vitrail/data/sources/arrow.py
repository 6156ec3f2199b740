"""Parquet files and data sets of the Hugging Face hub: rows of image bytes and a label, read through a memory map.

Parquet cannot be read row by row (CIFAR-100's 25,000 images are one row group). So its rows are copied once, unchanged,
to an Arrow file in the cache folder. Hub data sets are opened by name or from a folder, through `datasets`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.arrow_package import pa, pc, pq
from vitrail.data.cache import cached_table, valid
from vitrail.data.item import DataSet, Findings, Item, Listed
from vitrail.data.labels.columns import LabelColumns, label_columns, read_labels
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Labels, LabelSets, label_at, label_names, label_text
from vitrail.data.settings import Columns
from vitrail.data.sources.folder import read_file
from vitrail.data.sources.table import IMAGE_COLUMNS, Rows, find_column, group_by_split, leaves, unused_columns
from vitrail.errors import DataError, DecodeError
from vitrail.files import open_regular
from vitrail.words import is_name

_ROWS = 512  # rows copied at a time: the most of a data set that is in memory


class ArrowSource:
    """Images in the rows of Arrow columns; only the row asked for is copied into memory."""

    def __init__(
        self,
        name: str,
        images: pa.ChunkedArray,
        paths: pa.ChunkedArray | pa.Array,
        labels: Labels,
        class_names: list[str],
        root: Path,
    ) -> None:
        self._name = name
        self._images = images
        self._paths = paths
        self._root = root
        self.labels = labels
        self.class_names = class_names
        lengths = pc.fill_null(pc.binary_length(images), 0)
        self.sizes = lengths.to_numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        image = self._images[index].as_py()
        if image is None:
            image = self._outside(index)
        return Item(image, label_at(self.labels, index), self.id(index))

    def id(self, index: int) -> str:
        """See `Listed.id`: the split and the row, counted from 0."""
        return f"{self._name}[{index}]"

    def _outside(self, index: int) -> bytes:
        path = self._paths[index].as_py()
        if not path:
            raise DecodeError(f"{self.id(index)} holds neither bytes nor a path", reason="empty")
        return read_file(self._root / path)


class _Opened(NamedTuple):
    """The columns of one split before its labels are read."""

    where: str
    images: pa.ChunkedArray
    paths: pa.ChunkedArray | pa.Array | None
    """None if `images` are paths."""
    labels: LabelColumns
    root: Path


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
            found.splits[name] = ArrowSource(name or title, one.images, one.paths, labels, class_names, one.root)
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
    labels = label_columns(schema, image, columns, where, partial(_column, files))
    unused_columns(schema.names, {image, *labels}, files[0].name, findings)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        tables = []
        for part in files:
            with open_regular(part) as stream:
                tables.append(pq.read_table(stream, columns=[image, *labels]))
        table = valid(pa.concat_tables(tables))
        return _Opened(where, table[image], None, _label_column(table, labels, schema, where), files[0].parent)
    if not (pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"{where}: column {image!r} holds {kind}; valid are image bytes or paths")
    kept = {name: _stored_type(schema.field(name).type) for name in labels}
    names = {name: f"label{number or ''}" for number, name in enumerate(labels)}
    target = pa.schema({"image": pa.large_binary(), "path": pa.string(), **{names[n]: t for n, t in kept.items()}})

    def copy(writer: pa.RecordBatchWriter) -> None:
        for file in files:
            for batch in _batches(file, image, labels, target):
                writer.write_batch(batch)

    settings: dict[str, object] = {"image": image, "label": labels[0] if len(labels) == 1 else list(labels)}
    table = cached_table(files, settings, target, copy)
    renamed = table.select(list(names.values())).rename_columns(list(labels))
    return _Opened(where, table["image"], table["path"], _label_column(renamed, labels, schema, where), files[0].parent)


def _column(files: list[Path], name: str) -> pa.ChunkedArray:
    """Return one column of all files."""
    found = []
    for file in files:
        with open_regular(file) as stream:
            found += valid(pq.read_table(stream, columns=[name]))[name].chunks
    return pa.chunked_array(found)


def _stored_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


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
            yield _plain(batch, image, labels, schema)


def _plain(batch: pa.RecordBatch, image: str, labels: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    images, paths = _bytes_and_paths(batch[image])
    columns = [images.cast(pa.large_binary()), paths.cast(pa.string())]
    columns += [batch[name].cast(schema.field(2 + number).type) for number, name in enumerate(labels)]
    return pa.record_batch(columns, schema=schema)


def _bytes_and_paths(images: Any) -> tuple[Any, Any]:
    """Split an image column, a struct {bytes, path} or plain bytes, in two."""
    if not pa.types.is_struct(images.type):
        return images, pa.nulls(len(images), pa.string())
    return pc.struct_field(images, "bytes"), pc.struct_field(images, "path")


def _files(opened: _Opened, labels: Labels, class_names: list[str], findings: Findings) -> Listed:
    """Return the images that paths name."""
    several = isinstance(labels, LabelSets)
    name = label_names if several else label_text
    texts = labels.texts() if isinstance(labels, Numbers) else None
    rows = (
        (f"row {row + 1}", path.as_py() or "", texts[row] if texts else name(labels, row, class_names), "")
        for row, path in enumerate(opened.images)
    )
    (source,) = Rows(opened.root, findings, class_names if several else None).read(rows, opened.where).values()
    return source


def _class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the names of a column of ClassLabel, or of lists of them, which the hub writes into a file's metadata."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        feature = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
        names = feature["names"] if feature["_type"] == "ClassLabel" else None
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):  # not written by the hub
        return None
    valid = isinstance(names, list) and all(isinstance(name, str) and is_name(name) for name in names)
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
        names = label_columns(table.schema, image, columns, name, table.column)
        unused_columns(split.column_names, {image, *names}, f"split {name!r}", findings)
        feature = split.features[names[0]] if len(names) == 1 else None
        class_names = getattr(getattr(feature, "feature", feature), "names", None)
        images, paths = _bytes_and_paths(table.column(image))
        labels = LabelColumns(name, {label: table.column(label) for label in names}, class_names)
        opened[name] = _Opened(name, images, paths, labels, root)
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
