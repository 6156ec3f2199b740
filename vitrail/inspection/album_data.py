"""Pages about a data set: nearest neighbours of pictures in it, and all of it as a map.

They take features as arrays; where those come from is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.data.images.geometry import resize
from vitrail.data.item import Listed
from vitrail.errors import UsageError
from vitrail.inspection.embedding_map import embedding_map, neighbours
from vitrail.inspection.figures.embedding import THUMBNAIL, draw_map, draw_neighbours, scattered
from vitrail.inspection.figures.page import Folder, Page, short
from vitrail.inspection.pictures import Picture, Pictures

NEIGHBOURS = 6
QUERIES = 6
"""Pictures with their neighbours in a figure; the table has those of all."""
MOST_POINTS = 2000
"""Images on a map: above, t-SNE takes minutes and points hide each other."""


@dataclass(frozen=True)
class Embedded:
    """Images of a data set with their features, one row each."""

    source: Listed
    features: np.ndarray
    """float32 [N, width]."""
    index: np.ndarray
    """int64 [N]: number of each image in the source."""

    def class_of(self, row: int) -> str:
        """Return the name of an image's class."""
        label = int(self.source.labels[self.index[row]])
        return self.source.class_names[label] if label >= 0 else "class not known"

    def name(self, row: int) -> str:
        """Return the name of an image."""
        return self.source.id(int(self.index[row]))


def neighbours_page(
    label: str,
    folder: Folder,
    among: Embedded,
    queries: Pictures,
    features: np.ndarray,
    index: np.ndarray,
    themselves: np.ndarray | None,
) -> Page:
    """Nearest neighbours of pictures in a data set, by the cosine of their features.

    features [Q, width] are those of the images `index` of `queries`; `themselves` [Q] are their own rows in
    `among`, where they belong to it.
    """
    nearest, alike = neighbours(features, among.features, NEIGHBOURS, themselves=themselves)
    if not nearest.shape[1]:
        raise UsageError("there are no other images to be neighbours")
    names = [queries.name(int(i)) for i in index]
    rows = [
        (name, rank + 1, among.name(int(row)), among.class_of(int(row)), f"{alike[query, rank]:.6g}")
        for query, name in enumerate(names)
        for rank, row in enumerate(nearest[query])
    ]
    table = folder.table("neighbours", ("image", "rank", "neighbour", "class", "cosine"), rows)
    shown: list[Picture] = []
    found: list[list[Picture]] = []
    notes: list[list[str]] = []
    reader = Pictures(among.source, queries.transform)
    for query in range(min(len(names), QUERIES)):
        picture = queries.read(int(index[query]))
        near = [(int(row), reader.read(int(among.index[row]))) for row in nearest[query]]
        if picture is None:  # it could be read when its features were made
            continue
        shown.append(picture)
        readable = [(place, row, one) for place, (row, one) in enumerate(near) if one is not None]
        found.append([one for _, _, one in readable])
        notes.append([f"{short(among.class_of(row), 20)}\ncosine {alike[query, p]:.2f}" for p, row, _ in readable])
    title = f"{label}: the nearest of {len(among.index):,} images, by the cosine of their features"
    files = [*folder.figure("neighbours", draw_neighbours(title, shown, found, notes)), table]
    see = (
        f"For each picture (left) the {nearest.shape[1]} images of the data that are most alike to the network.",
        "Neighbours of other classes that share a background or a colour show what the features are about.",
    )
    return Page("neighbours", files, see)


def map_page(label: str, folder: Folder, images: Embedded, pictures: Pictures, seed: int = 0) -> Page:
    """A data set as a map of its features; of a large one, MOST_POINTS images evenly spaced."""
    rows = evenly(len(images.index), MOST_POINTS)
    found = embedding_map(images.features[rows], seed=seed)
    index = images.index[rows]
    labels = images.source.labels[index]
    thumbnails = {}
    for number in scattered(found.points):
        picture = pictures.read(int(index[number]))
        if picture is not None:
            factor = THUMBNAIL / max(picture.shown.shape[:2])
            height, width = (max(1, round(side * factor)) for side in picture.shown.shape[:2])
            thumbnails[number] = resize(picture.shown, height, width)
    how = "t-SNE" if found.method == "tsne" else "the first two principal components"
    title = f"{label}: images laid out by their features ({how})"
    files = folder.figure("map", draw_map(title, found, labels, images.source.class_names, thumbnails))
    header = ("image", "class", "x", "y")
    lines = [
        (images.name(int(row)), images.class_of(int(row)), f"{x:.6g}", f"{y:.6g}")
        for row, (x, y) in zip(rows, found.points, strict=True)
    ]
    files.append(folder.table("map", header, lines))
    see = (
        "Each point is an image, near those that are alike to the network; colour and shape are its class.",
        "Classes that lie apart are told apart; points within another class are worth a look (mislabelled?)."
        if found.method == "pca"
        else "Points within another class are worth a look; sizes of groups and gaps between them mean nothing.",
    )
    return Page("map", files, see)


def evenly(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to count - 1, evenly spaced, in order."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def rows_of(index: Sequence[int] | np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return where each of `index` stands in the sorted `among`, int64; -1 where it does not."""
    wanted = np.asarray(index, dtype=np.int64)
    place = np.minimum(np.searchsorted(among, wanted), len(among) - 1)
    return np.where(among[place] == wanted, place, -1)
