"""The data sets of a study by the names that its stages use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.item import IndexedSource
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError, UsageError

IMAGENET = "imagenet"
"""The data set on which the paper measures few-shot accuracy."""


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

    @cached_property
    def probe(self) -> tuple[IndexedSource, IndexedSource]:
        """The training images, from which shots are drawn, and the test images. Raises the errors of opening them."""
        return self.open_probe()


def published_sets(root: str) -> Sets:
    """Return the data sets of the papers that are folders of the folder `root`, by their names in the catalog.

    Raises UsageError if there is none.
    """
    folder = Path(root).expanduser()
    found = {name: str((folder / name).resolve()) for name in CATALOG if (folder / name).exists()}
    if not found:
        raise UsageError(f"{root} has no folder with the name of a data set of the papers. Valid: {', '.join(CATALOG)}")
    sets = Sets(found, 0, lambda: _train_and_test(sets.path(IMAGENET)))
    return sets


def _train_and_test(path: str) -> tuple[IndexedSource, IndexedSource]:
    splits = open_data(path)
    test = splits.test or splits.validation
    if test is None:
        raise DataError(f"{path} has no test images")
    return splits.train, test
