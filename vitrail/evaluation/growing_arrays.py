"""Arrays that grow by rows while they are computed, so that memory holds one batch and not the file.

A file of an array states its shape before its values, and how many images are readable is known only at the end. NumPy
leaves room for the number of rows in the header of an .npy file, so each array grows in a file of its own, whose header
is completed at the end. `growing_npy` keeps these files, which `numpy.load(..., mmap_mode="r")` opens without reading
them. `growing_npz` moves them into an .npz, one after the other: at its peak the disk holds all values once, and those
of the largest array twice.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vitrail.disk import writing
from vitrail.errors import DataError, UsageError
from vitrail.files import beside, refuse_other_files, replacing, take_place


class GrowingArrays:
    """Arrays that grow by rows, each in an .npy file of `folder`, until `save` makes them the result at `path`."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._types: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._rows: dict[str, int] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each array -> its shape."""
        return {name: (self._rows[name], *shape) for name, (shape, _) in self._types.items()}

    def append(self, prefix: str, parts: Mapping[str, np.ndarray]) -> None:
        """Add rows [n, ...] to the arrays whose names are `prefix` and those of the parts. Raises DataError."""
        with writing(self._path, DataError):
            for name, rows in parts.items():
                self._append(prefix + name, rows)

    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """Write all arrays, and `others` after them, to the result, which appears as a whole. Raises DataError."""
        raise NotImplementedError

    def _append(self, name: str, rows: np.ndarray) -> None:
        known = self._types.setdefault(name, (rows.shape[1:], rows.dtype))
        if known != (rows.shape[1:], rows.dtype):
            raise ValueError(f"rows of {name} are {rows.dtype} {rows.shape[1:]}, and the first ones {known}")
        if name not in self._rows:
            self._rows[name] = 0
            self._write_header(name, "wb")
        with self._file(name).open("ab") as file:
            np.ascontiguousarray(rows).tofile(file)
        self._rows[name] += len(rows)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _write_header(self, name: str, mode: str) -> None:
        """Write the header of an array, which has the same length for any number of rows."""
        header = np.lib.format.header_data_from_array_1_0(np.empty((0, *self._types[name][0]), self._types[name][1]))
        with self._file(name).open(mode) as file:
            np.lib.format.write_array_header_1_0(file, {**header, "shape": self.shapes[name]})  # type: ignore[arg-type]


class _GrowingNpz(GrowingArrays):
    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """See GrowingArrays: the result is an .npz file, replaced atomically."""
        with replacing(self._path, DataError) as temporary, zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
            for name in self._types:
                self._write_header(name, "r+b")
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member, self._file(name).open("rb") as file:
                    shutil.copyfileobj(file, member, 1 << 20)
                self._file(name).unlink()
            for name, array in others.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


class _GrowingNpy(GrowingArrays):
    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """See GrowingArrays: the result is a folder of .npy files, which moves to its place when it is complete."""
        with writing(self._path, DataError):
            for name in self._types:
                self._write_header(name, "r+b")
            for name, array in others.items():
                np.save(self._file(name), np.asanyarray(array), allow_pickle=False)
            take_place(self._folder, self._path)


@contextmanager
def growing_npz(path: Path) -> Iterator[GrowingArrays]:
    """Context of arrays that become the .npz at `path` by `save`. Afterwards nothing else is left beside it."""
    with writing(path, DataError), beside(path) as folder:
        folder.mkdir()
        yield _GrowingNpz(folder, path)


@contextmanager
def growing_npy(path: Path) -> Iterator[GrowingArrays]:
    """Context of arrays that become a folder of .npy files at `path` by `save`.

    Afterwards nothing else is left beside it. Raises UsageError if `path` is a file or a folder that is not empty.
    """
    refuse_other_files(path, lambda _: False, UsageError)
    with writing(path, DataError), beside(path) as folder:
        folder.mkdir()
        yield _GrowingNpy(folder, path)
