"""The data sets of a study by the names that its stages use: one divided by classes, or those of the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.sets import known, one_label
from vitrail.data.roles import split_data_set
from vitrail.data.settings import Data
from vitrail.data.sources.lists import write_list
from vitrail.data.sources.open import open_data, open_path
from vitrail.data.split import hold_out
from vitrail.errors import DataError, UsageError
from vitrail.studies.laptop import HOLDOUT
from vitrail.studies.study import LaptopData

IMAGENET = "imagenet"
"""The data set on which the paper measures few-shot accuracy."""
DIVIDED = frozenset(("up", "down", "all"))
"""Names of the parts of the data set that is divided by classes, and of the whole."""
DOWN = 0.2
"""Share of the classes that pre-training does not see."""
TEST = 1 / 6
"""Share of the images that become test images if the data have no test split."""


@dataclass(frozen=True)
class Sets:
    """Data sets by name, and the images on which features are measured."""

    paths: Mapping[str, str]
    """Name -> the data, in any form that `vitrail train` takes."""
    images: int
    """Number of images to pre-train on at laptop scale, without those that are held out; 0 at the paper's scale."""
    open_probe: Callable[[], tuple[IndexedSource, IndexedSource]]
    """Function that opens the training images, from which shots are drawn, and the test images."""

    def path(self, name: str) -> str:
        """Return the data of a name. Raises DataError if they are absent, which says where they come from."""
        if name not in self.paths:
            where = f" Its source: {CATALOG[name].source}" if name in CATALOG else ""
            raise DataError(f"the data set {name} is absent: it would be a folder of this name in --data.{where}")
        return self.paths[name]

    @property
    def given(self) -> LaptopData:
        """What the grids at laptop scale depend on."""
        return LaptopData(self.images, ("down", *(name for name in self.paths if name not in DIVIDED)))

    @cached_property
    def probe(self) -> tuple[IndexedSource, IndexedSource]:
        """The training images, from which shots are drawn, and the test images. Raises the errors of opening them."""
        return self.open_probe()


def divide(data: str, folder: Path, seed: int = 0, more: Sequence[str] = ()) -> Sets:
    """Divide a data set by classes and write lists of the images of both parts into `folder`.

    A fifth of the classes, drawn by the seed, is left out of pre-training ("up"), like the paper's transfer data sets
    ("down"). `more` are other data sets to transfer to. Raises DataError for fewer than four classes, and the errors
    of opening the data.
    """
    found = open_path(data)
    splits = split_data_set(found, Data(path=data, holdout=0.0), seed)
    names = splits.class_names
    if len(names) < 4:
        raise DataError(f"{data} has {len(names)} classes. A study needs at least 4: most to pre-train on, 2 to test")
    order = np.random.default_rng(seed).permutation(len(names))
    few = np.sort(order[: max(round(DOWN * len(names)), 2)])
    train, test = splits.train, splits.test
    if test is None or not known(test.labels).any():
        rest, held_out = hold_out(train, TEST, seed)
        train, test = Subset(train, rest), Subset(train, held_out)
    folder.mkdir(parents=True, exist_ok=True)
    many = np.setdiff1d(np.arange(len(names)), few)
    up, down = ({"train": _of(train, part), "test": _of(test, part)} for part in (many, few))
    write_list(folder / "up.csv", data, found, up)
    write_list(folder / "down.csv", data, found, down)
    train, test = (Subset(part, None, [names[index] for index in few]) for part in down.values())
    paths = {"up": str(folder / "up.csv"), "down": str(folder / "down.csv"), "all": data, **_named(more)}
    paths = {name: str(Path(path).resolve()) if Path(path).exists() else path for name, path in paths.items()}
    return Sets(paths, round((1 - HOLDOUT) * len(up["train"])), lambda: (train, test))


def _named(more: Sequence[str]) -> dict[str, str]:
    named = {path if path == "digits" else Path(path).name: path for path in more}
    if len(named) < len(more) or named.keys() & DIVIDED:
        raise UsageError(f"the data sets {', '.join(more)} need folder names that differ, and are not up, down or all")
    return named


def _of(source: IndexedSource, labels: np.ndarray) -> Subset:
    """Return the images with one of these labels."""
    return Subset(source, np.flatnonzero(np.isin(one_label(source.labels, "a study"), labels)))


def published_sets(root: str) -> Sets:
    """Return the data sets of the papers that are folders of the folder `root`, by their names in the catalog.

    Raises UsageError if there is none.
    """
    folder = Path(root).expanduser()
    found = {name: str((folder / name).resolve()) for name in CATALOG if (folder / name).exists()}
    if not found:
        raise UsageError(f"{root} has no folder with the name of a data set of the papers. Valid: {', '.join(CATALOG)}")
    sets = Sets(found, 0, lambda: train_and_test(sets.path(IMAGENET)))
    return sets


def train_and_test(path: str) -> tuple[IndexedSource, IndexedSource]:
    """Return the training images and the test images of a data set, or its validation images if it has no others.

    Raises DataError if there are none, and the errors of opening the data.
    """
    splits = open_data(path)
    test = splits.test or splits.validation
    if test is None:
        raise DataError(f"{path} has no test images")
    return splits.train, test
