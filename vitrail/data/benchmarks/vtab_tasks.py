"""VTAB-1k: its 19 tasks, as the benchmark's code defines them. Torch-free.

Zhai et al., "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark"
(arXiv 1910.04867) and google-research/task_adaptation: 800 training images, 200 validation images, both together for
the final run, and the whole test set. `vtab.toml` holds one table per task, with the fields of `VtabTask`.

Parts of splits are written as in TensorFlow Datasets (`train[:800]`), and a part of a part is possible
(`train[90%:][:200]`). The numbers are places in the files that TensorFlow Datasets writes, in the version that the
catalogue names. No other copy of a data set has that order, which is why people share lists of images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from vitrail.data.benchmarks.catalog import CATALOG, PublishedDataSet, packaged_tables
from vitrail.errors import DataError, UsageError, did_you_mean

_PART = re.compile(r"(?P<split>\w+)(?P<slices>(?:\[[^\[\]]*\])*)")
_SLICE = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")


class ImageRange(NamedTuple):
    """The images with numbers `start` to `stop` - 1 of a split."""

    split: str
    start: int
    stop: int


def image_range(region: str, counts: Mapping[str, int]) -> ImageRange:
    """Return the images of a region. `counts` maps each existing split to its number of images.

    A percentage is rounded to the nearest image, ties to even, as in `tfds.core.ReadInstruction` by default.
    Raises UsageError for text that is not a region and for an unknown split. Raises DataError if a split has too few
    images, because the region was written for another data set.
    """
    match = _PART.fullmatch(region)
    if not match or len(_SLICE.findall(match["slices"])) != match["slices"].count("["):
        raise UsageError(f"{region!r} is not a part of a split. Write train, train[:800] or train[90%:]")
    split = match["split"]
    if split not in counts:
        known = ", ".join(counts)
        raise UsageError(f"{region!r} names a split {split!r}, but there are {known}.{did_you_mean(split, counts)}")
    start, stop = 0, counts[split]
    for begin, end in _SLICE.findall(match["slices"]):
        count = stop - start
        first, last = (_bound(text, count, default) for text, default in ((begin, 0), (end, count)))
        if not (0 <= first <= count and 0 <= last <= count):
            raise DataError(f"{region!r} needs more images than split {split!r} has: [{begin}:{end}] of {count:,}")
        start, stop = start + first, start + max(first, last)
    return ImageRange(split, start, stop)


def _bound(text: str, count: int, default: int) -> int:
    if not text:
        return default
    value = round(int(text[:-1]) * count / 100) if text.endswith("%") else int(text)
    return value + count if value < 0 else value


Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")
TRAIN, VALIDATION = 800, 200

LabelFunction = Callable[[Mapping[str, np.ndarray]], int]


@dataclass(frozen=True)
class TaskLabel:
    """How the label of a task is computed from the features stored with an image."""

    keys: tuple[str, ...] = ("label",)
    """Names of the features in the files."""
    compute: LabelFunction | None = None
    """Function: name of a feature -> its values, to the class; None: the first value of the first feature."""
    names: tuple[str, ...] = ()
    """Names of the classes; () for those of the data set."""


def count_objects(features: Mapping[str, np.ndarray]) -> int:
    """Return the number of objects (CLEVR) minus 3, the smallest number of objects in an image."""
    return len(features["objects/size"]) - 3


def nearest_object(features: Mapping[str, np.ndarray]) -> int:
    """Return the class, of six, of the distance of the nearest object (CLEVR): the third pixel coordinate."""
    return _class_of(features["objects/pixel_coords"].reshape(-1, 3)[:, 2].min(), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0))


def nearest_vehicle(features: Mapping[str, np.ndarray]) -> int:
    """Return the class of the distance ahead, in metres, of the nearest car, van or truck (KITTI); 3: no vehicle."""
    ahead = features["objects/location"].reshape(-1, 3)[:, 2]
    vehicles = ahead[features["objects/type"] < 3]
    return _class_of(min(vehicles.tolist(), default=1000.0), (-100.0, 8.0, 20.0, 999.0))


def _class_of(distance: float, thresholds: tuple[float, ...]) -> int:
    """Return the index of the last threshold that is smaller than a distance."""
    return int(np.flatnonzero(np.array(thresholds) < distance)[-1])


def in_bins(key: str, values: int, bins: int) -> TaskLabel:
    """Return a label that joins neighbours among `values` classes into `bins` classes: value // (values / bins)."""
    width = values / bins
    return TaskLabel((key,), lambda features: int(features[key][0] // width), tuple(map(str, range(bins))))


@dataclass(frozen=True)
class VtabTask:
    """One of the 19 tasks."""

    name: str
    title: str
    """Column in the paper's Table 9."""
    group: Group
    dataset: str
    """Name in the catalogue (`vitrail.data.benchmarks.catalog`)."""
    classes: int
    """Number of classes."""
    test_images: int
    """Number of test images."""
    folders: list[str]
    """Names of the folder in copies with index lists."""
    label: TaskLabel
    validation: str = "validation[:200]"
    """Region of the 200 validation images."""
    test: str = "test"
    """Region of the test images."""
    scale: int = 1
    """Factor of the pixel values; those of dSprites are 0 and 1."""
    crop: bool = True
    """Whether training images may be cropped at random. They may not if the label may depend on their border."""
    flip: bool = True
    """Whether training images may be mirrored. They may not if the label is a digit or depends on left and right."""

    @property
    def entry(self) -> PublishedDataSet:
        """The data set."""
        return CATALOG[self.dataset]

    @property
    def regions(self) -> dict[str, str]:
        """Split of the task -> region of the data set's own splits."""
        return {"train800": f"train[:{TRAIN}]", "val200": self.validation, "test": self.test}


LABELS = {
    "clevr-count": TaskLabel(("objects/size",), count_objects, tuple(map(str, range(3, 11)))),
    "clevr-distance": TaskLabel(
        ("objects/pixel_coords",),
        nearest_object,
        ("up to 8", "8 to 8.5", "8.5 to 9", "9 to 9.5", "9.5 to 10", "above 10"),
    ),
    "dsprites-location": in_bins("label_x_position", 32, 16),
    "dsprites-orientation": in_bins("label_orientation", 40, 16),
    "kitti-distance": TaskLabel(
        ("objects/type", "objects/location"),
        nearest_vehicle,
        ("up to 8 m", "8 to 20 m", "above 20 m", "no vehicle"),
    ),
    "smallnorb-azimuth": TaskLabel(("label_azimuth",)),
    "smallnorb-elevation": TaskLabel(("label_elevation",)),
}
"""Task -> its label, for the tasks whose data set has several labels."""

TASKS = {
    name: VtabTask(name=name, label=LABELS.get(name, TaskLabel()), **fields)
    for name, fields in packaged_tables("vtab.toml").items()
}
"""Name -> task, in the order of Table 9."""


def task_named(name: str) -> VtabTask:
    """Return a task by its name. Raises UsageError, which names the nearest valid name."""
    if name not in TASKS:
        raise UsageError(f"VTAB-1k has no task {name!r}.{did_you_mean(name, TASKS)} Its tasks: {', '.join(TASKS)}")
    return TASKS[name]
