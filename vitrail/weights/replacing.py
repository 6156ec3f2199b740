"""Replacing a file: whoever looks, and whenever the process is killed, it is the old one or the new one, whole.

What is checked before it counts, and may be a folder, is written `beside` its place first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`, which it takes on leaving; on an error it is removed."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask says; safetensors' files are for their owner alone
        yield temporary
        temporary.chmod(mode)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A file or folder to write next to `path`, with the same suffix; what is left of it is removed, and so are
    folders made for it that have stayed empty."""
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
    """Let what was written take its place; of a folder that is there already, only files of the same names go."""
    for file in temporary.iterdir() if temporary.is_dir() else (temporary,):
        _flush(file)
    if temporary.is_dir() and path.is_dir():
        for file in temporary.iterdir():
            os.replace(file, path / file.name)
    else:
        os.replace(temporary, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
