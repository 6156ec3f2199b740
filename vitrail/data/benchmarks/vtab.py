"""VTAB-1k: its 19 tasks, as the benchmark's code defines them. Torch-free.

Zhai et al., "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark"
(arXiv 1910.04867) and google-research/task_adaptation: 800 training images, 200 validation images, both together for
the final run, and the whole test set. Split regions are written as TensorFlow Datasets writes them
(`train[:800]+validation[:200]`), and a part of a part is possible (`train[90%:][:200]`). The images
are named by their place in the files that TensorFlow Datasets writes, in the version given. No other copy of a data
set has that order, which is why people share lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.data.benchmarks.catalog import CATALOG, Entry
from vitrail.errors import DataError, UsageError, did_you_mean

_PART = re.compile(r"(?P<split>\w+)(?P<slices>(?:\[[^\[\]]*\])*)")
_SLICE = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")


@dataclass(frozen=True)
class Range:
    """Images number `start` to `stop` - 1 of a split."""

    split: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def ranges(region: str, counts: Mapping[str, int]) -> list[Range]:
    """Return the images of a region; `counts` maps each existing split to its number of images.

    A percentage is rounded to the nearest image, ties to even, as `tfds.core.ReadInstruction` does by default.
    Raises UsageError for text that is no region or for an unknown split, and DataError if the split has
    too few images: such a data set is not the one that the region was written for.
    """
    return [_range(part.strip(), counts, region) for part in region.split("+")]


def _range(part: str, counts: Mapping[str, int], region: str) -> Range:
    match = _PART.fullmatch(part)
    if not match or len(_SLICE.findall(match["slices"])) != match["slices"].count("["):
        raise UsageError(f"{part!r} in {region!r} is no part of a split: write train, train[:800] or train[90%:]")
    split = match["split"]
    if split not in counts:
        known = ", ".join(counts)
        raise UsageError(f"no split {split!r} for {region!r}: there are {known}.{did_you_mean(split, counts)}")
    start, stop = 0, counts[split]
    for begin, end in _SLICE.findall(match["slices"]):
        count = stop - start
        first, last = (_bound(text, count, default) for text, default in ((begin, 0), (end, count)))
        if not (0 <= first <= count and 0 <= last <= count):
            raise DataError(f"{region!r} needs more images than split {split!r} has: [{begin}:{end}] of {count:,}")
        start, stop = start + first, start + max(first, last)
    return Range(split, start, stop)


def _bound(text: str, count: int, default: int) -> int:
    if not text:
        return default
    value = round(int(text[:-1]) * count / 100) if text.endswith("%") else int(text)
    return value + count if value < 0 else value


Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")
TRAIN, VALIDATION = 800, 200

Compute = Callable[[Mapping[str, np.ndarray]], int]


@dataclass(frozen=True)
class Label:
    """How the label of a task is computed from the features stored with an image."""

    keys: tuple[str, ...] = ("label",)
    """Features it is computed from, as the files name them."""
    compute: Compute | None = None
    """From the features' values, a list of numbers each; None: the first value of the first one."""
    names: tuple[str, ...] = ()
    """Classes; () those of the data set."""


def count_objects(features: Mapping[str, np.ndarray]) -> int:
    """CLEVR: how many objects there are, less 3: there are never fewer."""
    return len(features["objects/size"]) - 3


def nearest_object(features: Mapping[str, np.ndarray]) -> int:
    """CLEVR: the distance of the nearest object (third of its pixel coordinates), in six classes."""
    return _class_of(features["objects/pixel_coords"].reshape(-1, 3)[:, 2].min(), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0))


def nearest_vehicle(features: Mapping[str, np.ndarray]) -> int:
    """KITTI: the distance ahead, in metres, of the nearest car, van or truck, in three classes; 3 is none there."""
    ahead = features["objects/location"].reshape(-1, 3)[:, 2]
    vehicles = ahead[features["objects/type"] < 3]
    return _class_of(min(vehicles.tolist(), default=1000.0), (-100.0, 8.0, 20.0, 999.0))


def _class_of(distance: float, thresholds: tuple[float, ...]) -> int:
    """Return the last threshold below a distance; a distance on a threshold is not above it."""
    return int(np.flatnonzero(np.array(thresholds) < distance)[-1])


