"""The cache folder for derived files, never inside the user's data: `VITRAIL_CACHE`, else `~/.cache/vitrail`.

A cached table is an Arrow file, read through a memory map: only the rows that are used are read from the disk.

pyarrow is imported when it is first used: `pa`, and `pc` and `pq` for its modules compute and parquet. The modules here
that open data sets import these names. So a folder of images needs no pyarrow, which is larger than
all other packages of an installation for inference together, and a second to import is saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.disk import refuse_address, writing
from vitrail.errors import DataError
from vitrail.files import open_regular, replacing


class _Later:
    """A module that is imported at the first use of a name in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        setattr(self, name, found)  # the next use does not come here
        return found


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    pa, pc, pq = map(_Later, ("pyarrow", "pyarrow.compute", "pyarrow.parquet"))

__all__ = ["pa", "pc", "pq"]


def cache_folder() -> Path:
    """Return the folder for derived files (it may not exist yet)."""
    if chosen := os.environ.get("VITRAIL_CACHE"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "vitrail"
    try:
        return Path.home() / ".cache" / "vitrail"
    except RuntimeError:  # a user without a home, as in many containers
        user = os.getuid() if hasattr(os, "getuid") else "user"  # Windows has no user numbers
        return Path(tempfile.gettempdir()) / f"vitrail-{user}"


def cached_table(
    files: Sequence[Path],
    settings: dict[str, object],
    schema: pa.Schema,
    batches: Callable[[pa.RecordBatchWriter], None],
) -> pa.Table:
    """Return the table that `batches(writer)` writes, computed once per state of `files` and `settings`.

    Raises DataError, naming the folder, where it cannot be written.
    """
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([1, state, settings], sort_keys=True, default=str)
    what, room = f"an index of {files[0].parent}", "room for a copy of the data set"
    return stored_table(cached_file("tables", key), schema, batches, what, room)


def cached_file(kind: str, key: str) -> Path:
    """Return the path of the table of this kind and key, whether it exists or not."""
    return cache_folder() / kind / (hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".arrow")


def stored_table(
    target: Path,
    schema: pa.Schema,
    batches: Callable[[pa.RecordBatchWriter], None],
    what: str,
    room: str = "room",
) -> pa.Table:
    """Return the table at `target`. `batches(writer)` writes it if it does not exist.

    Raises DataError if it cannot be written. The message says that `what` cannot be stored and needs `room`.
    """
    task = f"keep {what} in {target.parent}"
    advice = f"Set VITRAIL_CACHE to a folder that can be written and has {room}"
    with writing(target, DataError, task=task, advice=advice):
        if target.exists():
            try:
                return read_arrow(target)
            except pa.ArrowException:  # damaged since it was written: it is written again
                target.unlink(missing_ok=True)
        write_arrow(target, schema, batches)
        return read_arrow(target)


def refuse_within(target: str | Path, *data: str | Path) -> Path:
    """Return `target` as an absolute path. Raises DataError for an address, and within one of the data sets `data`."""
    refuse_address(target, DataError)
    target = Path(target).expanduser().resolve()
    for place in (Path(one).expanduser().resolve() for one in data):
        if place.exists() and (target == place or place in target.parents):
            raise DataError(
                f"{target} lies within the data set {place}, where nothing is written. Choose another folder"
            )
    return target


def write_arrow(target: Path, schema: pa.Schema, batches: Callable[[pa.RecordBatchWriter], None]) -> None:
    """Write an Arrow file atomically: other processes see either the whole file or none."""
    with replacing(target) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
        batches(writer)


def read_arrow(path: Path) -> pa.Table:
    """Open an Arrow file through a memory map. Raises OSError if it is not a regular file, ArrowInvalid if damaged."""
    open_regular(path).close()  # a pipe would not end
    mapped = pa.memory_map(str(path)).read_buffer()
    try:
        table = pa.ipc.open_file(mapped).read_all()
        _ = table.column_names
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not text: {error}") from error
    end = mapped.address + mapped.size
    for buffer in (each for column in table.columns for chunk in column.chunks for each in chunk.buffers()):
        # a page behind the end of a mapped file ends the process with SIGBUS; what was decompressed lies elsewhere
        if buffer is not None and mapped.address <= buffer.address < end < buffer.address + buffer.size:
            raise pa.ArrowInvalid("a column continues behind the end of the file")
    return valid(table)


def valid(table: pa.Table) -> pa.Table:
    """Return `table` if no value of it lies outside its buffers. Raises ArrowInvalid.

    Types, offsets, nulls and UTF-8 are checked; the bytes of images are not read.
    """
    table.validate(full=True)
    return table
