"""Open one task of VTAB-1k with the splits `train800`, `val200` and `test`, from any layout of its images.

The data of a task are searched below one folder: first as TensorFlow Datasets prepares them, then as a folder with
index lists, then in any layout that can be read. Only the first two are VTAB-1k's own images. From other data 1,000
images are drawn, and a warning says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vitrail.data.benchmarks.vtab_tasks import TRAIN, VALIDATION, VtabTask, image_range, task_named
from vitrail.data.images.decode import decode
from vitrail.data.item import ROLES, DataSet, Findings, IndexedSource, Item, Subset
from vitrail.data.settings import Columns
from vitrail.data.sources.lists import PARTS, WHOLE, index_lists, read_index_lists
from vitrail.data.sources.tfds import prepared_folders, read_tfds, version_of
from vitrail.data.split import subset
from vitrail.errors import DataError, UsageError

PREFIX = "vtab:"
"""Prefix of paths "vtab:TASK:DIR"."""
HUB = "hub"
"""Value of DIR for the copy on the hub."""
OpenTask = Callable[[str, Columns], DataSet]
"""Opens any data set: (path, image column, label column)."""


class TaskLocation(NamedTuple):
    """Path and layout of the data of a task."""

    kind: Literal["tfds", "lists", "other"]
    path: str


def read_task(path: str, open_any: OpenTask) -> DataSet:
    """Open "vtab:TASK:DIR". Raises UsageError for an unknown task, DataError for missing or damaged data."""
    name, _, root = path.removeprefix(PREFIX).partition(":")
    task = task_named(name)
    if not root:
        raise UsageError(f"{path!r} does not name the folder of the data. Write vtab:{name}:DIR, or vtab:{name}:{HUB}")
    place = locate(task, root)
    if place is None:
        prepared, folders = (task.entry.tfds or "").replace(":", "/"), " or ".join(_folders(task))
        raise DataError(
            f"no data for {task.name} in {root}: expected is {prepared} as TensorFlow Datasets prepares it, or a "
            f"folder {folders}. The data come from: {task.entry.source}"
        )
    if place.kind == "tfds":
        found = _prepared(task, Path(place.path))
    elif place.kind == "lists":
        found = read_index_lists(Path(place.path), index_lists(Path(place.path)))
    else:
        columns = Columns(task.entry.image_column, task.entry.label_column) if root == HUB else Columns()
        found = _drawn(task, open_any(place.path, columns), place.path)
    if "test" not in found.splits:
        raise DataError(f"{place.path} has no test.txt, so there is no test set for {task.name}")
    found.findings.warnings += _differences(task, found)
    return found


def locate(task: VtabTask, root: str | Path) -> TaskLocation | None:
    """Return where the data of a task are below `root`; None if they are not there.

    Raises DataError if they are there in a version that is not the benchmark's.
    """
    if str(root) == HUB:
        plain = task.entry.hub is not None and task.label.keys == ("label",)
        return TaskLocation("other", f"hf://datasets/{task.entry.hub}") if plain else None
    folder = Path(root).expanduser()
    others: list[str] = []
    name, _, version = (task.entry.tfds or "").partition(":")
    if (folder / name).is_dir():
        versions = prepared_folders(folder / name)
        if fitting := [child for child in versions if fnmatch.fnmatch(child.name, version)]:
            return TaskLocation("tfds", str(max(fitting, key=version_of)))
        others = [child.name for child in versions]
    there = [folder / each for each in _folders(task) if (folder / each).is_dir()]
    there = [child for child in there if not prepared_folders(child)]
    for child in there:
        if index_lists(child):
            return TaskLocation("lists", str(child))
    if there:
        return TaskLocation("other", str(there[0]))
    if others:
        found = ", ".join(others)
        raise DataError(f"{folder / name} has version {found}, but {task.name} of VTAB-1k needs {version}")
    return None


def _folders(task: VtabTask) -> list[str]:
    """Return the possible names of a task's folder. The data set's name counts only if the data set has one label."""
    own = [task.dataset] if task.label.keys == ("label",) else []
    return list(dict.fromkeys((*task.folders, task.name, *own)))


def _prepared(task: VtabTask, folder: Path) -> DataSet:
    """Return the regions of the task from a folder that TensorFlow Datasets prepared."""
    found = read_tfds(folder, Columns("image"), label=task.label)
    counts = {name: len(source) for name, source in found.splits.items()}
    splits: dict[str, IndexedSource] = {}
    for name, region in task.regions.items():
        images = image_range(region, counts)
        source, rows = found.splits[images.split], np.arange(images.start, images.stop)
        splits[name] = Subset(source, rows) if task.scale == 1 else Scaled(source, rows, task.scale)
    return DataSet(splits, found.findings)


class Scaled(Subset):
    """The images of another source with all pixel values multiplied by a factor, up to 255."""

    def __init__(self, source: IndexedSource, indices: np.ndarray, factor: int) -> None:
        super().__init__(source, indices)
        self._factor = factor

    def __getitem__(self, index: int) -> Item:
        item = super().__getitem__(index)
        image = decode(item.image) if isinstance(item.image, bytes) else item.image
        scaled = np.minimum(image.astype(np.int32) * self._factor, 255).astype(np.uint8)
        return item._replace(image=scaled)


def _drawn(task: VtabTask, found: DataSet, path: str) -> DataSet:
    """Return 800 + 200 images drawn from a copy that does not say which images are VTAB-1k's, and its own test set."""
    if all(name in found.splits for name in (*PARTS, "test")):
        return DataSet({name: found.splits[name] for name in (*PARTS, "test")}, found.findings)
    roles = {role: [name for name in names if name in found.splits] for role, names in ROLES.items()}
    if not roles["train"] or not roles["test"]:
        listing = ", ".join(map(repr, found.splits))
        raise DataError(f"{path} has the splits {listing}, but {task.name} needs a training split and a test split")
    train, test = found.splits[roles["train"][0]], found.splits[roles["test"][0]]
    both = subset(train, min(TRAIN + VALIDATION, len(train)), seed=0)
    chosen = Subset(train, both)
    first = subset(chosen, max(len(chosen) * TRAIN // (TRAIN + VALIDATION), 1), seed=0)
    rest = np.setdiff1d(np.arange(len(chosen)), first)
    splits: dict[str, IndexedSource] = {
        "train800": Subset(train, both[first]),
        "val200": Subset(train, both[rest]),
        "test": Subset(test, class_names=train.class_names),
    }
    warning = (
        f"{len(chosen):,} images are drawn, the same ones each time. They are not those of VTAB-1k, because this copy "
        "does not have its order"
    )
    return DataSet(splits, Findings(found.findings.kind, dict(found.findings.ignored), warnings=[warning]))


def _differences(task: VtabTask, found: DataSet) -> list[str]:
    """Return the differences between the data and the benchmark as sentences."""
    trained = sum(len(source) for name, source in found.splits.items() if name in (*PARTS, WHOLE))
    classes = len(next(iter(found.splits.values())).class_names)
    lines = []
    if trained != TRAIN + VALIDATION:
        lines.append(f"{trained:,} training images, not {TRAIN + VALIDATION:,}")
    if len(found.splits["test"]) != task.test_images:
        lines.append(f"{len(found.splits['test']):,} test images, not {task.test_images:,}")
    if classes != task.classes:
        lines.append(f"{classes} classes, not {task.classes}")
    return lines
