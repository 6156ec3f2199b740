"""Shards at an address: packed folders and webdataset tars of S3, GCS, a web server or any other fsspec file system.

Images are never copied to this machine. Only the index is copied, into the cache folder, and each image is read as a
byte range. Packed shards have an index file. For tars the index is made: every tar is read once, several at a time,
and an interrupted start continues where it stopped. Ours, because fsspec's caches copy whole files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from vitrail import world
from vitrail.data.cache import cached_file, pa, stored_table
from vitrail.data.item import DataSet, Findings
from vitrail.data.loading.prefetch import ordered, threads
from vitrail.data.sources.shard_files import RemoteFiles, address_of, expand, explained, file_system_of, look
from vitrail.data.sources.shards import INDEX, INDEX_FORMAT, index_schema, packed_source, tar_index, tar_source
from vitrail.data.sources.table import group_by_split
from vitrail.disk import writing
from vitrail.errors import DataError
from vitrail.files import replacing

_AT_ONCE = 16
"""Number of tars that are read at the same time."""
_READ = 1 << 22
"""Bytes per request while a tar is indexed or an index is copied."""


def find_remote(address: str) -> DataSet:
    """Open shards at an address: a folder that `pack` wrote, one of its splits, a folder of tars, or tars by pattern.

    "{0000..0099}" and "{train,val}" stand for several addresses, and "*" for the names in a listing. Raises DataError.
    """
    places = [file_system_of(one) for one in expand(address)]
    system = places[0][0]
    tars: list[str] = []
    folders: dict[str, str] = {}
    for _, path in places:
        if path.endswith(".tar") and "*" not in path:
            tars.append(path)
        elif "*" in path:
            with explained(system, path):
                tars += sorted(name for name in system.glob(path) if name.endswith(".tar"))
        else:
            split = "" if len(places) == 1 else path.rstrip("/").rpartition("/")[2]
            found, below = _in_folder(system, path.rstrip("/"), split)
            folders |= found
            tars += below
    if folders and not tars:
        return _read_packed(system, folders)
    if tars and not folders:
        return _read_tars(system, tars)
    what = "both packed shards and tars" if tars else "no shards"
    raise DataError(
        f"there are {what} at {address}; valid are a folder written by `vitrail data pack`, and tars, in a folder "
        "that can be listed or named one by one, as in train-{0000..0099}.tar"
    )


def _in_folder(system: Any, path: str, split: str) -> tuple[dict[str, str], list[str]]:
    """Return (split -> packed folder, tars) at or right below `path`."""
    with explained(system, path):
        if system.exists(f"{path}/{INDEX}"):
            return {split: path}, []
        try:
            entries = [str(entry["name"]).rstrip("/") for entry in system.ls(path, detail=True)]
        except (FileNotFoundError, NotADirectoryError):
            entries = []
        entries = sorted({entry for entry in entries if entry.startswith(path) and entry != path})
        tars = [entry for entry in entries if entry.endswith(".tar")]
        if tars:
            return {}, tars
        inside = [entry for entry in entries if "." not in entry.rpartition("/")[2]]
        packed = {e.rpartition("/")[2]: e for e in inside if system.exists(f"{e}/{INDEX}")}
        if packed:
            return packed, []
        listed = ({str(found["name"]) for found in system.ls(entry, detail=True)} for entry in inside)
        return {}, [name for names in listed for name in sorted(names) if name.endswith(".tar")]


def _read_packed(system: Any, folders: dict[str, str]) -> DataSet:
    def opened(folder: str, names: list[str]) -> tuple[RemoteFiles, list[int | None]]:
        paths = [f"{folder}/{name}" for name in names]
        return RemoteFiles(system, paths), _lengths(system, folder, paths)

    found = DataSet({}, Findings("packed"))
    for split, folder in folders.items():
        index = _copied(system, f"{folder}/{INDEX}")
        found.splits[split] = packed_source(index, address_of(system, folder), partial(opened, folder))
    return found


def _lengths(system: Any, folder: str, paths: list[str]) -> list[int | None]:
    """Return the bytes of each file, None if it is missing: from one listing if that contains them."""
    try:
        listed = {entry["name"]: entry.get("size") for entry in system.ls(folder, detail=True)}
    except Exception:  # some web servers have no listing, and each library raises its own error
        listed = {}
    lengths = {path: listed[path] for path in paths if listed.get(path) is not None}
    left = [path for path in paths if path not in lengths]
    with threads(_AT_ONCE) as pool:
        lengths |= zip(left, ordered(pool, lambda path: _length(system, path), left, ahead=4 * _AT_ONCE), strict=True)
    return [lengths[path] for path in paths]


def _length(system: Any, path: str) -> int | None:
    try:
        return look(system, path)[0]
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _copied(system: Any, path: str) -> Path:
    """Return a copy of a file in the cache folder, made once per state of the file."""
    size, state = look(system, path)
    target = cached_file("remote", json.dumps([1, address_of(system, path), size, state]))
    if target.exists():
        return target
    address = address_of(system, path)
    task, advice = f"write a copy of {address} in {target.parent}", "Set VITRAIL_CACHE to a folder that can be written"
    with writing(target, DataError, task=task, advice=advice), replacing(target) as temporary:
        with temporary.open("wb") as file:
            file.writelines(_pieces(system, path))
        if temporary.stat().st_size != size:
            raise DataError(f"{address} changed while it was copied, or the copy is incomplete. Try again.")
    return target


def _pieces(system: Any, path: str) -> Iterator[bytes]:
    """Yield the bytes of a file. Only what reading raises is an error of the address."""
    with explained(system, path), _opened(system, path) as stream:
        while piece := stream.read(_READ):
            yield piece


def _opened(system: Any, path: str) -> Any:
    return system.open(path, "rb", block_size=_READ, cache_type="readahead")


def _read_tars(system: Any, paths: list[str]) -> DataSet:
    found = DataSet({}, Findings("shards"))
    tables = dict(zip(paths, _indexes(system, paths), strict=True))
    for split, group in group_by_split([PurePosixPath(path) for path in paths]).items():
        of_group = [path for path in paths if PurePosixPath(path) in set(group)]
        numbered = [_numbered(tables[path], number) for number, path in enumerate(of_group)]
        names = [address_of(system, path) for path in of_group]
        files = RemoteFiles(system, of_group)
        found.splits[split] = tar_source(files, pa.concat_tables(numbered), names, found.findings)
    return found


def _indexes(system: Any, paths: list[str]) -> list[pa.Table]:
    """Return the index of each tar, from the cache if possible. The processes of a run begin with different tars."""
    first = len(paths) * world.rank() // world.size()
    turned = [*paths[first:], *paths[:first]]
    with threads(min(_AT_ONCE, len(paths))) as pool:
        tables = list(ordered(pool, lambda path: _index(system, path), turned, ahead=2 * _AT_ONCE))
    return [*tables[len(paths) - first :], *tables[: len(paths) - first]]


def _index(system: Any, path: str) -> pa.Table:
    size, state = look(system, path)
    address = address_of(system, path)
    target = cached_file("tables", json.dumps([1, INDEX_FORMAT, address, size, state]))

    def write(writer: pa.RecordBatchWriter) -> None:
        with explained(system, path), _opened(system, path) as stream:
            table = tar_index(stream, size, PurePosixPath(path).name, address)
        writer.write_table(table)

    return stored_table(target, index_schema(), write, f"an index of {address}")


def _numbered(table: pa.Table, number: int) -> pa.Table:
    """Return the index of one tar as a part of the index of many."""
    place = table.schema.get_field_index("shard")
    return table.set_column(place, index_schema().field("shard"), pa.array(np.full(len(table), number, dtype=np.int32)))
