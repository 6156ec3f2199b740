"""ILSVRC2012's validation images, with their own labels or those of ImageNet ReaL. Torch-free.

The images come as 50,000 numbered files in one folder, whose labels are in files of their own; many have sorted
them into one folder for each class since. Both are read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from vitrail.data.benchmarks.answer_key import AnswerKey
from vitrail.data.benchmarks.imagenet_classes import wnids
from vitrail.data.benchmarks.imagenet_labels import LABEL_FILES, read_labels, read_real
from vitrail.data.benchmarks.imagenet_protocols import Benchmark, Protocol
from vitrail.data.sources.folder import FileSource, is_image_name, is_junk
from vitrail.errors import DataError


class _File(NamedTuple):
    name: str
    """Below the folder of all."""
    size: int
    number: int
    """From 1; 0 where the name has none."""
    wnid: str
    """Of its folder, or in its name; "" where it is in neither."""


_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?:_(n\d{8}))?\.", re.IGNORECASE)
_WNID = re.compile(r"n\d{8}")


def open_validation(protocol: Protocol, path: Path, labels: Path | None) -> Benchmark:
    """Open the images with ILSVRC2012's labels: of their folders' or files' names, or from a file of labels.

    Raises DataError where nothing says which class an image has.
    """
    root, files = _listed(protocol, path)
    notes: list[str] = []
    if labels is None and all(file.wnid for file in files):
        position = {wnid: number for number, wnid in enumerate(wnids())}
        found = [position.get(file.wnid, -1) for file in files]
        if -1 in found:
            raise DataError(f"{root}: {files[found.index(-1)].wnid!r} is no class of ILSVRC2012")
    else:
        given = labels or _beside(root, LABEL_FILES)
        if given is None:
            raise protocol.missing(f"nothing says which classes the images in {root} have")
        classes = read_labels(given)
        files = _numbered(root, files, notes)
        if lacking := [file.name for file in files if file.number not in classes]:
            raise DataError(f"{given} has no label for {lacking[0]} ({len(lacking)} images)")
        found = [classes[file.number] for file in files]
    names = list(wnids())
    return Benchmark(protocol, _source(root, files, found, names), names, np.arange(1000), None, notes)


def open_real(protocol: Protocol, path: Path, labels: Path | None) -> Benchmark:
    """Open the images with the labels of ImageNet ReaL, which are sets; images with an empty set are left out.

    An image of several classes is listed under the first of them. Raises DataError.
    """
    root, files = _listed(protocol, path)
    given = labels or _beside(root, ("real.json",))
    if given is None:
        raise protocol.missing(f"no real.json in {root} or beside it")
    classes = read_real(given)
    notes: list[str] = []
    files = _numbered(root, files, notes)
    if beyond := [file.name for file in files if not 1 <= file.number <= len(classes)]:
        raise DataError(f"{given} has no entry for {beyond[0]}: it has {len(classes):,}")
    counted = [file for file in files if classes[file.number - 1]]
    if len(counted) < len(files):
        notes.append(f"{len(files) - len(counted):,} images that show none of the 1,000 classes: not counted")
    numbers: dict[tuple[int, ...], int] = {}
    found = [numbers.setdefault(classes[file.number - 1], len(numbers)) for file in counted]
    right = np.zeros((len(numbers), 1000), dtype=bool)
    for valid, number in numbers.items():
        right[number, list(valid)] = True
    key = AnswerKey(right, np.array([valid[0] for valid in numbers], dtype=np.int64), np.arange(1000))
    sets = [" or ".join(wnids()[one] for one in valid) for valid in numbers]
    return Benchmark(protocol, _source(root, counted, found, sets), list(wnids()), np.arange(1000), key, notes)


def _source(root: Path, files: list[_File], labels: list[int], class_names: list[str]) -> FileSource:
    names = pa.array([os.fsencode(file.name) for file in files], pa.large_binary())
    sizes = np.array([file.size for file in files], dtype=np.int64)
    return FileSource(root, names, np.array(labels, dtype=np.int64), sizes, class_names)


def _listed(protocol: Protocol, path: Path) -> tuple[Path, list[_File]]:
    """Return the folder of the images, `path` or its val/, and the images in it and in its class folders."""
    for root in (path, path / "val", path / "validation"):
        if not root.is_dir():
            continue
        files = _images(root, "", "")
        for name in sorted(filter(_WNID.fullmatch, os.listdir(root))):
            files += _images(root / name, f"{name}/", name)
        if files:
            return root, files
    raise protocol.missing(f"no images in {path}")


def _images(folder: Path, prefix: str, wnid: str) -> list[_File]:
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_image_name(entry.name) and not is_junk(entry.name) and entry.is_file():
            match = _NAME.match(entry.name)
            number, named = (int(match[1]), match[2] or "") if match else (0, "")
            found.append(_File(prefix + entry.name, entry.stat().st_size, number, wnid or named))
    return found


def _numbered(root: Path, files: list[_File], notes: list[str]) -> list[_File]:
    """Those whose names have numbers. Raises DataError where two have the same: each image counts once."""
    numbered = [file for file in files if file.number]
    if len(numbered) < len(files):
        notes.append(f"ignored {len(files) - len(numbered):,} images not called ILSVRC2012_val_NNNNNNNN.JPEG")
    names: dict[int, str] = {}
    for file in numbered:
        if names.setdefault(file.number, file.name) != file.name:
            raise DataError(f"{root} has image {file.number} twice: {names[file.number]} and {file.name}")
    return numbered


def _beside(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((place / name for place in (root, root.parent) for name in names if (place / name).exists()), None)
