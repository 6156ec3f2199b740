"""Which files are images, by their names; of DICOM files, whose names often have no suffix, by their first bytes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from vitrail.files import open_regular
from vitrail.version import install_extra

SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".mpo",
                      ".avif", ".heic", ".heif", ".hif", ".jxl", ".jp2", ".ppm", ".pgm", ".pbm", ".pnm",
                      ".dcm", ".dicom", ".ima"))  # fmt: skip
FORMATS = {".heic": "HEIC", ".heif": "HEIC", ".hif": "HEIC", ".jxl": "JPEG XL"}
"""Suffix -> format of images that need a package of the extra heic."""
ARRAYS = (".npy", ".npz")
"""Suffixes of arrays. They are images only where there are no pictures: else they may be features or masks."""
_JUNK = frozenset((
    "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "$recycle.bin", "recycler", "recycled",
    "system volume information", "dfsrprivate",  # Windows
    "__macosx", "icon\r", "network trash folder", "temporary items", "thevolumesettingsfolder",  # macOS
    "lost+found",  # Linux: at the root of each ext4 disk
    "@eadir", "#recycle", "#snapshot", "@tmp", "@sharebin", "@sharesnap",  # Synology
    "@recycle", "@recently-snapshot", "@__thumb",  # QNAP
    "~snapshot", "__pycache__", "dicomdir",
))  # fmt: skip
_CHECKED = re.compile(r"found\.\d{3}")
"""Name of a folder in which Windows puts parts of files after it has checked a disk."""


def is_junk(name: str) -> bool:
    """Return whether a name is of a hidden file, or of what a system leaves: .DS_Store, Thumbs.db, @eaDir, lost+found.

    Systems are Windows, macOS, Linux and network disks (Synology, QNAP, NetApp).
    """
    lowered = name.lower()
    return name.startswith(".") or lowered in _JUNK or _CHECKED.fullmatch(lowered) is not None


def in_junk(path: str) -> bool:
    """Return whether a relative path, with "/", leads through a folder that is hidden or a system's, or to such a file.

    "." and ".." are neither.
    """
    return any(is_junk(part) for part in path.split("/") if part not in (".", ".."))


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


_ADVICE = {
    (".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"): "Unpack the archives.",
    (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v"): "Save pictures of the videos: `ffmpeg -i FILE -r 1 %05d.jpg`.",
    (".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf", ".rw2"): "Develop the raw photographs to JPEG or TIFF.",
    (".pdf", ".svg", ".psd", ".eps", ".ai"): "Export the documents as JPEG or PNG.",
}
"""Endings of files that cannot be read as images -> what to do with them."""
_MOST = 100_000
"""Largest number of files that are counted for a message."""
_KINDS = 5
"""Largest number of kinds of files in a message."""


def ending_of(name: str) -> str:
    """Return the ending of a file's name for messages: ".txt", or "no extension"."""
    return os.path.splitext(name)[1].lower() or "no extension"


def other_files(folder: Path) -> str:
    """Return the number of files of each kind below a folder without images, and what to do with them."""
    counts: Counter[str] = Counter()
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_junk(name)]
        counts.update(ending_of(name) for name in names if not is_junk(name))
        if counts.total() > _MOST:
            break
    if not counts:
        return ". There are no files in it"
    found = ", ".join(f"{count:,} {ending}" for ending, count in counts.most_common(_KINDS))
    advice = [sentence for endings, sentence in _ADVICE.items() if counts.keys() & {*endings}]
    return " ".join([f". Its files by their endings: {found}.", *advice]).rstrip(".")


def bad_kinds(bad: Iterable[tuple[str, str]]) -> str:
    """Return the number of unreadable images, (name, reason), of each kind, and which packages they need."""
    counts = Counter((ending_of(name), reason) for name, reason in bad)
    found = ", ".join(f"{count:,} {ending} ({why})" for (ending, why), count in counts.most_common(_KINDS))
    needed = missing_packages(ending for ending, why in counts if why == "unsupported")
    return ". ".join([found, *needed])


_PACKAGES = {
    "HEIC": (
        "pillow-heif",
        "convert them to JPEG (`sips -s format jpeg *.heic --out jpeg` on a Mac, `heif-convert` on Linux)",
    ),
    "JPEG XL": ("imagecodecs", "convert them to PNG (`djxl FILE.jxl FILE.png`, of libjxl)"),
}
"""Format -> package that reads it, and what can be done without it."""


def is_readable(format: str) -> bool:
    """Return whether the package that reads a format is installed."""
    return find_spec(_PACKAGES[format][0].replace("-", "_")) is not None


def package_advice(format: str) -> str:
    """Return what files of a format need, and what else can be done with them."""
    package, convert = _PACKAGES[format]
    return f"{format} files need the package {package}: {install_extra('heic')}, or {convert}"


def missing_packages(endings: Iterable[str]) -> list[str]:
    """Return what files with these endings need that cannot be read here, a sentence for each format."""
    formats = dict.fromkeys(FORMATS[ending] for ending in endings if ending in FORMATS)
    return [package_advice(format) for format in formats if not is_readable(format)]
