"""Labels in a table with a header: "table: FILE ID -> LABEL", where ID and LABEL are columns.

Without columns ("table: labels.csv"), those with usual names are used, and columns of zeros and ones may be classes.
"""

from __future__ import annotations

import re
from pathlib import Path

from vitrail.data.item import Findings
from vitrail.data.labels.found_in.ids import LabelRow, Lookup, assigned
from vitrail.data.labels.found_in.place import FoundLabel, Images, Kind, files_near, find_file
from vitrail.data.settings import Columns
from vitrail.data.sources.table import IMAGE_COLUMNS, LABEL_COLUMNS, SUFFIXES, read_rows, read_table
from vitrail.data.spreadsheet import PREDICTIONS
from vitrail.errors import DataError, UsageError
from vitrail.words import shown

ID_COLUMNS = (*IMAGE_COLUMNS, "id", "image_id", "image_name", "id_code", "name")
"""Usual names of the column of ids."""
_FORM = re.compile(r"(?P<file>.+?\.(?:csv|tsv))(?:\s+(?P<id>.+?)\s*->\s*(?P<label>.+))?", re.IGNORECASE)
_ROWS = 200
"""Number of rows that decide which column holds the ids."""


def _read(argument: str, images: Images, columns: Columns, findings: Findings) -> list[FoundLabel]:
    match = _FORM.fullmatch(argument)
    if match is None:
        raise UsageError(
            f"data.label_from: {shown(argument)} is not a .csv or .tsv file with two columns. Valid is, for example, "
            "'table: labels.csv id -> breed'"
        )
    file = find_file(match["file"], images.folder, "table")
    if match["id"]:
        columns = columns._replace(image=match["id"], label=match["label"], classes=None)
    table = read_table(file, columns, findings, ID_COLUMNS)
    if any(table.splits):
        findings.warnings.append(
            f"column 'split' of {file.name} is not used: data.label_from reads labels alone, and splits are folders. "
            f"Give {file} as the data set to use both"
        )
    rows = [LabelRow(*row) for row in zip(table.rows, table.paths, table.labels, strict=True)]
    return assigned(rows, file, images, columns, findings)


def _propose(images: Images) -> str | None:
    """Return the table in the folder of the images, or in the folder above, one of whose columns names them."""
    lookup = Lookup(images)
    for file, name in files_near(images.folder, SUFFIXES):
        try:
            if found := _columns(file, lookup):
                return f"{name} {found[0]} -> {found[1]}"
        except (DataError, OSError):
            continue
    return None


def _columns(file: Path, lookup: Lookup) -> tuple[str, str] | None:
    """Return the columns of ids and of labels; None if no column names images, or if none divides them."""
    header, rows = read_rows(file)
    if {*PREDICTIONS} <= {*header}:  # guesses of a network are no labels
        return None
    cells = [row for _, row in rows if len(row) == len(header)]
    some = cells[:_ROWS]
    hits = [sum(bool(lookup.find(row[place].strip())) for row in some) for place in range(len(header))]
    if not some or max(hits) < len(some) / 2:
        return None
    id = hits.index(max(hits))
    divide = [
        place
        for place in range(len(header))
        if place != id and 2 <= len({row[place].strip() for row in cells}) <= len(cells) / 2
    ]
    divide.sort(key=lambda place: header[place].strip().lower() not in LABEL_COLUMNS)
    return (header[id], header[divide[0]]) if divide else None


TABLE = Kind("table: FILE ID -> LABEL", _read, _propose)
