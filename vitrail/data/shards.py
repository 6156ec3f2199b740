"""Tar shards with an index, so that any image of any shard is one read away.

Shards are named as webdataset does: `key.jpg` beside `key.cls` (a number or a class name) or `key.json` with
"label", "class" or "cls". Packed shards (`pack`) are such tars too, with the index beside them. Nothing is
extracted: an image is a position and a length in a shard."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitrail.data.cache import cached_table, read_table
from vitrail.data.folder import is_image_name, is_junk, refuse_large
from vitrail.data.item import UNKNOWN, Findings, Found, Item, order_classes
from vitrail.data.table import group_by_split
from vitrail.errors import DataError, DecodeError

INDEX = "index.arrow"
SCHEMA = pa.schema(
    {"shard": pa.int32(), "offset": pa.int64(), "size": pa.int64(), "label": pa.string(), "id": pa.string()}
)
_LABEL_KEYS = ("label", "class", "cls", "class_name", "label_name")
_OPEN = 256  # shards kept open; the limit on open files is often 1,024


class ShardSource:
    """Images at known positions of tar files."""

    def __init__(self, files: list[Path], table: pa.Table, class_names: list[str]) -> None:
        self._files = files
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        self._shard = table["shard"].to_numpy()
        self._offset = table["offset"].to_numpy()
        self._ids = table["id"]
        self.sizes = table["size"].to_numpy()
        self.class_names = class_names
        self.labels = _positions(table["label"], class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        refuse_large(int(self.sizes[index]), self.id(index))
        data = self._read(int(self._shard[index]), int(self._offset[index]), int(self.sizes[index]))
        id = self.id(index)
        image = _array(data, id) if data.startswith(b"\x93NUMPY") else data
        return Item(image, int(self.labels[index]), id)

    def id(self, index: int) -> str:
        """See `Listed.id`: shard and member of the tar, or the id the image had before packing."""
        return str(self._ids[index].as_py())

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        handle = self._handles.get(shard)
        try:
            if handle is not None:
                return os.pread(handle, size, offset)
            handle = os.open(self._files[shard], os.O_RDONLY)
            data = os.pread(handle, size, offset)
        except OSError as error:
            raise DecodeError(f"{self._files[shard]}: {error.strerror}", reason="unreadable") from error
        with self._lock:
            if len(self._handles) < _OPEN and shard not in self._handles:
                self._handles[shard] = handle
            else:
                os.close(handle)
        return data

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)


def _array(data: bytes, id: str) -> np.ndarray:
    try:
        image = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise DecodeError(f"{id}: not an array of pixels: {error}", reason="corrupt") from error
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise DecodeError(f"{id}: {image.dtype} {image.shape}, not uint8 [H, W, 3]", reason="unsupported")
    return image


def _positions(labels: pa.ChunkedArray, class_names: list[str]) -> np.ndarray:
    """Return the index of each label among the class names, UNKNOWN for null."""
    encoded = labels.combine_chunks().dictionary_encode()
    position = {name: index for index, name in enumerate(class_names)}
    table = np.array([position[name] for name in encoded.dictionary.to_pylist()] + [UNKNOWN], dtype=np.int64)
    return table[encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()]


def read_shards(path: Path, files: list[Path]) -> Found:
    """Open tar files as webdataset names them; the index is kept in the cache folder. Raises DataError."""
    findings = Findings("shards")
    found = Found({}, findings)
    for name, group in group_by_split(files).items():
        table = cached_table(group, {"format": "webdataset"}, SCHEMA, partial(_write_index, group))
        damaged = table.filter(pc.less(table["size"], 0))["id"].to_pylist()
        for shard in damaged:
            findings.drop(shard, "shard cut off or damaged; the members before that are used")
        table = table.filter(pc.greater_equal(table["size"], 0)) if damaged else table
        if not len(table):
            raise DataError(
                f"no images in {', '.join(file.name for file in group[:3])}: expected members "
                "key.jpg beside key.cls or key.json"
            )
        names = set(table["label"].unique().drop_null().to_pylist())
        found.splits[name] = ShardSource(group, table, order_classes(names))
    return found


def _write_index(files: list[Path], writer: pa.RecordBatchWriter) -> None:
    for number, file in enumerate(files):
        rows = [{"shard": number, **row} for row in _members(file)]
        writer.write_table(pa.Table.from_pylist(rows, SCHEMA))


def _members(file: Path) -> Iterator[dict[str, object]]:
    """Yield {offset, size, label, id} for each image of a tar; a damaged place is a row of size -1."""
    length = file.stat().st_size
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, str] = {}
    cut = False
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                if not member.isreg() or is_junk(base):
                    continue
                if member.offset_data + member.size > length:
                    cut = True
                    break
                key, _, suffix = base.partition(".")
                key = f"{folder}/{key}"
                if is_image_name(base) or suffix == "npy":
                    images[key] = (member.offset_data, member.size, member.name)
                elif (label := _label(tar, member, suffix)) is not None:
                    labels[key] = label
    except tarfile.TarError as error:
        if not images:
            raise DataError(
                f"{file} cannot be read as an uncompressed tar: {error}; compressed shards have "
                "no random access, unpack them with gunzip or zstd first"
            ) from error
        cut = True
    for key, (offset, size, name) in images.items():
        yield {"offset": offset, "size": size, "label": labels.get(key), "id": f"{file.name}/{name}"}
    if cut:
        yield {"offset": 0, "size": -1, "label": None, "id": file.name}


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> str | None:
    """Return the class a .cls or .json member states, else None."""
    if suffix not in ("cls", "json") or member.size > 1 << 20:
        return None
    stream = tar.extractfile(member)
    text = stream.read().decode("utf-8", errors="replace").strip() if stream else ""
    if suffix == "cls":
        return text or None
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return None
    found = [record[key] for key in _LABEL_KEYS if key in record] if isinstance(record, dict) else []
    return str(found[0]) if found and isinstance(found[0], str | int) else None


def packed_folders(path: Path) -> dict[str, Path]:
    """Return split -> folder of packed shards at or right below `path`; empty if there are none."""
    if (path / INDEX).is_file():
        return {"": path}
    # a folder that may not be looked into is no error here
    return {folder.name: folder for folder in sorted(path.iterdir()) if os.path.isfile(folder / INDEX)}


def read_packed(path: Path) -> Found:
    """Open shards written by `pack`. Raises DataError where a shard is missing or has another length."""
    found = Found({}, Findings("packed"))
    for name, folder in packed_folders(path).items():
        table = read_table(folder / INDEX)
        manifest = json.loads((table.schema.metadata or {})[b"vitrail"])
        files = []
        for shard in manifest["shards"]:
            file = folder / shard["name"]
            length = file.stat().st_size if file.is_file() else None
            if length != shard["bytes"]:
                state = "is missing" if length is None else f"has {length} bytes instead of {shard['bytes']}"
                raise DataError(f"packed shard {file} {state}: pack the data set again or copy the shard again")
            files.append(file)
        found.splits[name] = ShardSource(files, table, manifest["class_names"])
    return found
