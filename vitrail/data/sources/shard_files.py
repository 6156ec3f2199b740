"""Read the bytes of shards: positions in local files, or byte ranges of another file system.

A range of a remote file costs a round trip, some 10 to 100 ms, whatever its length. So many ranges are requested at
once, and neighbours are read in one piece.

Addresses on other file systems ("s3://bucket/photos", "https://host/train-{0000..0099}.tar") are read through fsspec.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import DataError, DecodeError
from vitrail.files import read_at, regular_descriptor, state_of
from vitrail.version import install_extra

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(://|::)", re.IGNORECASE)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_STATE = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call the mark of a file's contents; the first there is counts."""


def is_address(path: str) -> bool:
    """Does `path` name a file system, such as s3://, gs://, https:// or memory://?"""
    return _SCHEME.match(path) is not None


def file_system_of(address: str) -> tuple[Any, str]:
    """Return (file system, path in it). Raises DataError where the system is unknown or its package is missing."""
    import fsspec

    scheme = address.split("::")[0].split("://")[0]
    try:
        return fsspec.core.url_to_fs(address)  # type: ignore[no-any-return]
    except ImportError as error:
        raise DataError(
            f"{address}: reading {scheme}:// needs a package that is not installed ({error}). For S3, GCS and HTTP: "
            f"{install_extra('remote')}"
        ) from error
    except ValueError as error:
        raise DataError(f"{address} cannot be opened: {error}") from error


def expand(pattern: str) -> list[str]:
    """Return the addresses that "{0000..0099}" and "{train,val}" in `pattern` stand for, in order.

    A range counts up, with as many digits as its first number has; this is webdataset's notation. Raises DataError
    for a range that counts down.
    """
    if found := _RANGE.search(pattern):
        first, last = found[1], found[2]
        if int(last) < int(first):
            raise DataError(f"{pattern}: the range {found[0]} counts down")
        parts = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    elif found := _CHOICE.search(pattern):
        parts = found[1].split(",")
    else:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    # a range within a choice stands there once for each of its numbers: every address counts once
    return list(dict.fromkeys(address for part in parts for address in expand(f"{before}{part}{after}")))


def look(system: Any, path: str) -> tuple[int, str]:
    """Return (bytes, a mark of the contents that changes when they do) of a file. Raises DataError."""
    with explained(system, path):
        facts = system.info(path)
    size = facts.get("size")
    if facts.get("type") == "directory" or size is None:
        raise DataError(f"{address_of(system, path)} is no file with a known size")
    return int(size), next((str(facts[name]) for name in _STATE if facts.get(name) is not None), "")


def address_of(system: Any, path: str) -> str:
    """Return the address of a path, for messages."""
    return str(system.unstrip_protocol(path))


