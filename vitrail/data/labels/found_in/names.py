"""Labels in the names of files: "name: PATTERN", whose one group ( ) is the class."""

from __future__ import annotations

import os
import re

from vitrail.data.item import Findings
from vitrail.data.labels.found_in.place import FoundLabel, Images, Kind, read_texts
from vitrail.data.settings import Columns
from vitrail.errors import DataError, UsageError
from vitrail.words import listing, shown

_USUAL = (
    r"^(.+)_[0-9]+\.",  # Abyssinian_100.jpg, n01440764_10026.JPEG
    r"^(.+)-[0-9]+\.",
    r"^(.+)\.[0-9]+\.",  # cat.0.jpg
    r"^(.+) \([0-9]+\)\.",  # cat (12).jpg, as a file manager renames
    r"^(.*[^0-9 ]) ?[0-9]+\.",  # cat001.jpg, cat 1.jpg
    r"^[0-9]+[-_. ](.+)\.",  # 001_cat.jpg
    r"^([^_]+)_",  # cat_a81bc81b.jpg
    r"^([^-]+)-",
    r"_([^_]+)\.[^.]+$",  # holiday_a81bc81b_cat.jpg
    r"-([^-]+)\.[^.]+$",
)
"""Patterns that are tried on the names of images without labels, the most usual first."""


def _read(argument: str, images: Images, columns: Columns, findings: Findings) -> list[FoundLabel]:
    pattern = _compiled(argument)
    cells = [_label(pattern, path) for path in images.paths]
    wrong = [path for path, cell in zip(images.paths, cells, strict=True) if cell is None]
    if wrong:
        fitting = _propose(images)
        advice = f"The pattern {fitting!r} does. " if fitting and fitting != argument else ""
        raise DataError(
            f"the pattern {argument!r} (data.label_from) finds no label in {len(wrong):,} of {len(cells):,} names of "
            f"images in {images.folder}: {listing(wrong, 3)}. The pattern must match every name. {advice}Change the "
            "pattern, or move these images to another folder"
        )
    return read_texts(cells, columns, lambda number: images.paths[number], findings, missing=())


def _compiled(argument: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(argument)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"data.label_from: {shown(argument)} is not a regular expression ({error}). Valid is, for example, "
            "'name: ^(.+)_[0-9]+'"
        ) from error
    if pattern.groups != 1:
        raise UsageError(
            f"data.label_from: the pattern {shown(argument)} has {pattern.groups} groups ( ), and exactly one must "
            "stand around the class, as in 'name: ^(.+)_[0-9]+'. Other parentheses are written (?: )"
        )
    return pattern


def _label(pattern: re.Pattern[str], path: str) -> str | None:
    """Return the class in the name of a file; None if the pattern does not match, or if the class is empty."""
    match = pattern.search(os.path.basename(path))
    return match[1] or None if match else None


def _propose(images: Images) -> str | None:
    """Return the first usual pattern that divides all names into classes of two images or more on average."""
    for argument in _USUAL:
        pattern = re.compile(argument)
        labels = {_label(pattern, path) for path in images.paths}
        if None not in labels and 2 <= len(labels) <= len(images.paths) / 2:
            return argument
    return None


NAMES = Kind("name: PATTERN", _read, _propose)
