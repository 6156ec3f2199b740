"""Labels in a list without a header: "list: FILE", a path and a label in each line.

Between them stand spaces ("val/1.jpg 3", as in lists of ImageNet), a tab, or a comma.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

from vitrail.data.image_names import SUFFIXES, is_image_name
from vitrail.data.item import Findings
from vitrail.data.labels.found_in.ids import LabelRow, Lookup, assigned
from vitrail.data.labels.found_in.place import FoundLabel, Images, Kind, files_near, find_file
from vitrail.data.settings import Columns
from vitrail.errors import DataError
from vitrail.files import open_regular, regular_descriptor
from vitrail.words import shown

ENDINGS = (".txt", ".lst", ".list", ".csv", ".tsv")
"""Endings of the names of files that may be lists."""
_LOOKED_AT = 4096
"""Number of bytes of a file that decide whether it is a list."""
_ROWS = 100
"""Number of rows that decide whether a list names some images."""
_IMAGE_THEN_SPACE = re.compile(rf"(.*(?:{'|'.join(map(re.escape, sorted(SUFFIXES)))}))\s+(\S.*)", re.IGNORECASE)


def is_list(file: Path) -> bool:
    """Return whether a file begins with a line of a path and a label, whose path is that of an image."""
    try:
        with open_regular(file) as stream:
            first = stream.read(_LOOKED_AT).decode("utf-8", "replace").lstrip("\ufeff").split("\n")[0].strip()
    except OSError:
        return False
    found = _separate([first])(first)
    return found is not None and is_image_name(found[0])


def list_rows(file: Path) -> list[LabelRow]:
    """Return the rows of a list; the label is text. Raises DataError for a line without a path and a label."""
    try:
        with open(regular_descriptor(file), newline="", encoding="utf-8-sig") as stream:
            lines = stream.read().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
    filled = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    separate = _separate([line for _, line in filled])
    rows = []
    for number, line in filled:
        found = separate(line)
        if found is None:
            raise DataError(
                f"{file}, line {number}: expected a path and a label, found {shown(line)}. Write PATH LABEL"
            )
        rows.append(LabelRow(f"line {number}", found[0].strip(), found[1].strip()))
    return rows


Separate = Callable[[str], tuple[str, str] | None]


def _separate(lines: list[str]) -> Separate:
    """Return the function from a line to (path, label), alike for all lines; it returns None for another line."""
    for separate in (_by_tab, _by_image, _by_comma):
        if lines and all(separate(line) is not None for line in lines):
            return separate
    return _by_space


def _by_tab(line: str) -> tuple[str, str] | None:
    path, *labels = line.split("\t")
    return (path, labels[0]) if len(labels) == 1 else None


def _by_image(line: str) -> tuple[str, str] | None:
    """Separate at the space behind the name of an image: both the path and the label may contain spaces."""
    match = _IMAGE_THEN_SPACE.fullmatch(line)
    return (match[1], match[2]) if match and "\t" not in line else None


def _by_comma(line: str) -> tuple[str, str] | None:
    try:
        cells = next(csv.reader([line]))
    except (csv.Error, StopIteration):
        return None
    return (cells[0], cells[1]) if len(cells) == 2 else None


def _by_space(line: str) -> tuple[str, str] | None:
    words = line.rsplit(maxsplit=1)
    return (words[0], words[1]) if len(words) == 2 else None


def _read(argument: str, images: Images, columns: Columns, findings: Findings) -> list[FoundLabel]:
    file = find_file(argument, images.folder, "list")
    return assigned(list_rows(file), file, images, columns, findings)


def _propose(images: Images) -> str | None:
    """Return the list in the folder of the images, or in the folder above, that names some of them."""
    lookup = Lookup(images)
    for file, name in files_near(images.folder, ENDINGS):
        try:
            if is_list(file) and any(lookup.find(row.id) for row in list_rows(file)[:_ROWS]):
                return name
        except (DataError, OSError):
            continue
    return None


LIST = Kind("list: FILE", _read, _propose)