@contextmanager
def explained(system: Any, path: str) -> Iterator[None]:
    """Context in which whatever a file system raises becomes a DataError that names the address."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is nothing at {address_of(system, path)}") from error
    except Exception as error:  # each of two dozen libraries has its own
        raise DataError(f"{address_of(system, path)} cannot be read: {error or type(error).__name__}") from error


_OPEN = 256  # number of shards that stay open; the limit on open files is often 1,024
_GAP = 1 << 15  # bytes between two ranges that are rather read than made a request of its own
_PIECE = 1 << 24  # the longest range that neighbours are joined to
_ATTEMPTS = 4
_PAUSE = 0.25  # seconds before the second attempt; doubled before each further one


class LocalFiles:
    """Numbered local files, from which several threads read ranges at once; some stay open."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self.names = [file.name for file in self._files]
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return a range of a file. Raises DecodeError("unreadable")."""
        handle = self._handles.get(shard)
        try:
            if handle is not None:
                return read_at(handle, size, offset)
            handle = regular_descriptor(self._files[shard])
            data = read_at(handle, size, offset)
        except OSError as error:
            raise DecodeError(f"{self._files[shard]}: {error.strerror}", reason="unreadable") from error
        with self._lock:
            if len(self._handles) < _OPEN and shard not in self._handles:
                self._handles[shard] = handle
            else:
                os.close(handle)
        return data

    def state(self, shard: int) -> str:
        """Return what changes with a file."""
        return state_of(self._files[shard])

    def __reduce__(self) -> tuple[object, ...]:
        return LocalFiles, (self._files,)  # another process opens the files itself

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)


class RemoteFiles:
    """Files of an fsspec file system, read by range. Failed reads are repeated, except for missing files."""

    def __init__(self, system: Any, paths: Sequence[str]) -> None:
        self._system = system
        self._paths = list(paths)
        self.names = [path.rpartition("/")[2] for path in self._paths]
        self._states: dict[int, str] = {}

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """See `LocalFiles.read`."""
        (found,) = self.read_many(np.array([shard]), np.array([offset]), np.array([size]))
        if isinstance(found, DecodeError):
            raise found
        return found

    def read_many(self, shards: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> list[bytes | DecodeError]:
        """Return several ranges, in the order of the request, or the DecodeError of a range that cannot be read.

        There is one request for neighbours, and all requests are made at once where the file system can.
        """
        found: list[bytes | DecodeError] = [b""] * len(shards)
        pieces = _pieces(shards, offsets, sizes)
        data = self._ranges([(int(shards[group[0]]), begin, end) for group, begin, end in pieces])
        for (group, begin, _), piece in zip(pieces, data, strict=True):
            for place in group:
                start = int(offsets[place]) - begin
                found[place] = piece if isinstance(piece, DecodeError) else piece[start : start + int(sizes[place])]
        return found

    def state(self, shard: int) -> str:
        """See `LocalFiles.state`; a shard is asked for once."""
        if shard not in self._states:
            path = self._paths[shard]
            self._states[shard] = "\0".join(map(str, (address_of(self._system, path), *look(self._system, path))))
        return self._states[shard]

    def _ranges(self, wanted: list[tuple[int, int, int]]) -> list[bytes | DecodeError]:
        """Read each (shard, begin, end). Failed reads are repeated after a pause."""
        found: list[bytes | DecodeError] = [b""] * len(wanted)
        left = list(range(len(wanted)))
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE * 2 ** (attempt - 1))
            paths = [self._paths[wanted[place][0]] for place in left]
            begins, ends = ([wanted[place][end] for place in left] for end in (1, 2))
            answers = self._system.cat_ranges(paths, begins, ends, on_error="return")
            again = []
            for place, answer in zip(left, answers, strict=True):
                found[place] = self._checked(answer, *wanted[place])
                if isinstance(found[place], DecodeError) and not isinstance(answer, FileNotFoundError):
                    again.append(place)
            if not (left := again):
                break
        return found

    def _checked(self, answer: Any, shard: int, begin: int, end: int) -> bytes | DecodeError:
        where = address_of(self._system, self._paths[shard])
        if isinstance(answer, BaseException):
            what = "is not there" if isinstance(answer, FileNotFoundError) else str(answer) or type(answer).__name__
            return DecodeError(f"{where}: {what}", reason="unreadable")
        if len(answer) == end - begin:
            return bytes(answer)
        what = f"bytes {begin} to {end} were asked for, and {len(answer)} came"
        if len(answer) > end - begin:
            what += ": the server does not answer with ranges, which reading single images needs"
        return DecodeError(f"{where}: {what}", reason="unreadable")


def _pieces(shards: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> list[tuple[list[int], int, int]]:
    """Return (places, begin, end) of the ranges to ask for: neighbours in a shard joined, up to a length."""
    pieces: list[tuple[list[int], int, int]] = []
    for place in np.lexsort((offsets, shards)).tolist():
        shard, begin = int(shards[place]), int(offsets[place])
        end = begin + int(sizes[place])
        if pieces and shard == shards[pieces[-1][0][0]]:
            group, first, reached = pieces[-1]
            if begin - reached <= _GAP and max(end, reached) - first <= _PIECE:
                group.append(place)
                pieces[-1] = (group, first, max(end, reached))
                continue
        pieces.append(([place], begin, end))
    return pieces


ShardFiles = LocalFiles | RemoteFiles
"""The files of shards, on this machine or elsewhere."""
