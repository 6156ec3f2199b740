"""Recognise masks among photographs: files of equal names beside them, or in a folder `masks/` or `trimaps/`.

Such files look like images to label, and a network that learns from them learns nonsense.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path, PurePath

import numpy as np

from vitrail.data.images.decode import decode
from vitrail.data.item import DataSet, Listed
from vitrail.data.sources.flat import label_advice
from vitrail.data.sources.folder import FileSource
from vitrail.errors import DataError, DecodeError
from vitrail.words import listing

FOLDERS = frozenset((
    "mask", "masks", "trimap", "trimaps", "annotation", "annotations", "label", "labels", "gt", "groundtruth",
    "ground_truth", "seg", "segmentation", "segmentations", "segmentationclass", "segmentationobject",
))  # fmt: skip
"""Usual names of folders of masks, in lower case."""
_JPEG = (".jpg", ".jpeg")
_SHARE = 0.9
"""Share of the files of a folder that have the names of images elsewhere, from which they are masks."""
_LOOKED_AT = 3
"""Number of files of a folder whose colours are counted."""
_COLOURS = 64
"""Maximum number of colours of a mask. Photographs have thousands."""


def masks_beside(sources: Iterable[Listed]) -> Iterator[str]:
    """Yield a warning for each source of files in which half of the images or more have the name of another one."""
    for source in sources:
        if isinstance(source, FileSource) and (warning := _pairs(source)):
            yield warning


def _pairs(source: FileSource) -> str | None:
    """Return the warning about names that occur with two endings. Files of one folder are sorted by name."""
    first = [row for row, (one, two) in enumerate(pairwise(map(os.path.splitext, source.names()))) if one[0] == two[0]]
    if 4 * len(first) < len(source) or not first:
        return None
    stem, *pair = *os.path.splitext(source.id(first[0])), os.path.splitext(source.id(first[0] + 1))[1]
    large = int(source.sizes[first].sum() < source.sizes[np.array(first) + 1].sum())
    jpeg = [ending.lower() in _JPEG for ending in pair]
    image = pair[large if jpeg[0] == jpeg[1] else jpeg.index(True)]
    (mask,) = {*pair} - {image}
    return (
        f"{2 * len(first):,} of {len(source):,} images have a name that occurs with two endings, such as {stem}{image} "
        f"and {mask}: the {mask} files are probably masks of the photographs. To use the photographs alone, add "
        f"--data.include '*{image}'"
    )


def refuse_mask_folders(path: Path, found: DataSet) -> None:
    """Raise DataError if folders of masks would count as photographs, or as a class."""
    for split, source in found.splits.items():
        if isinstance(source, FileSource) and (folders := _mask_folders(source)):
            root = path / split
            others = {PurePath(name).parts[0] for name in source.names()} - {*folders}
            patterns = " ".join(f"--data.exclude {folder}" for folder in folders)
            advice = f"leave them out: {patterns}"
            if len(others) == 1 and found.findings.kind == "folder":
                (images,) = others
                advice = f"give the folder of the images alone, {root / images}. {label_advice(root / images)}"
            raise DataError(
                f"the images in {listing([f'{root / folder}/' for folder in folders], quoted=False)} are masks: they "
                f"have the names of images in other folders, and few colours. To learn from the photographs, {advice}. "
                "`vitrail probe segment` learns from masks"
            )


def _mask_folders(source: FileSource) -> list[str]:
    """Return the names of the folders of masks within the folder of a source."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(source.names()):
        parts = name.split("/")[:-1]
        groups[next((part for part in parts if part.lower() in FOLDERS), "")].append(row)
    if len(groups) < 2 or "" not in groups:
        return []
    images = {_stem(source, row) for row in groups.pop("")}
    return [
        folder
        for folder, rows in sorted(groups.items())
        if sum(_stem(source, row) in images for row in rows) >= _SHARE * len(rows) and _few_colours(source, rows)
    ]


def _stem(source: FileSource, row: int) -> str:
    return PurePath(source.id(row)).stem


def _few_colours(source: FileSource, rows: list[int]) -> bool:
    """Return whether the first files that can be read have as few colours as masks."""
    for row in rows[:_LOOKED_AT]:
        try:
            image = decode(source[row].image)  # type: ignore[arg-type]
        except DecodeError:
            continue
        if len(np.unique(image.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32))) > _COLOURS:
            return False
    return True
