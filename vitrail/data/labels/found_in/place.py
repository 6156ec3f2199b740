"""Where the labels of images are written if not in the names of folders: the contract of all kinds of places.

`Data.label_from` is "KIND: ARGUMENT". Each kind is one file beside this one and gives one `Kind`; `kinds` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.data.item import Findings
from vitrail.data.labels.cells import MISSING, read_cells, unsplit
from vitrail.data.settings import Columns
from vitrail.errors import DataError, did_you_mean

FoundLabel = str | tuple[str, ...] | None
"""Label of an image: text, several names, or None if there is none."""


_SMALL = 64 << 20
"""Largest number of bytes of a file that is read for a proposal."""


class Images(NamedTuple):
    """The image files of a folder."""

    folder: Path
    paths: list[str]
    """Path of each image below `folder`, with "/"."""


class Kind(NamedTuple):
    """A kind of place."""

    form: str
    """How it is written, for messages: "name: PATTERN"."""
    read: Callable[[str, Images, Columns, Findings], list[FoundLabel]]
    """Function of the argument that returns the label of each image. Raises UsageError and DataError."""
    propose: Callable[[Images], str | None]
    """Function that returns the argument that seems to fit these images; None if none does."""


def read_texts(
    cells: Sequence[FoundLabel],
    columns: Columns,
    where: Callable[[int], str],
    findings: Findings,
    missing: Collection[str] = MISSING,
) -> list[FoundLabel]:
    """Return labels whose texts are read as those of tables: a name, or several names (`read_cells`).

    where: Number of a label -> its place, for messages. Raises DataError for a text that stands for a `missing` label
    (in lower case), unless an image may have no label.
    """
    texts = [number for number, cell in enumerate(cells) if isinstance(cell, str)]
    read = read_cells([str(cells[number]) for number in texts], columns, lambda number: where(texts[number]))
    findings.warnings += unsplit(read, columns)
    found = list(cells)
    for number, names in zip(texts, read, strict=True):
        if isinstance(names, str) and names.strip().lower() in missing:
            raise DataError(
                f"{where(number)}: no label (found {names!r}). Give it a label or remove it. If images have several "
                "labels or none, set data.labels_per_image to 'several'"
            )
        found[number] = names.strip() if isinstance(names, str) else names
    return found


def find_file(name: str, folder: Path, what: str) -> Path:
    """Return the file `name`, looked for in the folder of the images, then in the current folder. Raises DataError."""
    places = [folder / Path(name).expanduser(), Path(name).expanduser()]
    for place in places:
        if place.is_file():
            return place
    near = did_you_mean(name, [one.name for one in folder.iterdir()] if folder.is_dir() else [])
    looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise DataError(f"there is no {what} {name!r} (data.label_from): looked for {looked}.{near}")


def files_near(folder: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Yield (file, its path as `find_file` finds it) of the small files in a folder and in the folder above."""
    for place in (folder, Path(os.path.abspath(folder)).parent):
        for file in sorted(place.iterdir()):
            if file.suffix.lower() in endings and file.is_file() and file.stat().st_size <= _SMALL:
                yield file, os.path.relpath(file, folder)
