"""An .npz file whose arrays grow by rows while they are computed, so that memory holds one batch and not the file.

An .npz states the shape of an array before its values, and how many images are readable is known only at the end. So
the values of each array wait in a file beside it, and move into the .npz one array after the other: at its peak the
disk holds all values once, and those of the largest array twice.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vitrail.disk import writing
from vitrail.errors import DataError
from vitrail.files import beside, replacing


class GrowingArrays:
    """Arrays that grow by rows, each in a file of `folder`."""

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

    def _append(self, name: str, rows: np.ndarray) -> None:
        known = self._types.setdefault(name, (rows.shape[1:], rows.dtype))
        if known != (rows.shape[1:], rows.dtype):
            raise ValueError(f"rows of {name} are {rows.dtype} {rows.shape[1:]}, and the first ones {known}")
        with (self._folder / name).open("ab") as file:
            np.ascontiguousarray(rows).tofile(file)
        self._rows[name] = self._rows.get(name, 0) + len(rows)

    def save(self, others: Mapping[str, np.ndarray]) -> None:
        """Write all arrays, and `others` after them, to the .npz, which is replaced atomically. Raises DataError."""
        with replacing(self._path, DataError) as temporary, zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
            for name, (shape, dtype) in self._types.items():
                header = np.lib.format.header_data_from_array_1_0(np.empty((0, *shape), dtype))
                header["shape"] = self.shapes[name]
                values = self._folder / name
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member, values.open("rb") as file:
                    np.lib.format.write_array_header_1_0(member, header)
                    shutil.copyfileobj(file, member, 1 << 20)
                values.unlink()
            for name, array in others.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


@contextmanager
def growing_npz(path: Path) -> Iterator[GrowingArrays]:
    """Context of arrays that become the .npz at `path` by `save`. Afterwards nothing else is left beside it."""
    with writing(path, DataError), beside(path) as folder:
        folder.mkdir()
        yield GrowingArrays(folder, path)
