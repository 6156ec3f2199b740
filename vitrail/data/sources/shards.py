"""Tar shards with an index, so that any image of any shard is one read away.

Members have webdataset's names: `key.jpg` with `key.cls` (a number or a class name), or with `key.json` that contains
"label", "class" or "cls", a name, a number or a list of them. One image of a key is used. Packed shards (`pack`) are
such tars too, with an index file in the same folder. Nothing is extracted: an image is an offset and a length in a
shard."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from vitrail.data.cache import cached_table, pa, pc, read_arrow
from vitrail.data.image_names import in_junk, is_image_name
from vitrail.data.item import UNKNOWN, DataSet, Findings, Reader
from vitrail.data.labels.cells import names_in
from vitrail.data.labels.numbers import Numbers, numbers_text, parse_numbers
from vitrail.data.labels.sets import Labels, distinct_names, named, names_of_text, order_classes, set_text
from vitrail.data.npz import DAMAGED_ZIP, read_array_header
from vitrail.data.sources.folder import MAX_BYTES, folders_in, refuse_large
from vitrail.data.sources.shard_files import LocalFiles, RemoteFiles, ShardFiles
from vitrail.data.sources.table import group_by_split
from vitrail.data.split import row_digest
from vitrail.errors import DataError, DecodeError
from vitrail.files import open_regular
from vitrail.words import as_text

_LONGEST_READ = 2 << 20  # bytes: the longest label, and longer than any name in a header
INDEX_FORMAT = "webdataset 4"
"""What the rows of an index of a tar mean, for the names of cached ones."""
_DAMAGED, _ANOTHER = -1, -2
"""The sizes of rows that are no images: a damaged place of a tar, and a further image of the same sample."""
_LABEL_KEYS = ("label", "class", "cls", "class_name", "label_name", "labels", "classes")


def members(stream: BinaryIO, length: int, name: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield {offset, size, label, id} for each image of the tar `name`; sizes below 0 say what was left out.

    Of the images of a key the first is used, a plain `key.jpg` before `key.npy` and both before `key.seg.png`. `length`
    is the file's size in bytes, `where` its place for messages. Raises DataError if the file is not a tar.
    """
    images: dict[str, tuple[int, int, str]] = {}
    others: list[str] = []
    labels: dict[str, str] = {}
    cut = False
    try:
        with tarfile.open(fileobj=cast(BinaryIO, _Bounded(stream)), mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
                folder, _, base = member.name.rpartition("/")
                if not member.isreg() or in_junk(member.name):
                    continue
                # the bytes of a sparse file are not in one piece, and are fewer than its size
                size = _DAMAGED if member.issparse() else member.size
                if member.offset_data + size > length:
                    cut = True
                    break
                key, _, suffix = base.partition(".")
                key = f"{folder}/{key}"
                if is_image_name(base) or suffix == "npy":
                    place = (member.offset_data, size, member.name)
                    first = images.setdefault(key, place)
                    if first is not place:
                        images[key], other = (place, first) if _plain(place[2]) < _plain(first[2]) else (first, place)
                        others.append(other[2])
                elif (label := _label(tar, member, suffix, where)) is not None:
                    labels[key] = label
    except (tarfile.TarError, ValueError) as error:  # ValueError: the map of a damaged sparse file
        if not images:
            raise DataError(
                f"{where} is not a readable uncompressed tar: {error}. Compressed shards have no random access: "
                "decompress them with gunzip or zstd first"
            ) from error
        cut = True
    for key, (offset, size, member_name) in images.items():
        yield {"offset": offset, "size": size, "label": labels.get(key), "id": f"{name}/{member_name}"}
    for member_name in others:
        yield {"offset": 0, "size": _ANOTHER, "label": None, "id": f"{name}/{member_name}"}
    if cut:
        yield {"offset": 0, "size": _DAMAGED, "label": None, "id": name}


def _plain(name: str) -> tuple[bool, bool]:
    """Return what the images of a sample are ordered by: `s.jpg`, then `s.npy`, then `s.seg.png`."""
    suffix = name.rpartition("/")[2].partition(".")[2].lower()
    return "." in suffix, suffix == "npy"


class _Bounded:
    """A stream of a tar. Images are never read through it, so a long read is a header that claims to be long."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        """Return the next bytes. Raises ReadError for more than `_LONGEST_READ`."""
        if size > _LONGEST_READ:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._stream.read(size)


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str, where: str) -> str | None:
    """Return the class or the numbers a .cls or .json member states, or a `set_text` for a list of classes; else None.

    Raises DataError for a list of anything but names and whole numbers."""
    if suffix not in ("cls", "json") or member.size > 1 << 20:
        return None
    stream = tar.extractfile(member)
    text = stream.read().decode("utf-8", errors="replace").strip() if stream else ""
    if suffix == "cls":
        return text or None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = [record[key] for key in _LABEL_KEYS if key in record] if isinstance(record, dict) else []
    numbers = found[0] if found and isinstance(found[0], list) else found
    if any(isinstance(one, float) for one in numbers):  # whole numbers may be names of classes
        return numbers_text(found[0])
    if found and isinstance(found[0], list):
        return set_text(set(names_in(found[0], f"{where}, {member.name}")))
    return str(found[0]) if found and isinstance(found[0], str | int) else None


INDEX = "index.arrow"


class ShardSource(Reader):
    """Images at known positions of tar files."""

    def __init__(self, files: ShardFiles, table: pa.Table, class_names: list[str], *, numbers: bool = False) -> None:
        labels = _numbers(table["label"], len(class_names)) if numbers else _positions(table["label"], class_names)
        super().__init__(labels, table["size"].to_numpy(), class_names)
        self._files = files
        self._table = table
        self.remote = isinstance(files, RemoteFiles)

    def image(self, index: int) -> bytes | np.ndarray:
        """See `Reader.image`."""
        refuse_large(int(self.sizes[index]), self.id(index))
        shard, offset = (int(self._table[name][index].as_py()) for name in ("shard", "offset"))
        return _pixels(self._files.read(shard, offset, int(self.sizes[index])), self.id(index))

    def id(self, index: int) -> str:
        """See `IndexedSource.id`: shard and member of the tar, or the id the image had before packing."""
        return str(self._table["id"][index].as_py())

    def state(self, index: int) -> str:
        """See `Reader.state`: the state of the shard, and the place in it."""
        shard, offset = (int(self._table[name][index].as_py()) for name in ("shard", "offset"))
        return f"{self._files.state(shard)}\0{offset}"

    def ids(self, indices: np.ndarray) -> list[str]:
        """Return the ids of several images."""
        return list(self._table["id"].take(pa.array(indices)).to_pylist())

    def fetch(self, indices: np.ndarray) -> list[bytes | np.ndarray | DecodeError]:
        """See `RemoteSource.fetch`."""
        sizes = self.sizes[indices]
        shards, offsets = (self._table[name].take(pa.array(indices)).to_numpy() for name in ("shard", "offset"))
        assert isinstance(self._files, RemoteFiles)
        # an image that is too large is rejected before it is read into memory
        answers = self._files.read_many(shards, offsets, np.where(sizes > MAX_BYTES, 0, sizes))
        found: list[bytes | np.ndarray | DecodeError] = []
        for index, size, data in zip(indices.tolist(), sizes.tolist(), answers, strict=True):
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
        """Return the `vitrail.data.split.row_digest` of each image, uint64 [N]; None for an older index."""
        return np.asarray(self._table["digest"].to_numpy()) if "digest" in self._table.column_names else None


def _pixels(data: bytes, id: str) -> bytes | np.ndarray:
    """Return the bytes of an image file unchanged, but an array of uint8 [H, W, 3] as an array. Raises DecodeError."""
    if not data.startswith(b"\x93NUMPY"):
        return data
    try:
        header = read_array_header(io.BytesIO(data))
        if header.dtype != np.uint8 or header.shape[2:] != (3,) or min(header.shape) < 0:
            return data  # bands, or no image, as `vitrail.data.images.stored` says
        return header.array(data).copy()
    except (*DAMAGED_ZIP, MemoryError) as error:
        raise DecodeError(f"{id}: not an array of pixels: {error}", reason="corrupt") from error


def _positions(labels: pa.ChunkedArray, class_names: list[str]) -> Labels:
    """Return the index of each label among the class names, UNKNOWN for null; sets if the column holds any."""
    if pc.any(pc.starts_with(labels, "\0")).as_py():
        texts = [None if text is None else names_of_text(text) for text in labels.to_pylist()]
        return named(texts, class_names).labels
    numbers = pc.index_in(labels, value_set=pa.array(class_names, pa.string()), skip_nulls=True)
    others = pc.and_(pc.is_null(numbers), pc.is_valid(labels))
    if pc.any(others).as_py():
        raise KeyError(labels.filter(others)[0].as_py())
    return np.asarray(numbers.fill_null(UNKNOWN).to_numpy(), dtype=np.int64)


def _numbers(labels: pa.ChunkedArray, width: int) -> Numbers:
    """Return the targets that are labels of an index; unknown ones for null."""
    unknown = (np.nan,) * width
    rows = [unknown if text is None else parse_numbers(text) for text in labels.to_pylist()]
    return Numbers(np.array(rows, dtype=np.float64).reshape(-1, width))


def index_schema() -> pa.Schema:
    """Return the columns of an index: the place of each image, and its `vitrail.data.split.row_digest`.

    With the digest no image is hashed later.
    """
    places = {"shard": pa.int32(), "offset": pa.int64(), "size": pa.int64()}
    return pa.schema({**places, "label": pa.string(), "id": pa.string(), "digest": pa.uint64()})


def index_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return a part of an index: rows of shard, offset, size, label and id, with the digest of each."""
    for row in rows:
        row["id"], row["label"] = as_text(row["id"]), row["label"] and as_text(row["label"])
        digest = row_digest(row["id"], row["size"], row["label"] or "")
        row["digest"] = int.from_bytes(digest, "big")
    return pa.Table.from_pylist(rows, index_schema())


def tar_index(stream: BinaryIO, length: int, name: str, where: str, shard: int = 0) -> pa.Table:
    """Return the part of an index for one tar, which is read from `stream` (see `members`). Raises DataError."""
    return index_table([{"shard": shard, **row} for row in members(stream, length, name, where)])


def read_shards(path: Path, files: list[Path]) -> DataSet:
    """Open tar files as webdataset names them; the index is stored in the cache folder. Raises DataError."""
    found = DataSet({}, Findings("shards"))
    for name, group in group_by_split(files).items():
        table = cached_table(group, {"format": INDEX_FORMAT}, index_schema(), partial(_write_index, group))
        found.splits[name] = tar_source(LocalFiles(group), table, list(map(str, group)), found.findings)
    return found


def tar_source(files: ShardFiles, table: pa.Table, names: list[str], findings: Findings) -> ShardSource:
    """Return the images of indexed tars called `names`; damaged ones are noted. Raises DataError if there are none."""
    left_out = table.filter(pc.less(table["size"], 0))
    for name, size in zip(left_out["id"].to_pylist(), left_out["size"].to_pylist(), strict=True):
        cut = "shard cut off or damaged; the members before that are used"
        sparse = "/" in name  # a member; else a shard
        findings.drop(name, "another image of this sample" if size == _ANOTHER else "a sparse file" if sparse else cut)
    table = table.filter(pc.greater_equal(table["size"], 0)) if len(left_out) else table
    if not len(table):
        raise DataError(f"no images in {', '.join(names[:3])}: expected members key.jpg with key.cls or key.json")
    texts = map(names_of_text, table["label"].unique().drop_null().to_pylist())
    return ShardSource(files, table, order_classes(distinct_names(texts)))


def _write_index(files: list[Path], writer: pa.RecordBatchWriter) -> None:
    for number, file in enumerate(files):
        try:
            with open_regular(file) as stream:
                table = tar_index(stream, os.fstat(stream.fileno()).st_size, file.name, str(file), number)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
        writer.write_table(table)


def packed_folders(path: Path) -> dict[str, Path]:
    """Return split -> folder of packed shards at or right below `path`; empty if there are none."""
    if (path / INDEX).is_file():
        return {"": path}
    # a folder without permission is not an error here
    return {folder.name: folder for folder in folders_in(path) if os.path.isfile(folder / INDEX)}


def read_packed(folders: Mapping[str, Path]) -> DataSet:
    """Open shards written by `pack`, split -> folder (`packed_folders`).

    Raises DataError if a shard is missing or has another length.
    """

    def opened(folder: Path, names: list[str]) -> tuple[ShardFiles, list[int | None]]:
        files = [folder / name for name in names]
        return LocalFiles(files), [file.stat().st_size if file.is_file() else None for file in files]

    found = DataSet({}, Findings("packed"))
    for name, folder in folders.items():
        found.splits[name] = packed_source(folder / INDEX, str(folder), partial(opened, folder))
    return found


def packed_source(
    index: Path, folder: str, opened: Callable[[list[str]], tuple[ShardFiles, list[int | None]]]
) -> ShardSource:
    """Return the images of packed shards from their `index`; `folder` is their place, for messages.

    opened: Function of the names of the shards that returns the files and the bytes of each, None for a missing one.
    Raises DataError for a shard that is missing or has another length.
    """
    with understood(f"{folder}/{INDEX}"):
        table = read_arrow(index)
        manifest = packed_manifest(table)
        files, lengths = opened([shard["name"] for shard in manifest["shards"]])
        for shard, length in zip(manifest["shards"], lengths, strict=True):
            if length != shard["bytes"]:
                state = "is missing" if length is None else f"has {length} bytes instead of {shard['bytes']}"
                raise DataError(
                    f"packed shard {folder}/{shard['name']} {state}: pack the data set again or copy the shard again"
                )
        return ShardSource(files, table, manifest["class_names"], numbers=manifest.get("numbers", False))


@contextmanager
def understood(index: str) -> Iterator[None]:
    """Context that raises DataError for an index file that `pack` did not write, or that is damaged."""
    try:
        yield
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:  # ArrowInvalid is a ValueError
        raise DataError(
            f"{index} is not an index that `vitrail data pack` wrote, or it is damaged ({error or type(error).__name__}"
            "). Pack the data set again, or remove the file"
        ) from error


def packed_manifest(table: pa.Table) -> dict[str, Any]:
    """Return the list of shards and classes in an index written by `pack`. To be called within `understood`."""
    manifest = dict(json.loads((table.schema.metadata or {})[b"vitrail"]))
    if missing := [name for name in index_schema().names if name not in (*table.column_names, "digest")]:
        raise ValueError(f"column {missing[0]!r} is missing")
    if len(table):
        shards, smallest = pc.min_max(table["shard"]).as_py(), pc.min(table["size"]).as_py()
        if shards["min"] < 0 or shards["max"] >= len(manifest["shards"]) or smallest < 0:
            raise ValueError("an image lies outside the shards")
    return manifest
