"""What the tests of faults start from: small photographs, a run that takes a second, and ways to break things."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import references
from PIL import Image

import vitrail

SHORT = [
    *("--model", "Ti/2", "--vit.width", "16", "--vit.depth", "1", "--vit.heads", "2", "--vit.mlp-dim", "32"),
    *("--recipe", "scratch-small", "--image-size", "8", "--batch-size", "8", "--precision", "float32"),
    *("--device", "cpu", "--duration"),
]
"""Flags of a training run on `draw`n images; its duration follows."""


draw = functools.partial(references.draw, count=8)


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Time and hash of every file below a folder: equal where nothing was touched."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def as_nobody() -> None:
    """Become a user without rights and without a home, if this process may."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def open_to_all(folder: Path) -> None:
    """Let any user look into a test's folder, which pytest keeps for its own.

    Skips the test where another user could not import what is installed.
    """
    for module in (docstring_parser, vitrail):
        closed = [str(place) for place in Path(str(module.__file__)).parents if not place.stat().st_mode & 0o001]
        if closed and os.getuid() == 0:
            pytest.skip(f"{closed[0]} is its owner's alone, so no other user can import {module.__name__}")
    above = [place for place in folder.parents if Path(tempfile.gettempdir()).resolve() in place.parents]
    for place in (*above, folder, *folder.rglob("*")):
        place.chmod(0o755)


def capped(most: int, pipe: str) -> None:
    """No file of this process may grow beyond `most` bytes, as on a full disk; it speaks into a pipe, which has room.

    Needs no rights, in contrast to a small disk of its own, and hits any byte.
    """
    descriptor = os.open(pipe, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def read_only(folder: str) -> None:
    """A folder that this process can read but not write: a mount for root, whom permissions do not bind, else modes."""
    if os.getuid() != 0:
        os.chmod(folder, 0o555)
        return
    libc, place = ctypes.CDLL(None, use_errno=True), os.fsencode(folder)
    steps = (
        lambda: libc.unshare(0x00020000),  # CLONE_NEWNS
        lambda: libc.mount(None, b"/", None, 1 << 18 | 1 << 14, None),  # MS_PRIVATE | MS_REC
        lambda: libc.mount(place, place, None, 1 << 12, None),  # MS_BIND
        lambda: libc.mount(None, place, None, 1 << 5 | 1 << 12 | 1, None),  # MS_REMOUNT | MS_BIND | MS_RDONLY
    )
    if any(step() != 0 for step in steps):
        os._exit(77)


def vanishing(folder: str) -> None:
    """A folder is removed over and over while the process runs."""

    def remove() -> None:
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.002)

    threading.Thread(target=remove, daemon=True).start()


def interrupted(folder: str) -> None:
    """Ctrl-C comes when the first file below a folder is opened for writing."""
    left = [signal.SIGINT]

    def noticed(event: str, facts: tuple[Any, ...]) -> None:
        if event == "open" and left and str(facts[0]).startswith(f"{folder}/") and facts[2] & (os.O_WRONLY | os.O_RDWR):
            os.kill(os.getpid(), left.pop())

    sys.addaudithook(noticed)


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A real disk of `size` bytes at the folder `place`. Skips the test where this user may not mount one."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this test mounts a file system, which this user may not")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


HIDE = "the folder is renamed"
CHANGES: dict[str, Callable[[Path], object]] = {
    HIDE: lambda photos: photos.rename(f"{photos}-hidden"),
    "the folder is removed": shutil.rmtree,
    "a class is removed": lambda photos: shutil.rmtree(photos / "red"),
    "a class is renamed": lambda photos: (photos / "red").rename(photos / "rouge"),
    "a class is added": lambda photos: shutil.copytree(photos / "red", photos / "zebra"),
    "an image is removed": lambda photos: (photos / "red" / "3.png").unlink(),
    "an image is added": lambda photos: shutil.copy(photos / "red" / "3.png", photos / "red" / "99.png"),
    "an image is cut": lambda photos: os.truncate(photos / "red" / "3.png", 40),
    "an image is emptied": lambda photos: os.truncate(photos / "red" / "3.png", 0),
    "an image grows": lambda photos: os.truncate(photos / "red" / "3.png", 10**6),
    "an image is replaced": lambda photos: Image.new("L", (30, 400)).save(photos / "red" / "3.png"),
    "an image becomes a folder": lambda photos: _anew(photos / "red" / "3.png").mkdir(),
    "an image becomes a loop": lambda photos: _anew(photos / "red" / "3.png").symlink_to("3.png"),
    "an image becomes a pipe": lambda photos: os.mkfifo(_anew(photos / "red" / "3.png")),
    "an image becomes endless": lambda photos: _anew(photos / "red" / "3.png").symlink_to("/dev/zero"),
}
"""What happens to a folder of photographs."""


def _anew(path: Path) -> Path:
    path.unlink()
    return path


def changing(change: str, photos: str) -> None:
    """The photographs change when their list is read and the first image is not: see `CHANGES`."""
    from vitrail.data.loading import prefetch

    original, left = prefetch.ThreadPool.__init__, [change]

    def begin(*arguments: Any) -> None:
        if left:
            CHANGES[left.pop()](Path(photos))
        original(*arguments)

    prefetch.ThreadPool.__init__ = begin
