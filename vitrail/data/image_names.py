"""Which files are images, by their names; of DICOM files, whose names often have no suffix, by their first bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vitrail.files import open_regular

SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".mpo",
                      ".avif", ".jp2", ".ppm", ".pgm", ".pbm", ".pnm", ".dcm", ".dicom", ".ima"))  # fmt: skip
ARRAYS = (".npy", ".npz")
"""Suffixes of arrays. They are images only where there are no pictures: else they may be features or masks."""
_JUNK = frozenset(("thumbs.db", "desktop.ini", "__macosx", "dicomdir"))


def is_junk(name: str) -> bool:
    """Return whether a name is of a hidden or system file: .DS_Store, ._x.jpg, __MACOSX, Thumbs.db, DICOMDIR."""
    return name.startswith(".") or name.lower() in _JUNK


def is_image_name(name: str) -> bool:
    """Return whether a name or a path ends in an image suffix."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_array_name(name: str) -> bool:
    """Return whether a name or a path ends in a suffix of `ARRAYS`."""
    return name.lower().endswith(ARRAYS)


def is_dicom_without_suffix(path: str) -> bool:
    """Return whether a file is DICOM by its first bytes, and its name ends in no suffix (IM000001) or in a number.

    Names that end in a number are often the image's identifier, such as 1.2.840.10008.5.1.
    """
    suffix = os.path.splitext(path)[1][1:]
    if (suffix and not suffix.isdecimal()) or os.path.isdir(path):
        return False
    try:
        with open_regular(path) as file:
            return bool(file.read(132)[128:] == b"DICM")
    except OSError:
        return False


KINDS = (is_image_name, is_array_name, is_dicom_without_suffix)
"""Tests whether a path is an image. The first test that any file of a folder passes decides for the whole folder."""


def images_among(paths: Iterable[str]) -> list[str]:
    """Return the images among the paths of one folder: those of the first of `KINDS` that has any."""
    paths = list(paths)
    return next((found for is_image in KINDS if (found := [path for path in paths if is_image(path)])), [])
