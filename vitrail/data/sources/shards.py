"""Tar shards with an index, so that any image of any shard is one read away.

Shards are named as webdataset does: `key.jpg` beside `key.cls` (a number or a class name) or `key.json` with
"label", "class" or "cls". Packed shards (`pack`) are such tars too, with the index beside them. Nothing is
extracted: an image is a position and a length in a shard."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitrail.data.cache import cached_table, read_table
from vitrail.data.item import UNKNOWN, DataSet, Findings, Item, order_classes
from vitrail.data.sources.folder import MAX_BYTES, is_image_name, is_junk, refuse_large
from vitrail.data.sources.shard_files import LocalFiles, ShardFiles
from vitrail.data.sources.table import group_by_split
from vitrail.data.split import row_digest
from vitrail.errors import DataError, DecodeError

_LABEL_KEYS = ("label", "class", "cls", "class_name", "label_name")


def members(stream: BinaryIO, length: int, name: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield {offset, size, label, id} for each image of the tar `name`; a damaged place is a row of size -1.

    `length` is the file's, `where` its place for messages. Raises DataError for a file that is no tar.
    """
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, str] = {}
    cut = False
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
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
                f"{where} cannot be read as an uncompressed tar: {error}; compressed shards have "
                "no random access, unpack them with gunzip or zstd first"
            ) from error
        cut = True
    for key, (offset, size, member_name) in images.items():
        yield {"offset": offset, "size": size, "label": labels.get(key), "id": f"{name}/{member_name}"}
    if cut:
        yield {"offset": 0, "size": -1, "label": None, "id": name}


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


INDEX = "index.arrow"
SCHEMA = pa.schema(
    {
        "shard": pa.int32(),
        "offset": pa.int64(),
        "size": pa.int64(),
        "label": pa.string(),
        "id": pa.string(),
        "digest": pa.uint64(),
    }
)
"""Of an index: where each image lies, and its `vitrail.data.split.row_digest`, so that none is hashed at opening."""


