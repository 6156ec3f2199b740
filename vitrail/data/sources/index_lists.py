"""Folders with index lists, the form in which copies of VTAB-1k are passed on: a text file per split.

`train800.txt`, `val200.txt`, `train800val200.txt` and `test.txt` hold lines "images/test/0001.jpg 17"; the paths are
below the folder of the lists. `train.txt`, `val.txt` and their kin are read too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.data.item import DataSet, Findings, role_of
from vitrail.data.labels.label_from import LabelRow, is_list, list_rows, read_texts
from vitrail.data.labels.sets import order_classes
from vitrail.data.settings import Columns
from vitrail.data.sources.folder import named_file_source
from vitrail.errors import DataError

WHOLE, PARTS = "train800val200", ("train800", "val200")
"""A list that joins two others. It is left out if those exist, so that no validation image is a training image;
`train800+val200` gives the same images."""


def index_lists(path: Path) -> dict[str, Path]:
    """Return split -> its list, for the text files in `path` that are lists of images; {} without a training list."""
    found = {file.stem: file for file in sorted(path.glob("*.txt")) if role_of(file.stem) and is_list(file)}
    if all(part in found for part in PARTS):
        found.pop(WHOLE, None)
    return found if any(role_of(name) == "train" for name in found) else {}


def read_index_lists(path: Path, lists: Mapping[str, Path], columns: Columns = Columns()) -> DataSet:
    """Open a folder with these index lists (`index_lists`). Missing files are listed as dropped.

    Raises DataError for a line without a path and a label, and if no file of a list exists.
    """
    findings = Findings("lists")
    rows = [(file, row) for file in lists.values() for row in list_rows(file)]
    cells = read_texts([row.label for _, row in rows], columns, lambda k: f"{rows[k][0]}, {rows[k][1].where}", findings)
    read: dict[Path, list[tuple[str, Any, int]]] = {file: [] for file in lists.values()}
    for (file, row), label in zip(rows, cells, strict=True):
        if (found := _located(path, file, row, findings)) is not None:
            read[file].append((found[0], label, found[1]))
    if empty := [file for file, lines in read.items() if not lines]:
        reason = f": {findings.dropped[0].id}, {findings.dropped[0].reason}" if findings.dropped else ""
        raise DataError(f"{empty[0]} lists no existing image{reason}")
    used = [label for lines in read.values() for _, label, _ in lines]
    class_names = order_classes({name for label in used for name in ([label] if isinstance(label, str) else label)})
    return DataSet({name: named_file_source(path, read[file], class_names) for name, file in lists.items()}, findings)


def _located(root: Path, file: Path, row: LabelRow, findings: Findings) -> tuple[str, int] | None:
    """Return the path below `root` of the image of a row, and its size in bytes; None, and dropped, without a file."""
    name = os.path.normpath(row.id)
    if os.path.isabs(name) or name.startswith(".."):
        findings.drop(row.id, f"{file.name}, {row.where}: not below {root}")
        return None
    try:
        return name, (root / name).stat().st_size
    except OSError:
        findings.drop(row.id, f"{file.name}, {row.where}: no such file below {root}")
        return None
