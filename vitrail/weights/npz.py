"""NumPy's .npz, read without trusting it: no pickles, no sizes beyond what the file can hold.

An .npz is a zip of .npy members. `numpy.load` believes each member's header and allocates what it asks for;
here a header must agree with the member it stands in before anything is allocated, and a small file that
unpacks to gigabytes is refused. zipfile checks the checksum of what it reads.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import WeightsError

LARGE = 1 << 30
"""Bytes that any file may unpack to; beyond, the ratio counts."""
RATIO = 50
"""Weights are noise to a compressor: far below this many bytes come from one."""
DAMAGED = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, SyntaxError, TokenError)
"""What reading a broken zip raises, RuntimeError for one that is encrypted; the last two come from array headers."""


@dataclass(frozen=True)
class Member:
    """One array of the file, known by its header."""

    file: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int
    """Bytes of the header."""


class Npz:
    """The arrays of one .npz by name; raises WeightsError where the file is not what it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.zip = zipfile.ZipFile(path)
            members = [info for info in self.zip.infolist() if not info.is_dir()]
            self._check_sizes(members)
            self.members = {info.filename[: -len(".npy")]: self._header(info) for info in members}
        except DAMAGED as error:
            raise WeightsError(f"{path} cannot be read: truncated, damaged or no .npz ({error})") from error
        if len(self.members) != len(members):
            raise WeightsError(f"{path} holds two arrays of one name: which of them counts cannot be known")

    def _check_sizes(self, members: list[zipfile.ZipInfo]) -> None:
        unpacked, packed = sum(info.file_size for info in members), self.path.stat().st_size
        if unpacked > max(LARGE, RATIO * packed):
            raise WeightsError(
                f"{self.path} has {packed:,} bytes and claims to unpack to {unpacked:,}: no weights compress like that"
            )

    def _header(self, info: zipfile.ZipInfo) -> Member:
        name = info.filename.removesuffix(".npy")
        if name == info.filename:
            raise WeightsError(f"{self.path} holds {name!r}, which is no array")
        with self.zip.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"array {name!r} is of version {version}")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            start = stream.tell()
        if dtype.hasobject:
            raise WeightsError(f"{self.path}: {name!r} holds Python objects, which could run code; arrays only")
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or start + size != info.file_size:
            raise WeightsError(
                f"{self.path}: the header of {name!r} claims {dtype} of shape {shape}, {size:,} bytes, but "
                f"{info.file_size - start:,} are there"
            )
        return Member(info.filename, shape, dtype, fortran, start)

    def read(self, name: str) -> Tensor:
        """Return one array as a tensor with memory of its own."""
        member = self.members[name]
        dtype = member.dtype
        if dtype == np.dtype("V2"):  # what NumPy makes of bfloat16, which it does not know
            dtype = np.dtype("<u2")
        elif dtype.kind not in "fiub":
            raise WeightsError(f"{self.path}: {name!r} holds {dtype}, which are no numbers of a model")
        array = np.empty(math.prod(member.shape), dtype)
        try:
            with self.zip.open(member.file) as stream:
                stream.read(member.start)
                _fill(stream, array)
        except DAMAGED as error:
            raise WeightsError(f"{self.path}: {name!r} cannot be read: truncated or damaged ({error})") from error
        array = array.reshape(member.shape[::-1]).T if member.fortran else array.reshape(member.shape)
        tensor = torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))
        return tensor.view(torch.bfloat16) if member.dtype == np.dtype("V2") else tensor

    def close(self) -> None:
        """Close the file."""
        self.zip.close()


def _fill(stream: IO[bytes], array: np.ndarray) -> None:
    """Read the bytes of `array` to the stream's end, where the checksum is compared."""
    target = array.view(np.uint8).data
    done = 0
    while done < len(target):
        # pieces: zipfile's own readinto makes a copy of all it is asked for
        piece = stream.read(min(1 << 20, len(target) - done))
        if not piece:
            raise EOFError(f"{len(target) - done} bytes are missing")
        target[done : done + len(piece)] = piece
        done += len(piece)
    if stream.read(1):
        raise ValueError("more bytes than its header names")
