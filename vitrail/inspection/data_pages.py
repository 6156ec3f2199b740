"""Pages about a data set: the nearest neighbours of pictures, and a map of all images, from given features."""

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
from vitrail.inspection.pictures import Picture, Pictures, evenly_spaced

NEIGHBOURS = 6
QUERIES = 6
"""Maximum number of pictures in the figure of neighbours. The table lists all."""
MOST_POINTS = 2000
"""Maximum number of images on a map. With more, t-SNE takes minutes and points hide each other."""


@dataclass(frozen=True)
class DataFeatures:
    """Features of the images of a data set, one row per image."""

    source: Listed
    features: np.ndarray
    """float32 [N, width]."""
    index: np.ndarray
    """int64 [N]: number of each image in the source."""

    def class_of(self, row: int) -> str:
        """Return the name of an image's class."""
        label = int(self.source.labels[self.index[row]])
        return self.source.class_names[label] if label >= 0 else "unknown class"

    def name(self, row: int) -> str:
        """Return the name of an image."""
        return self.source.id(int(self.index[row]))


def neighbours_page(
    label: str,
    folder: Folder,
    among: DataFeatures,
    queries: Pictures,
    features: np.ndarray,
    index: np.ndarray,
    themselves: np.ndarray | None,
) -> Page:
    """Nearest neighbours of pictures in a data set, by the cosine of their features.

    features [Q, width] belong to the images `index` of `queries`. If these images are part of `among`, `themselves` [Q]
    are their own rows in it.
    """
    nearest, alike = neighbours(features, among.features, NEIGHBOURS, themselves=themselves)
    if not nearest.shape[1]:
        raise UsageError("there are no other images in the data set, so there are no neighbours")
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
        if picture is None:  # it was readable when its features were computed
            continue
        shown.append(picture)
        readable = [(place, row, one) for place, (row, one) in enumerate(near) if one is not None]
        found.append([one for _, _, one in readable])
        notes.append([f"{short(among.class_of(row), 20)}\ncosine {alike[query, p]:.2f}" for p, row, _ in readable])
    title = f"{label}: the nearest of {len(among.index):,} images, by the cosine of their features"
    files = [*folder.figure("neighbours", draw_neighbours(title, shown, found, notes)), table]
    see = (
        f"For each picture (left), the {nearest.shape[1]} images of the data set with the most similar features.",
        "Neighbours of another class with the same background or colour show what the features depend on.",
    )
    return Page("neighbours", files, see)


def map_page(label: str, folder: Folder, images: DataFeatures, pictures: Pictures, seed: int = 0) -> Page:
    """A data set as a map of its features; of a large one, MOST_POINTS evenly spaced images."""
    rows = evenly_spaced(len(images.index), MOST_POINTS)
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
    title = f"{label}: images arranged by their features ({how})"
    files = folder.figure("map", draw_map(title, found, labels, images.source.class_names, thumbnails))
    header = ("image", "class", "x", "y")
    lines = [
        (images.name(int(row)), images.class_of(int(row)), f"{x:.6g}", f"{y:.6g}")
        for row, (x, y) in zip(rows, found.points, strict=True)
    ]
    files.append(folder.table("map", header, lines))
    see = (
        "Each point is an image, close to images with similar features. Colour and shape show its class.",
        "The network separates classes that lie apart. Check points within another class: they may be mislabelled."
        if found.method == "pca"
        else "Check points within another class: they may be mislabelled. Group sizes and gaps mean nothing.",
    )
    return Page("map", files, see)


def rows_of(index: Sequence[int] | np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return the position of each of `index` in the sorted `among`, int64; -1 if it is missing."""
    wanted = np.asarray(index, dtype=np.int64)
    place = np.minimum(np.searchsorted(among, wanted), len(among) - 1)
    return np.where(among[place] == wanted, place, -1)