def binned(key: str, values: int, bins: int) -> Label:
    """Return the label that joins the neighbours among `values` classes to `bins`: value // (values / bins)."""
    width = values / bins
    return Label((key,), lambda features: int(features[key][0] // width), tuple(map(str, range(bins))))


@dataclass(frozen=True)
class Task:
    """One of the 19 tasks."""

    name: str
    title: str
    """Its column in the paper's Table 9."""
    group: Group
    dataset: str
    """Name in the catalogue (`vitrail.data.benchmarks.catalog`)."""
    classes: int
    test_images: int
    folders: tuple[str, ...]
    """Folders that copies with index lists have it in."""
    validation: str = "validation[:200]"
    test: str = "test"
    label: Label = Label()
    scale: int = 1
    """Factor of the pixel values: those of dSprites are 0 and 1."""
    crop: bool = True
    """Whether training images may be cropped at random; not if the label may depend on their border."""
    flip: bool = True
    """Whether training images may be mirrored; not if the label depends on left and right, or on digits."""

    @property
    def train(self) -> str:
        """The region of the 800 training images."""
        return f"train[:{TRAIN}]"

    @property
    def entry(self) -> Entry:
        """The data set."""
        return CATALOG[self.dataset]

    @property
    def regions(self) -> dict[str, str]:
        """Split -> region of the data set's own splits."""
        return {"train800": self.train, "val200": self.validation, "test": self.test}


LAST_TENTH, LAST_FIFTH, THIRD_FIFTH = "train[90%:][:200]", "train[80%:][:200]", "train[60%:][:200]"
# the benchmark's code cuts at 90 * count // 100; for every count there is, that is the nearest image too

_TASKS = (
    Task("caltech101", "Caltech101", "natural", "caltech101", 102, 6_084, ("caltech101",), LAST_TENTH),
    Task("cifar100", "CIFAR-100", "natural", "cifar100", 100, 10_000, ("cifar", "cifar100"), LAST_TENTH),
    Task("dtd", "DTD", "natural", "dtd", 47, 1_880, ("dtd",)),
    Task("flowers102", "Flowers102", "natural", "flowers102", 102, 6_149, ("oxford_flowers102", "flowers102")),
    Task("pets", "Pets", "natural", "pets", 37, 3_669, ("oxford_iiit_pet", "pets"), LAST_FIFTH),
    Task("sun397", "Sun397", "natural", "sun397", 397, 21_750, ("sun397",)),
    Task("svhn", "SVHN", "natural", "svhn", 10, 26_032, ("svhn",), LAST_TENTH, flip=False),
    Task("camelyon", "Camelyon", "specialized", "patch_camelyon", 2, 32_768, ("patch_camelyon",)),
    Task("eurosat", "EuroSAT", "specialized", "eurosat", 10, 5_400, ("eurosat",), THIRD_FIFTH, "train[80%:]"),
    Task("resisc45", "Resisc45", "specialized", "resisc45", 45, 6_300, ("resisc45",), THIRD_FIFTH, "train[80%:]"),
    Task(
        "retinopathy",
        "Retinopathy",
        "specialized",
        "retinopathy",
        5,
        42_670,
        ("diabetic_retinopathy", "retinopathy"),
    ),
    Task(
        "clevr-count",
        "Clevr-Count",
        "structured",
        "clevr",
        8,
        15_000,
        ("clevr_count", "clevr_count_all"),
        LAST_TENTH,
        "validation",
        Label(("objects/size",), count_objects, tuple(map(str, range(3, 11)))),
        crop=False,
    ),
    Task(
        "clevr-distance",
        "Clevr-Dist",
        "structured",
        "clevr",
        6,
        15_000,
        ("clevr_dist", "clevr_closest_object_distance"),
        LAST_TENTH,
        "validation",
        Label(
            ("objects/pixel_coords",),
            nearest_object,
            ("up to 8", "8 to 8.5", "8.5 to 9", "9 to 9.5", "9.5 to 10", "above 10"),
        ),
        crop=False,
    ),
    Task("dmlab", "DMLab", "structured", "dmlab", 6, 22_735, ("dmlab",), crop=False),
    Task(
        "dsprites-location",
        "dSpr-Loc",
        "structured",
        "dsprites",
        16,
        73_728,
        ("dsprites_loc", "dsprites_label_x_position"),
        LAST_FIFTH,
        "train[90%:]",
        binned("label_x_position", 32, 16),
        scale=255,
        crop=False,
        flip=False,
    ),
    Task(
        "dsprites-orientation",
        "dSpr-Ori",
        "structured",
        "dsprites",
        16,
        73_728,
        ("dsprites_ori", "dsprites_label_orientation"),
        LAST_FIFTH,
        "train[90%:]",
        binned("label_orientation", 40, 16),
        scale=255,
        flip=False,
    ),
    Task(
        "kitti-distance",
        "KITTI-Dist",
        "structured",
        "kitti",
        4,
        711,
        ("kitti", "kitti_closest_vehicle_distance"),
        label=Label(
            ("objects/type", "objects/location"),
            nearest_vehicle,
            ("up to 8 m", "8 to 20 m", "above 20 m", "no vehicle"),
        ),
        crop=False,
    ),
    Task(
        "smallnorb-azimuth",
        "sNORB-Azim",
        "structured",
        "smallnorb",
        18,
        12_150,
        ("smallnorb_azi", "smallnorb_label_azimuth"),
        "test[:200]",
        "test[50%:]",
        Label(("label_azimuth",)),
        flip=False,
    ),
    Task(
        "smallnorb-elevation",
        "sNORB-Elev",
        "structured",
        "smallnorb",
        9,
        12_150,
        ("smallnorb_ele", "smallnorb_label_elevation"),
        "test[:200]",
        "test[50%:]",
        Label(("label_elevation",)),
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in _TASKS}
"""Name -> task, in the order of Table 9."""


def task_named(name: str) -> Task:
    """Return the task called `name`. Raises UsageError with the nearest valid name."""
    if name not in TASKS:
        raise UsageError(f"VTAB-1k has no task {name!r}.{did_you_mean(name, TASKS)} Its tasks: {', '.join(TASKS)}")
    return TASKS[name]
