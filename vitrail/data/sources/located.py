"""Images of a data set with ids that lead to them: results of all splits can be joined, and every id opens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from vitrail.data.item import Item, Listed, View
from vitrail.data.sources.folder import file_of


class Located(View):
    """A split whose ids are paths below the data set: "train/a/1.png" for a/1.png of the folder train.

    path: The data set, as the user named it; of a table it is the folder of the table that ids are relative to. An
    image that is not a file of its own has the id "<split>/<id in the split>".
    """

    def __init__(self, source: Listed, split: str, path: str | Path) -> None:
        super().__init__(source)
        place = Path(path).expanduser()
        self._base = place if place.is_dir() else place.parent
        self._prefix = f"{split}/" if split else ""

    def __getitem__(self, index: int) -> Item:
        return super().__getitem__(index)._replace(id=self.id(index))

    def id(self, index: int) -> str:
        """See `Listed.id`."""
        source, place = self.within(index)
        file = file_of(source, place)
        return f"{self._prefix}{source.id(place)}" if file is None else os.path.relpath(file, self._base)

    def ids(self, indices: np.ndarray) -> list[str]:
        """Return the ids of several images."""
        return [self.id(int(index)) for index in indices]
