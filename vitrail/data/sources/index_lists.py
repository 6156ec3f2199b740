"""Folders with index lists, the form in which copies of VTAB-1k are passed on: a text file per split.

`train800.txt`, `val200.txt`, `train800val200.txt` and `test.txt` hold lines "images/test/0001.jpg 17"; the paths are
below the folder of the lists. `train.txt`, `val.txt` and their kin are read too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vitrail.data.item import DataSet, Findings, role_of
from vitrail.data.labels.sets import order_classes
from vitrail.data.sources.folder import is_image_name, named_file_source
from vitrail.errors import DataError
from vitrail.files import open_regular, regular_descriptor

WHOLE, PARTS = "train800val200", ("train800", "val200")
"""A list that joins two others. It is left out if those exist, so that no validation image is a training image;
`train800+val200` gives the same images."""
_LOOKED_AT = 4096  # bytes of a text file that decide whether it is a list


class Line(NamedTuple):
    """One image of a list."""

    path: str
    label: str
    size: int


def index_lists(path: Path) -> dict[str, Path]:
    """Return split -> its list, for the text files in `path` that are lists of images; {} without a training list."""
    found = {file.stem: file for file in sorted(path.glob("*.txt")) if role_of(file.stem) and _is_list(file)}
    if all(part in found for part in PARTS):
        found.pop(WHOLE, None)
    return found if any(role_of(name) == "train" for name in found) else {}


def _is_list(file: Path) -> bool:
    """Return whether a file begins with a line "PATH LABEL" whose path is that of an image."""
    try:
        with open_regular(file) as stream:
            first = stream.read(_LOOKED_AT).decode("utf-8", "replace").lstrip("\ufeff").split("\n")[0]
    except OSError:
        return False
    words = first.rsplit(maxsplit=1)
    return len(words) == 2 and is_image_name(words[0])


def read_index_lists(path: Path, lists: Mapping[str, Path]) -> DataSet:
    """Open a folder with these index lists (`index_lists`). Missing files are listed as dropped.

    Raises DataError for a line without a path and a label, and if no file of a list exists.
    """
    findings = Findings("lists")
    read = {name: list(_lines(path, file, findings)) for name, file in lists.items()}
    if empty := [name for name, lines in read.items() if not lines]:
        reason = f": {findings.dropped[0].id}, {findings.dropped[0].reason}" if findings.dropped else ""
        raise DataError(f"{path / empty[0]}.txt lists no existing image{reason}")
    class_names = order_classes({line.label for lines in read.values() for line in lines})
    return DataSet({name: named_file_source(path, lines, class_names) for name, lines in read.items()}, findings)


def _lines(root: Path, file: Path, findings: Findings) -> Iterator[Line]:
    try:
        with open(regular_descriptor(file), newline="", encoding="utf-8-sig") as stream:
            text = stream.read()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.rsplit(maxsplit=1)
        if not words:
            continue
        if len(words) != 2:
            raise DataError(f"{file}, line {number}: expected a path and a label, found {line!r}. Write PATH LABEL")
        name = os.path.normpath(words[0].strip())
        if os.path.isabs(name) or name.startswith(".."):
            findings.drop(words[0], f"{file.name}, line {number}: not below {root}")
            continue
        try:
            yield Line(name, words[1], (root / name).stat().st_size)
        except OSError:
            findings.drop(words[0], f"{file.name}, line {number}: no such file below {root}")
