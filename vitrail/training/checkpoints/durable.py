"""Files that are still there after a power cut, with what it takes to notice that one has changed."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict


class Written(TypedDict):
    """What was written into a file."""

    bytes: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write a file durably and return its size and hash, taken from the bytes in memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without this, such as some network shares
            raise
    finally:
        os.close(descriptor)
