"""Image files by their paths, without classes, as a source that a loader can read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitrail.data.item import UNKNOWN, Item
from vitrail.data.sources.folder import read_file


class Files:
    """The files at `paths`, in this order; the id of each is its path. A `Listed` source without labels."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = [os.fspath(path) for path in paths]
        self.class_names: list[str] = []
        self.labels = np.full(len(self._paths), UNKNOWN, dtype=np.int64)
        self.sizes = np.zeros(len(self._paths), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Item:
        return Item(read_file(self._paths[index]), UNKNOWN, self._paths[index])

    def id(self, index: int) -> str:
        """See `Listed.id`."""
        return self._paths[index]