class ShardSource:
    """Images at known positions of tar files."""

    def __init__(self, files: ShardFiles, table: pa.Table, class_names: list[str]) -> None:
        self._files = files
        self._table = table
        self.distant = files.distant
        self.sizes = table["size"].to_numpy()
        self.class_names = class_names
        self.labels = _positions(table["label"], class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        refuse_large(int(self.sizes[index]), self.id(index))
        shard, offset = (int(self._table[name][index].as_py()) for name in ("shard", "offset"))
        data = self._files.read(shard, offset, int(self.sizes[index]))
        id = self.id(index)
        return Item(_pixels(data, id), int(self.labels[index]), id)

    def id(self, index: int) -> str:
        """See `Listed.id`: shard and member of the tar, or the id the image had before packing."""
        return str(self._table["id"][index].as_py())

    def ids(self, indices: np.ndarray) -> list[str]:
        """Return the ids of several images."""
        return list(self._table["id"].take(pa.array(indices)).to_pylist())

    def fetch(self, indices: np.ndarray) -> list[bytes | np.ndarray | DecodeError]:
        """See `Distant.fetch`."""
        sizes = self.sizes[indices]
        read = np.where(
            sizes > MAX_BYTES, 0, sizes
        )  # an image that is too large is rejected before it is read into memory
        shards, offsets = (self._table[name].take(pa.array(indices)).to_numpy() for name in ("shard", "offset"))
        found: list[bytes | np.ndarray | DecodeError] = []
        for index, size, data in zip(
            indices.tolist(), sizes.tolist(), self._files.read_many(shards, offsets, read), strict=True
        ):
            try:
                refuse_large(size, self.id(index))
                found.append(data if isinstance(data, DecodeError) else _pixels(data, self.id(index)))
            except DecodeError as error:
                found.append(error)
        return found

    def parts(self) -> list[tuple[str, np.ndarray]]:
        """Return (name of the shard, its images) for each shard that has any."""
        shard = self._table["shard"].to_numpy()
        order = np.argsort(shard, kind="stable")
        numbers, begins = np.unique(shard[order], return_index=True)
        pieces = np.split(order, begins[1:])
        return [(Path(self._files.names[n]).stem, piece) for n, piece in zip(numbers.tolist(), pieces, strict=True)]

    def digests(self) -> np.ndarray | None:
        """Return what `vitrail.data.split.row_digest` gives of each image, uint64 [N]; None from an older index."""
        return np.asarray(self._table["digest"].to_numpy()) if "digest" in self._table.column_names else None


def _pixels(data: bytes, id: str) -> bytes | np.ndarray:
    """Return the bytes of an image file as they are, a packed array as an array. Raises DecodeError."""
    return _array(data, id) if data.startswith(b"\x93NUMPY") else data


def _array(data: bytes, id: str) -> np.ndarray:
    try:
        image = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise DecodeError(f"{id}: not an array of pixels: {error}", reason="corrupt") from error
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise DecodeError(f"{id}: {image.dtype} {image.shape}, not uint8 [H, W, 3]", reason="unsupported")
    return image


def _positions(labels: pa.ChunkedArray, class_names: list[str]) -> np.ndarray:
    """Return the index of each label among the class names, UNKNOWN for null; int64 [N]."""
    position = {name: index for index, name in enumerate(class_names)}
    result = np.empty(len(labels), dtype=np.int64)
    begin = 0
    for chunk in labels.chunks:  # one at a time: the names of ten million images are not copied together
        encoded = chunk.dictionary_encode()
        table = np.array([position[name] for name in encoded.dictionary.to_pylist()] + [UNKNOWN], dtype=np.int64)
        result[begin : begin + len(chunk)] = table[encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()]
        begin += len(chunk)
    return result


def index_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return a part of an index: rows of shard, offset, size, label and id, with the digest of each."""
    for row in rows:
        digest = row_digest(row["id"], row["size"], row["label"] or "")
        row["digest"] = int.from_bytes(digest, "big")
    return pa.Table.from_pylist(rows, SCHEMA)


def read_shards(path: Path, files: list[Path]) -> DataSet:
    """Open tar files as webdataset names them; the index is stored in the cache folder. Raises DataError."""
    found = DataSet({}, Findings("shards"))
    for name, group in group_by_split(files).items():
        table = cached_table(group, {"format": "webdataset 2"}, SCHEMA, partial(_write_index, group))
        names = [file.name for file in group]
        found.splits[name] = tar_source(LocalFiles(group), table, names, found.findings)
    return found


def tar_source(files: ShardFiles, table: pa.Table, names: list[str], findings: Findings) -> ShardSource:
    """Return the images of indexed tars called `names`; damaged ones are noted. Raises DataError if there are none."""
    damaged = table.filter(pc.less(table["size"], 0))["id"].to_pylist()
    for shard in damaged:
        findings.drop(shard, "shard cut off or damaged; the members before that are used")
    table = table.filter(pc.greater_equal(table["size"], 0)) if damaged else table
    if not len(table):
        raise DataError(f"no images in {', '.join(names[:3])}: expected members key.jpg beside key.cls or key.json")
    return ShardSource(files, table, order_classes(set(table["label"].unique().drop_null().to_pylist())))


def _write_index(files: list[Path], writer: pa.RecordBatchWriter) -> None:
    for number, file in enumerate(files):
        with open(file, "rb") as stream:
            rows = members(stream, file.stat().st_size, file.name, str(file))
            writer.write_table(index_table([{"shard": number, **row} for row in rows]))


def packed_folders(path: Path) -> dict[str, Path]:
    """Return split -> folder of packed shards at or right below `path`; empty if there are none."""
    if (path / INDEX).is_file():
        return {"": path}
    # a folder that may not be looked into is no error here
    return {folder.name: folder for folder in sorted(path.iterdir()) if os.path.isfile(folder / INDEX)}


def read_packed(path: Path) -> DataSet:
    """Open shards written by `pack`. Raises DataError where a shard is missing or has another length."""
    found = DataSet({}, Findings("packed"))
    for name, folder in packed_folders(path).items():
        table = read_table(folder / INDEX)
        manifest = packed_manifest(table)
        files = [folder / shard["name"] for shard in manifest["shards"]]
        check_lengths(manifest, [file.stat().st_size if file.is_file() else None for file in files], str(folder))
        found.splits[name] = ShardSource(LocalFiles(files), table, manifest["class_names"])
    return found


def packed_manifest(table: pa.Table) -> dict[str, Any]:
    """Return what an index written by `pack` says of its shards."""
    return dict(json.loads((table.schema.metadata or {})[b"vitrail"]))


def check_lengths(manifest: dict[str, Any], lengths: list[int | None], folder: str) -> None:
    """Raise DataError for the first shard in `folder` that is missing (None) or has another length."""
    for shard, length in zip(manifest["shards"], lengths, strict=True):
        if length != shard["bytes"]:
            state = "is missing" if length is None else f"has {length} bytes instead of {shard['bytes']}"
            raise DataError(
                f"packed shard {folder}/{shard['name']} {state}: pack the data set again or copy the shard again"
            )
