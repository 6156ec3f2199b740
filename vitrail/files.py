"""Files: durable writing, atomic replacement, locks, and reading JSON and .npz without trusting their content."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypedDict

import numpy as np

from vitrail.errors import VitrailError


class Written(TypedDict):
    """What was written into a file: its size and hash."""

    bytes: int
    sha256: str


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write a file, wait until it is on the disk, and return its size and hash, taken from the bytes in memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network shares do not support it
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace `path` atomically: yield a temporary file to write, which takes its place unless there is an error."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask says; safetensors makes files that only their owner can read
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file or folder next to `path`, with the same suffix, for use with `take_place`.

    Afterwards the temporary file or folder is removed, and so are folders made for it that are still empty.
    """
    temporary = path.with_name(f".{path.stem}.saving-{os.getpid()}{path.suffix}")
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # not empty
                folder.rmdir()


def take_place(temporary: Path, path: Path) -> None:
    """Move a temporary file or folder to `path`; in an existing folder only files of the same names are replaced."""
    for file in temporary.iterdir() if temporary.is_dir() else (temporary,):
        sync(file)
    if temporary.is_dir() and path.is_dir():
        for file in temporary.iterdir():
            os.replace(file, path / file.name)
    else:
        os.replace(temporary, path)
    sync(path.parent)


def lock(file: IO[str] | IO[bytes], *, wait: bool) -> None:
    """Lock an open file until it is closed, however the process ends.

    Raises BlockingIOError if another process has locked it, unless `wait`.
    """
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


LARGEST_JSON = 64 << 20
"""Maximum size in bytes of a JSON file."""


def read_json_object(path: Path, error: type[VitrailError]) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `error` for a file that is too large, unreadable or no object."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise error(f"{path} has {size:,} bytes; a JSON file may have at most {LARGEST_JSON:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{path} cannot be read: {problem}") from problem
    if not isinstance(content, dict):
        raise error(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


LARGEST_UNPACKED = 1 << 30
"""Bytes that any .npz may unpack to; a larger one may have at most `LARGEST_RATIO` times its packed size."""
LARGEST_RATIO = 50
"""Maximum ratio of unpacked to packed size; weights and features hardly compress."""
DAMAGED_ZIP = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, SyntaxError, TokenError)
"""Exceptions from reading a damaged .npz: RuntimeError for an encrypted zip, the last two from array headers."""


@dataclass(frozen=True)
class ArrayHeader:
    """What an .npy header says, and its own length."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    length: int
    """Bytes of the header."""


def read_array_header(stream: IO[bytes]) -> ArrayHeader:
    """Read an .npy header. Raises ValueError (or another of `DAMAGED_ZIP`) if it is damaged or of a later version."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array of version {version}; versions (1, 0) and (2, 0) are read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return ArrayHeader(shape, dtype, fortran, stream.tell())


class Npz:
    """The arrays of an .npz file by name, read without pickles and without allocating more than the file holds.

    `numpy.load` allocates whatever a header asks for. Here the header must agree with the zip member's size before
    anything is allocated, and a small file that unpacks to gigabytes is rejected. Every problem is raised as `error`.
    """

    def __init__(self, path: Path, error: type[VitrailError]) -> None:
        self.path, self.error = path, error
        try:
            self.zip = zipfile.ZipFile(path)
            members = [info for info in self.zip.infolist() if not info.is_dir()]
            self._check_sizes(members)
            self.headers = {info.filename[: -len(".npy")]: self._header(info) for info in members}
        except DAMAGED_ZIP as problem:
            raise error(f"{path} cannot be read: truncated, damaged or not an .npz ({problem})") from problem
        if len(self.headers) != len(members):
            raise error(f"{path} holds two arrays with the same name; each name must be unique")

    def _check_sizes(self, members: list[zipfile.ZipInfo]) -> None:
        unpacked, packed = sum(info.file_size for info in members), self.path.stat().st_size
        if unpacked > max(LARGEST_UNPACKED, LARGEST_RATIO * packed):
            raise self.error(
                f"{self.path} has {packed:,} bytes and claims to unpack to {unpacked:,}: no weights compress like that"
            )

    def _header(self, info: zipfile.ZipInfo) -> ArrayHeader:
        name = info.filename.removesuffix(".npy")
        if name == info.filename:
            raise self.error(f"{self.path} holds {name!r}, which is not an array")
        with self.zip.open(info) as stream:
            header = read_array_header(stream)
        if header.dtype.hasobject:
            raise self.error(f"{self.path}: {name!r} holds Python objects, which could run code; arrays only")
        size = math.prod(header.shape) * header.dtype.itemsize
        if min(header.shape, default=0) < 0 or header.length + size != info.file_size:
            raise self.error(
                f"{self.path}: the header of {name!r} claims {header.dtype} of shape {header.shape}, {size:,} bytes, "
                f"but {info.file_size - header.length:,} are there"
            )
        return header

    def read(self, name: str) -> np.ndarray:
        """Return one array in the machine's byte order; bfloat16, which NumPy lacks, is returned as uint16."""
        header = self.headers[name]
        dtype = np.dtype("<u2") if self.is_bfloat16(name) else header.dtype
        if dtype.kind not in "fiub":
            raise self.error(f"{self.path}: {name!r} holds {dtype}; only arrays of numbers are read")
        array = np.empty(math.prod(header.shape), dtype)
        try:
            with self.zip.open(f"{name}.npy") as stream:
                stream.read(header.length)
                _fill(stream, array)
        except DAMAGED_ZIP as problem:
            raise self.error(f"{self.path}: {name!r} cannot be read: truncated or damaged ({problem})") from problem
        array = array.reshape(header.shape[::-1]).T if header.fortran else array.reshape(header.shape)
        return array.astype(dtype.newbyteorder("="), copy=False)

    def is_bfloat16(self, name: str) -> bool:
        """Return whether an array holds bfloat16, which NumPy writes as two raw bytes per value."""
        return self.headers[name].dtype == np.dtype("V2")

    def close(self) -> None:
        """Close the file."""
        self.zip.close()


def _fill(stream: IO[bytes], array: np.ndarray) -> None:
    """Fill `array` up to the end of the stream, where zipfile compares the checksum."""
    target = array.view(np.uint8).data
    done = 0
    while done < len(target):
        # in pieces, because zipfile's readinto copies everything it is asked for
        piece = stream.read(min(1 << 20, len(target) - done))
        if not piece:
            raise EOFError(f"{len(target) - done} bytes are missing")
        target[done : done + len(piece)] = piece
        done += len(piece)
    if stream.read(1):
        raise ValueError("more bytes than the header says")
