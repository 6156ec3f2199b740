"""Pages about a data set, from the features of its images: nearest neighbours of pictures, and a map of all images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.item import IndexedSource, evenly_spaced
from vitrail.data.labels.sets import known, label_text
from vitrail.errors import UsageError
from vitrail.inspection.embedding_map import embedding_map, neighbours
from vitrail.inspection.figures.embedding import THUMBNAIL, draw_map, draw_neighbours, thumbnail_points
from vitrail.inspection.figures.page import Folder, Page, short_name
from vitrail.inspection.pictures import Picture, Pictures

NEIGHBOURS = 6
QUERIES = 6
"""Maximum number of pictures in the figure of neighbours. The table lists all."""
MOST_POINTS = 2000
"""Maximum number of images on a map. With more, t-SNE takes minutes and points hide each other."""


@dataclass(frozen=True)
class DataFeatures:
    """Features of the images of a data set, one row per image."""

    source: IndexedSource
    features: np.ndarray
    """float32 [N, width]."""
    index: np.ndarray
    """int64 [N]: number of each image in the source."""

    def class_of(self, row: int) -> str:
        """Return the name of an image's class."""
        index = int(self.index[row])
        unknown = "unknown class" if not known(self.source.labels)[index] else "no label"
        return label_text(self.source.labels, index, self.source.class_names) or unknown

    def groups(self, rows: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Return the group of some images, int64 [n], and the name of each group: a class, or a set of labels."""
        labels = self.source.labels[self.index[rows]]
        if isinstance(labels, np.ndarray):
            return labels, self.source.class_names
        names, groups = np.unique([self.class_of(int(row)) for row in rows], return_inverse=True)
        return groups, names.tolist()

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
    """Write the nearest neighbours of pictures in a data set, by the cosine of their features.

    features [Q, width] belong to the images `index` of `queries`. If these images are part of `among`, `themselves` [Q]
    are their own rows in it.
    """
    nearest, alike = neighbours(features, among.features, NEIGHBOURS, themselves=themselves)
    if not nearest.shape[1]:
        raise UsageError("there are no other images in the data set, so there are no neighbours")
    names = [queries.source.id(int(i)) for i in index]
    rows = [
        (name, rank + 1, among.name(int(row)), among.class_of(int(row)), f"{alike[query, rank]:.6g}")
        for query, name in enumerate(names)
        for rank, row in enumerate(nearest[query])
    ]
    table = folder.table("neighbours", ("image", "rank", "neighbour", "class", "cosine"), rows)
    drawn: list[tuple[Picture, list[tuple[Picture, str]]]] = []
    reader = Pictures(among.source, queries.transform)
    for query in range(min(len(names), QUERIES)):
        picture = queries.read(int(index[query]))
        if picture is None:  # it was readable when its features were computed
            continue
        near = []
        for row, cosine in zip(nearest[query].tolist(), alike[query], strict=True):
            if (neighbour := reader.read(int(among.index[row]))) is not None:
                near.append((neighbour, f"{short_name(among.class_of(row), 20)}\ncosine {cosine:.2f}"))
        drawn.append((picture, near))
    title = f"{label}: the nearest of {len(among.index):,} images, by the cosine of their features"
    files = [*folder.figure("neighbours", draw_neighbours(title, drawn)), table]
    see = (
        f"For each picture (left), the {nearest.shape[1]} images of the data set with the most similar features.",
        "Neighbours of another class with the same background or colour show what the features depend on.",
    )
    return Page("neighbours", files, see)


def map_page(label: str, folder: Folder, images: DataFeatures, pictures: Pictures, seed: int = 0) -> Page:
    """Write a map of a data set by its features. A large data set is reduced to MOST_POINTS evenly spaced images."""
    rows = evenly_spaced(len(images.index), MOST_POINTS)
    embedding = embedding_map(images.features[rows], seed=seed)
    index = images.index[rows]
    labels, class_names = images.groups(rows)
    thumbnails = {}
    for number in thumbnail_points(embedding.points):
        if (picture := pictures.read(int(index[number]), THUMBNAIL)) is not None:
            thumbnails[number] = picture.shown
    how = "t-SNE" if embedding.method == "tsne" else "the first two principal components"
    title = f"{label}: images arranged by their features ({how})"
    files = folder.figure("map", draw_map(title, embedding, labels, class_names, thumbnails))
    header = ("image", "class", "x", "y")
    lines = [
        (images.name(int(row)), images.class_of(int(row)), f"{x:.6g}", f"{y:.6g}")
        for row, (x, y) in zip(rows, embedding.points, strict=True)
    ]
    files.append(folder.table("map", header, lines))
    see = (
        "Each point is an image, close to images with similar features. Colour and shape show its class.",
        "The network separates classes that lie apart. Check points within another class: they may be mislabelled."
        if embedding.method == "pca"
        else "Check points within another class: they may be mislabelled. Group sizes and gaps mean nothing.",
    )
    return Page("map", files, see)
