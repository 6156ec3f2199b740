"""All kinds of places for labels, and what the setting `Data.label_from` chooses among them."""

from __future__ import annotations

import shlex

from vitrail.data.item import Findings
from vitrail.data.labels.found_in.json_files import JSON
from vitrail.data.labels.found_in.list_file import LIST
from vitrail.data.labels.found_in.names import NAMES
from vitrail.data.labels.found_in.place import FoundLabel, Images, Kind
from vitrail.data.labels.found_in.table_file import TABLE
from vitrail.data.settings import Columns
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.words import listing, shown

KINDS: dict[str, Kind] = {"name": NAMES, "list": LIST, "table": TABLE, "json": JSON}
FORMS = ", ".join(repr(kind.form) for kind in KINDS.values())


def labels_of(images: Images, label_from: str, columns: Columns, findings: Findings) -> list[FoundLabel]:
    """Return the label of each image by the setting `label_from`. Raises UsageError and DataError."""
    name, colon, argument = label_from.partition(":")
    kind = KINDS.get(name.strip().lower())
    if kind is None or not colon:
        near = did_you_mean(name.strip().lower(), KINDS) if colon else ""
        raise UsageError(f"data.label_from is {shown(label_from)}; valid are {FORMS}.{near}")
    return kind.read(argument.strip(), images, columns, findings)


def advice(images: Images) -> str:
    """Return the sentence on how to say where the labels of these images are, with the setting that seems to fit.

    A list, a table or JSON files are there on purpose, so they come before names, which may only look like labels.
    """
    for name in ("table", "list", "json", "name"):
        try:
            argument = KINDS[name].propose(images) if images.paths else None
            cells = labels_of(images, f"{name}: {argument}", Columns(), Findings("")) if argument else []
        except (DataError, UsageError, OSError):
            continue
        classes = sorted(
            {one for cell in cells if cell is not None for one in ([cell] if isinstance(cell, str) else cell)}
        )
        if len(classes) > 1:
            flag = f"--data.label-from {shlex.quote(f'{name}: {argument}')}"
            return f"The labels seem to be elsewhere: add {flag} ({len(classes):,} classes: {listing(classes, 5)})"
    return (
        "If the labels are in the names of the images, in a list, in a table or in JSON files, say so with "
        f"--data.label-from and one of {FORMS}"
    )
