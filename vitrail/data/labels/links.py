"""One image in several class folders, through links: an image with several labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vitrail.data.labels.sets import LabelSets

FEWEST = 0.01
"""Share of the images that must lie in several class folders, so that images are taken to have several labels. A few
links exist without that: programs that replace copies by links make them if an image is in two classes by mistake."""


class Links(NamedTuple):
    """The files of a class tree, each once."""

    rows: np.ndarray
    """int64 [N]: the first name of each file, ascending."""
    labels: LabelSets
    """The classes in whose folders it lies."""

    @property
    def several(self) -> int:
        """Number of files that lie in the folders of several classes."""
        return int(np.count_nonzero(self.labels.counts > 1))


def links(files: np.ndarray, labels: np.ndarray, width: int) -> Links | None:
    """Return each file once, with all its classes; None if no file lies in two folders of classes.

    files: int64 [N, 2], device and number of the file behind each name; zeros where the system has no such numbers.
    """
    if not len(files) or not files[:, 1].all() or len(np.unique(files[:, 1])) == len(files):
        return None
    _, first, group = np.unique(files, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(first), dtype=np.int64)
    place[order] = np.arange(len(first))
    found = Links(np.sort(first), LabelSets.of_pairs(place[group.reshape(-1)], labels, len(first), width))
    return found if found.several else None
