"""Labels in a JSON file beside each image: "json: KEY", for photo.jpg in photo.json or photo.jpg.json.

A dotted key leads into objects ("annotation.species"). Of a list of objects, the value of each is a label
("shapes.label", as LabelMe writes); a number chooses one item ("objects.0.name").
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitrail.data.item import Findings
from vitrail.data.labels.cells import names_in
from vitrail.data.labels.found_in.place import FoundLabel, Images, Kind, read_texts
from vitrail.data.settings import Columns
from vitrail.data.sources.table import LABEL_COLUMNS
from vitrail.errors import DataError, UsageError, did_you_mean
from vitrail.files import read_json
from vitrail.words import listing, shown

_DEEPEST = 3
"""Maximum number of names in a key that is proposed."""


def _read(argument: str, images: Images, columns: Columns, findings: Findings) -> list[FoundLabel]:
    if not argument:
        raise UsageError("data.label_from names no key. Valid is, for example, 'json: annotation.species'")
    files = [_beside(images, path) for path in images.paths]
    if not any(files):
        raise DataError(
            f"none of the {len(files):,} images in {images.folder} has a JSON file beside it (data.label_from): the "
            f"labels of {images.paths[0]} would stand in {os.path.splitext(images.paths[0])[0]}.json"
        )
    cells = [None if file is None else _label(file, argument) for file in files]
    return read_texts(cells, columns, lambda number: str(files[number]), findings, missing=("",))


def _beside(images: Images, path: str) -> Path | None:
    image = images.folder / path
    return next((file for file in (Path(f"{image}.json"), image.with_suffix(".json")) if file.is_file()), None)


def _label(file: Path, key: str) -> str | tuple[str, ...]:
    """Return the text or the names at a key of a JSON file. Raises DataError."""
    value = _at(read_json(file, DataError), key, str(file))
    where = f"{file}, {key!r}"
    if isinstance(value, list):
        return names_in(value, where)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}: a label is {shown(value)}; valid are names, whole numbers, and lists of these")
    return names_in([value], where)[0] if value != "" else ""


def _at(value: Any, key: str, where: str) -> Any:
    """Return the value at a dotted key; of a list without a number in the key, the list of the values in its items."""
    if not key:
        return value
    if isinstance(value, dict) and key in value:  # also a key that contains a dot
        return value[key]
    first, _, rest = key.partition(".")
    if isinstance(value, dict) and first in value:
        return _at(value[first], rest, where)
    if isinstance(value, list) and first.isdecimal() and len(first) < 10 and int(first) < len(value):
        return _at(value[int(first)], rest, where)
    if isinstance(value, list) and not first.isdecimal():
        return [_at(item, key, where) for item in value]
    names = list(value) if isinstance(value, dict) else []
    there = f"its keys are {listing(names)}.{did_you_mean(first, names)}" if names else f"there is {shown(value)}"
    raise DataError(f"{where} has no key {first!r} (data.label_from): {there}")


def _propose(images: Images) -> str | None:
    """Return the first key of the first JSON file whose last name is usual for a label."""
    file = next(filter(None, (_beside(images, path) for path in images.paths)), None)
    try:
        keys = [] if file is None else list(_keys(read_json(file, DataError)))
    except DataError:
        return None
    return next((key for key in keys if key.rpartition(".")[2].lower() in LABEL_COLUMNS), None)


def _keys(value: Any, depth: int = 1) -> Iterator[str]:
    """Yield the dotted keys of an object, and of the first item of a list."""
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, dict) or depth > _DEEPEST:
        return
    for name, inner in value.items():
        yield name
        yield from (f"{name}.{key}" for key in _keys(inner, depth + 1))


JSON = Kind("json: KEY", _read, _propose)
