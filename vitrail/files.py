"""Writing files so that neither a kill nor a power cut leaves half of one, and locking them against other processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypedDict


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
