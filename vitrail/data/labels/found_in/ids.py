"""Rows of an id and a label: each is assigned to the image whose path ends in the id."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from vitrail.data.item import Findings
from vitrail.data.labels.found_in.place import FoundLabel, Images, read_texts
from vitrail.data.settings import Columns
from vitrail.errors import DataError
from vitrail.words import listing, shown


class LabelRow(NamedTuple):
    """One row of a table or a list."""

    where: str
    """"row 3", "line 3"."""
    id: str
    """Path of the image or its end, with or without the extension."""
    label: str | tuple[str, ...]


class Lookup:
    """Images by the ends of their paths."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._above = Path(os.path.abspath(images.folder)).parts
        self._named: dict[str, list[int]] = defaultdict(list)
        self._stems: dict[str, list[int]] = defaultdict(list)
        for number, path in enumerate(images.paths):
            name = os.path.basename(path)
            self._named[name].append(number)
            self._stems[os.path.splitext(name)[0]].append(number)

    def find(self, id: str) -> list[int]:
        """Return the images whose path ends in `id`, with or without the extension; if it is a whole path below the
        folder, that image alone."""
        parts = tuple(part for part in id.replace("\\", "/").split("/") if part not in ("", "."))
        if not parts:
            return []
        for candidates in (self._named, self._stems):
            found = [number for number in candidates.get(parts[-1], ()) if self._lies_in(number, parts[:-1])]
            whole = [number for number in found if self._images.paths[number].count("/") == len(parts) - 1]
            if found:
                return whole if len(whole) == 1 else found
        return []

    def _lies_in(self, number: int, folders: tuple[str, ...]) -> bool:
        if not folders:
            return True
        above = (*self._above, *self._images.paths[number].split("/")[:-1])
        return above[-len(folders) :] == folders


def assigned(
    rows: Sequence[LabelRow], file: Path, images: Images, columns: Columns, findings: Findings
) -> list[FoundLabel]:
    """Return the label of each image by the rows of `file`; None for an image that no row names.

    A row without an image is dropped, with its place. Several rows of one image are several labels, if images have
    several labels by `columns`. Raises DataError for a row without an id or a label, an id that fits several images, an
    image with two labels, and if no row has an image.
    """
    read = read_texts([row.label for row in rows], columns, lambda number: f"{file}, {rows[number].where}", findings)
    lookup = Lookup(images)
    labels: list[FoundLabel] = [None] * len(images.paths)
    first: dict[int, str] = {}
    for row, label in zip(rows, read, strict=True):
        assert label is not None
        number = _image_of(row, file, lookup, images)
        if number is None:
            findings.drop(row.id, f"{file.name}, {row.where}: no such image in {images.folder}")
        elif number not in first:
            labels[number], first[number] = label, row.where
        elif columns.per_image == "several":
            labels[number] = tuple(chain.from_iterable(_names(one) for one in (labels[number], label)))
        elif labels[number] == label:
            findings.drop(row.id, f"{file.name}, {row.where}: listed before, in {first[number]}")
        else:
            raise DataError(
                f"{file}, {row.where}: {row.id!r} has the label {shown(label)}, and {shown(labels[number])} in "
                f"{first[number]}. Remove one of the rows. If images have several labels, set data.labels_per_image to "
                "'several'"
            )
    if not first:
        ids = f"its ids are {listing([row.id for row in rows], 3)}" if rows else "it has no rows"
        raise DataError(
            f"{file} names none of the {len(labels):,} images in {images.folder}: {ids}, and the images are "
            f"{listing(images.paths, 3)}. An id is a path or a name, with or without the extension"
        )
    return labels


def _image_of(row: LabelRow, file: Path, lookup: Lookup, images: Images) -> int | None:
    if not row.id:
        raise DataError(f"{file}, {row.where}: no id, for the label {shown(row.label)}. Add the id or remove the row")
    found = lookup.find(row.id)
    if len(found) > 1:
        raise DataError(
            f"{file}, {row.where}: {row.id!r} fits {len(found)} images: "
            f"{listing(sorted(images.paths[number] for number in found), 3)}. Write the path below {images.folder}"
        )
    return found[0] if found else None


def _names(label: FoundLabel) -> tuple[str, ...]:
    return (label,) if isinstance(label, str) else label or ()
