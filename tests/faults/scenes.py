"""What the tests of faults start from: small photographs, a run that takes a second, and ways to break things."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tyro
from PIL import Image

import vitrail

SHORT = [
    *("--model", "Ti/2", "--vit.width", "16", "--vit.depth", "1", "--vit.heads", "2", "--vit.mlp-dim", "32"),
    *("--recipe", "scratch-small", "--image-size", "8", "--batch-size", "8", "--precision", "float32"),
    *("--device", "cpu", "--duration"),
]
"""Flags of a training run on `draw`n images; its duration follows."""


def draw(folder: Path, *, classes: tuple[str, ...] = ("blue", "red"), count: int = 8, seed: int = 0) -> Path:
    """Write class folders of small pictures, the classes blue and red by turns."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (10, 10, 3), dtype=np.uint8)
            pixels[..., 2 - 2 * (number % 2)] += 190
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


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
    for module in (tyro, vitrail):
        closed = [str(place) for place in Path(str(module.__file__)).parents if not place.stat().st_mode & 0o001]
        if closed and os.getuid() == 0:
            pytest.skip(f"{closed[0]} is its owner's alone, so no other user can import {module.__name__}")
    above = [place for place in folder.parents if Path(tempfile.gettempdir()).resolve() in place.parents]
    for place in (*above, folder, *folder.rglob("*")):
        place.chmod(0o755)
