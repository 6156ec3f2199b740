"""Arrays in .npy and .npz files, read without trusting what their headers claim."""

from __future__ import annotations

import io
import math
import threading
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np

from vitrail.errors import VitrailError
from vitrail.files import open_regular

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

    def array(self, file: bytes | memoryview) -> np.ndarray:
        """Return the array of a file with this header, without a copy. Raises ValueError if the file is too short."""
        values = np.frombuffer(file, self.dtype, math.prod(self.shape), self.length)
        return values.reshape(self.shape, order="F" if self.fortran else "C")


_parsing = threading.Lock()
"""NumPy parses headers with `ast`, which in Python 3.11 raises SystemError now and then where two threads parse at once
(https://github.com/python/cpython/issues/106905)."""


def read_array_header(stream: IO[bytes]) -> ArrayHeader:
    """Read an .npy header. Raises ValueError (or another of `DAMAGED_ZIP`) if it is damaged or of a later version."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array of version {version}; versions (1, 0) and (2, 0) are read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    length = stream.read(2 if version == (1, 0) else 4)
    header = stream.read(int.from_bytes(length, "little"))
    with _parsing:  # not while a file is read, which may hang
        shape, fortran, dtype = read(io.BytesIO(length + header))
    return ArrayHeader(shape, dtype, fortran, stream.tell())


class Npz:
    """The arrays of an .npz file by name, read without pickles and without allocating more than the file holds.

    `numpy.load` allocates whatever a header asks for. Here the header must agree with the zip member's size before
    anything is allocated, and a small file that unpacks to gigabytes is rejected. Every problem is raised as `error`.
    Arrays whose names are not in `only` are ignored.
    """

    def __init__(self, path: Path, error: type[VitrailError], only: Collection[str] | None = None) -> None:
        self.path, self.error = path, error
        try:
            self._file = open_regular(path)
            self.zip = zipfile.ZipFile(self._file)
            members = [info for info in self.zip.infolist() if not info.is_dir()]
            if only is not None:
                members = [info for info in members if info.filename.removesuffix(".npy") in only]
            unpacked, packed = sum(info.file_size for info in members), path.stat().st_size
            if unpacked > max(LARGEST_UNPACKED, LARGEST_RATIO * packed):
                raise error(
                    f"{path} has {packed:,} bytes and claims to unpack to {unpacked:,}: no weights compress like that"
                )
            self.headers = {info.filename[: -len(".npy")]: self._header(info) for info in members}
        except DAMAGED_ZIP as problem:
            raise error(f"{path} cannot be read: truncated, damaged or not an .npz ({problem})") from problem
        if len(self.headers) != len(members):
            raise error(f"{path} holds two arrays with the same name; each name must be unique")

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

    def read(self, name: str, kinds: str = "fiub") -> np.ndarray:
        """Return one array in the machine's byte order; bfloat16, which NumPy lacks, is returned as uint16.

        `kinds` are the valid kinds of its type (`numpy.dtype.kind`).
        """
        header = self.headers[name]
        dtype = np.dtype("<u2") if self.is_bfloat16(name) else header.dtype
        if dtype.kind not in kinds:
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
        self._file.close()


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
