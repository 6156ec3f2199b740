"""Parquet files and data sets of the Hugging Face hub: rows of image bytes and a label, read through a memory map.

Parquet cannot be read row by row (CIFAR-100's 25,000 images are one row group). So its rows are copied once, unchanged,
to an Arrow file in the cache folder. Hub data sets are opened by name or from a folder, through `datasets`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vitrail.data.cache import cached_table
from vitrail.data.item import DataSet, Findings, Item, Listed
from vitrail.data.sources.folder import read_file
from vitrail.data.sources.table import IMAGE_COLUMNS, LABEL_COLUMNS, Rows, encode_labels, find_column, group_by_split
from vitrail.errors import DataError, DecodeError

_ROWS = 512  # rows copied at a time: the most of a data set that is in memory


class ArrowSource:
    """Images in the rows of Arrow columns; only the row asked for is copied into memory."""

    def __init__(
        self,
        name: str,
        images: pa.ChunkedArray,
        paths: pa.ChunkedArray | pa.Array,
        labels: np.ndarray,
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
        return Item(image, int(self.labels[index]), self.id(index))

    def id(self, index: int) -> str:
        """See `Listed.id`: the split and the row, counted from 0."""
        return f"{self._name}[{index}]"

    def _outside(self, index: int) -> bytes:
        path = self._paths[index].as_py()
        if not path:
            raise DecodeError(f"{self.id(index)} holds neither bytes nor a path", reason="empty")
        return read_file(self._root / path)


def read_parquet(
    path: Path, files: list[Path], image_column: str | None = None, label_column: str | None = None
) -> DataSet:
    """Open parquet files: rows of image bytes (the hub's layout) or of paths. Raises DataError,
    UsageError."""
    findings = Findings("parquet")
    splits: dict[str, Listed] = {}
    for name, group in group_by_split(files).items():
        try:
            splits[name] = _open_group(name or path.stem, group, image_column, label_column, findings)
        except pa.ArrowInvalid as error:
            raise DataError(f"{group[0]} is not a readable parquet file: {error}") from error
    return DataSet(splits, findings)


def _open_group(
    name: str, files: list[Path], image_column: str | None, label_column: str | None, findings: Findings
) -> Listed:
    schema = pq.read_schema(files[0])
    where = str(files[0])
    image = find_column(schema.names, image_column, IMAGE_COLUMNS, "image", where)
    label = find_column(schema.names, label_column, LABEL_COLUMNS, "label", where)
    kind = schema.field(image).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _open_paths(files, image, label, findings)
    if not (pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"{where}: column {image!r} holds {kind}; valid are image bytes or paths")
    label_type = schema.field(label).type
    if isinstance(label_type, pa.DictionaryType):
        label_type = label_type.value_type
    target = pa.schema({"image": pa.large_binary(), "path": pa.string(), "label": label_type})

    def copy(writer: pa.RecordBatchWriter) -> None:
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(_ROWS, columns=[image, label]):
                writer.write_batch(_plain(batch, image, label, target))

    table = cached_table(files, {"image": image, "label": label}, target, copy)
    labels, class_names = encode_labels(table["label"], _class_names(schema, label), where)
    return ArrowSource(name, table["image"], table["path"], labels, class_names, files[0].parent)


def _plain(batch: pa.RecordBatch, image: str, label: str, schema: pa.Schema) -> pa.RecordBatch:
    images, paths = _bytes_and_paths(batch[image])
    columns = [
        images.cast(pa.large_binary()),
        paths.cast(pa.string()),
        batch[label].cast(schema.field("label").type),
    ]
    return pa.record_batch(columns, schema=schema)


def _bytes_and_paths(images: Any) -> tuple[Any, Any]:
    """Split an image column, a struct {bytes, path} or plain bytes, in two."""
    if not pa.types.is_struct(images.type):
        return images, pa.nulls(len(images), pa.string())
    return pc.struct_field(images, "bytes"), pc.struct_field(images, "path")


def _open_paths(files: list[Path], image: str, label: str, findings: Findings) -> Listed:
    tables = [pq.read_table(file, columns=[image, label]) for file in files]
    table = pa.concat_tables(tables)
    names = _class_names(tables[0].schema, label)
    labels, names = encode_labels(table[label], names, str(files[0]))
    rows = (
        (f"row {row}", path.as_py() or "", names[index] if index >= 0 else "", "")
        for row, (path, index) in enumerate(zip(table[image], labels, strict=True), start=1)
    )
    (source,) = Rows(files[0].parent, findings).read(rows, str(files[0])).values()
    return source


def _class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the names of a ClassLabel column, which the hub writes into the file's metadata."""
    text = (schema.metadata or {}).get(b"huggingface")
    if not text:
        return None
    feature = json.loads(text).get("info", {}).get("features", {}).get(label, {})
    return list(feature["names"]) if feature.get("_type") == "ClassLabel" else None


def read_hub(
    splits: dict[str, Any], root: Path, image_column: str | None = None, label_column: str | None = None
) -> DataSet:
    """Open the splits of a `datasets.DatasetDict`; its Arrow files are memory-mapped. Raises DataError,
    UsageError."""
    found = DataSet({}, Findings("hub"))
    for name, split in splits.items():
        table = split.flatten_indices().data if split._indices is not None else split.data
        image = find_column(split.column_names, image_column, IMAGE_COLUMNS, "image", name)
        label = find_column(split.column_names, label_column, LABEL_COLUMNS, "label", name)
        class_names = getattr(split.features[label], "names", None)
        labels, class_names = encode_labels(table.column(label), class_names, name)
        images, paths = _bytes_and_paths(table.column(image))
        found.splits[name] = ArrowSource(name, images, paths, labels, class_names, root)
    return found


def open_saved(path: Path, image_column: str | None, label_column: str | None) -> DataSet:
    """Open a folder that `datasets` wrote with save_to_disk. Raises DataError, UsageError."""
    import datasets  # seconds to import

    saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"": saved}
    return read_hub(dict(splits), path, image_column, label_column)


def open_hub(name: str, image_column: str | None, label_column: str | None) -> DataSet:
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
    return read_hub(dict(loaded), Path(str(datasets.config.HF_DATASETS_CACHE)), image_column, label_column)


def hub_cached(name: str) -> bool:
    """Is a data set `owner/name` in the hub's cache on this machine?"""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        return False
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    fetched = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    return prepared.is_dir() or fetched.is_dir()
