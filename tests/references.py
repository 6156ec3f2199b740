"""What many tests look at and none changes: made once a session, by the first process that asks, for all of them.

A test that writes takes a copy. At the end of the session every file is as it was when it was made, or the session
fails and names the file.
"""

from __future__ import annotations

import csv
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image
from tiny_runs import tiny_run

import vitrail
from vitrail.training import loop
from vitrail.training.result import Result

FOLDER = "VITRAIL_TEST_REFERENCES"
"""Environment variable with the folder of this session, which its processes inherit."""
CHANGED = pytest.StashKey[list[str]]()


def once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of this name, which `make(folder)` has filled in whichever process asked first."""
    place = Path(os.environ[FOLDER]) / name
    record = place.with_name(f"{name}.json")
    with FileLock(place.with_name(f"{name}.lock")):
        if not record.exists():
            shutil.rmtree(place, ignore_errors=True)  # of one that failed
            place.mkdir()
            make(place)
            record.write_text(json.dumps(_files(place)))
    return place


def copy_of(reference: Path, folder: Path) -> Path:
    """Return a copy of a reference in `folder`, for a test that writes."""
    return Path(shutil.copytree(reference, folder / reference.name))


def _files(place: Path) -> dict[str, list[int]]:
    """Name of each file -> its size and the time at which it was written."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found[str(path.relative_to(place))] = [stat.st_size, stat.st_mtime_ns]
    return found


def changed_files() -> list[str]:
    """Return the files of this session's references that are not as they were when they were made."""
    changed = []
    for record in sorted(Path(os.environ[FOLDER]).glob("*.json")):
        made, found = json.loads(record.read_text()), _files(record.with_suffix(""))
        names = {name for name in made.keys() | found.keys() if made.get(name) != found.get(name)}
        changed += [f"{record.stem}/{name}" for name in sorted(names)]
    return changed


# the session


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder; processes of xdist inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="vitrail-references-")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session where a test has changed what others look at, too."""
    if hasattr(session.config, "workerinput"):
        return
    changed = changed_files()
    session.config.stash[CHANGED] = changed
    if changed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name what was changed."""
    if changed := config.stash.get(CHANGED, []):
        terminalreporter.section("a test changed what others look at, too (tests/references.py); give it a copy")
        for name in changed[:20]:
            terminalreporter.write_line(name)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


# images


def draw(
    folder: Path, *, classes: tuple[str, ...] = ("blue", "red"), count: int = 12, side: int = 10, seed: int = 0
) -> Path:
    """Write class folders of small pictures, the classes blue and red by turns."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (side, side, 3), dtype=np.uint8)
            pixels[..., 2 - 2 * (number % 2)] += 190
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="session")
def photos() -> Path:
    """A folder of two classes, blue and red, of 12 photographs each."""
    return once("photos", lambda place: draw(place / "photos")) / "photos"


@pytest.fixture(scope="session")
def arrays() -> Path:
    """A file of 40 images of 8 x 8 pixels as arrays, dark and bright ones in turn: two classes."""

    def make(place: Path) -> None:
        labels = np.arange(40) % 2
        pixels = np.full((40, 8, 8, 3), 90, np.uint8) + 80 * labels[:, None, None, None].astype(np.uint8)
        np.savez(place / "images.npz", x_train=pixels, y_train=labels)

    return once("arrays", make) / "images.npz"


PHOTOS_RUN: dict[str, Any] = dict(
    model="Ti/2",
    vit=dict(width=16, depth=1, heads=2, mlp_dim=32),
    image_size=8,
    batch_size=16,
    duration="30 steps",
    evaluate_every="4 steps",
    checkpoint_every="4 steps",
)


@pytest.fixture(scope="session")
def photos_run(photos: Path) -> Path:
    """A folder in which `vitrail train` was run on `photos`: train-1 with a report, and what `result_of` reads."""

    def make(place: Path) -> None:
        result = vitrail.train(photos, recipe="scratch-small", name="train", out=str(place), lr=3e-3, **PHOTOS_RUN)
        (place / "result").write_bytes(pickle.dumps(result))

    return once("photos-run", make)


def result_of(place: Path) -> Result:
    """Return what the run of a reference came to."""
    result: Result = pickle.loads((place / "result").read_bytes())
    return result


@pytest.fixture(scope="session")
def digits_run() -> Path:
    """The folder of `tiny_run`: 16 steps on handwritten digits."""
    return next(once("digits-run", lambda place: loop.fit(tiny_run(place))).iterdir())


COLOURS = ("red", "green", "blue")


def scenes(folder: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """Images 8 x 8 with a bright channel for each label, and noise; some have no label. Returns (name, labels)."""
    rng = np.random.default_rng(seed)
    rows = []
    folder.mkdir(parents=True)
    for number in range(count):
        marks = rng.random(3) < 0.4
        pixels = rng.integers(0, 90, (8, 8, 3)) + 130 * marks
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        names = [name for name, there in zip(COLOURS, marks, strict=True) if there]
        rows.append((f"{folder.name}/{number}.png", "|".join(names)))
    return rows


def write_table(path: Path, rows: list[tuple[str, ...]]) -> Path:
    """Write a CSV file."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture(scope="session")
def labelled_scenes() -> Path:
    """A folder of images with several labels: train.csv of 160 and test.csv of 40, beside their images."""

    def make(place: Path) -> None:
        for split, count in (("train", 160), ("test", 40)):
            write_table(place / f"{split}.csv", [("path", "labels"), *scenes(place / split, count, count)])

    return once("labelled-scenes", make)


def write_levels(folder: Path, training: int = 72, test: int = 24) -> Path:
    """Write levels.csv, a table of grey images with their mean level, and the excess of red in other units."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    rows: list[tuple[str, ...]] = [("path", "level", "red", "split")]
    for number in range(training + test):
        level, red = rng.integers(60, 180), rng.integers(0, 60)
        pixels = np.full((8, 8, 3), level, np.uint8)
        pixels[..., 0] += np.uint8(red)
        Image.fromarray(pixels).save(folder / f"images/{number}.png")
        rows.append(
            (f"images/{number}.png", str(level), str(1000 + 10 * red), "train" if number < training else "test")
        )
    return write_table(folder / "levels.csv", rows)


def write_answers(folder: Path, training: int = 72, test: int = 24) -> Path:
    """Write answers.csv, a table of images with four answers, of which every sixth cell is empty, or all of a row.

    "colour" is the brightest channel, "tags" says which others are not black, and "level" is the brightest value,
    in other units.
    """
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    rows: list[tuple[str, ...]] = [("path", "colour", "tags", "level", "lit", "split")]
    for number in range(training + test):
        colour, level = int(rng.integers(3)), int(rng.integers(120, 250))
        others = rng.random(3) < 0.5
        pixels = rng.integers(0, 20, (8, 8, 3)) + 80 * others
        pixels[..., colour] = level
        tags = [name for name, there in zip(COLOURS, others, strict=True) if there] or ["none lit"]
        cells = [COLOURS[colour], "|".join(tags), f"{10 * level}.5", "yes" if level > 180 else "no"]
        cells = ["" if rng.random() < 1 / 6 or number == 3 else cell for cell in cells]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{number}.png")
        rows.append((f"images/{number}.png", *cells, "train" if number < training else "test"))
    return write_table(folder / "answers.csv", rows)
