"""Features in an .npz file: `vitrail embed` writes it, `vitrail probe --features` reads it, from any program.

For a data set it holds train_features, train_labels, test_features and test_labels, and class_names, train_ids and
test_ids if they are known. For single files it holds features and ids (paths), and labels and class_names if known.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import DataError
from vitrail.evaluation.features import Features
from vitrail.files import DAMAGED_ZIP, read_array_header, replacing

KEYS = ("train_features", "train_labels", "test_features", "test_labels")


def save_features(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an .npz, replaced atomically, without copying them. Raises DataError if it cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def load_features(path: str | Path) -> tuple[Features, Features]:
    """Return the features of the training images and of the test images.

    Without class_names, the names are the classes' numbers. Raises DataError with the array and the problem: it is
    missing, damaged or not finite, has a wrong type or shape, or holds Python objects, which are never read.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            if missing := [key for key in KEYS if key not in members]:
                raise DataError(
                    f"{path} lacks {', '.join(missing)}: it holds {', '.join(sorted(members)) or 'nothing'}. It must "
                    f"hold {', '.join(KEYS)}; `vitrail embed` writes them for a data set with splits"
                )
            optional = [key for key in ("class_names",) if key in members]
            arrays = {key: _read(path, archive, members[key]) for key in (*KEYS, *optional)}
    except DAMAGED_ZIP as error:
        raise DataError(f"{path} cannot be read as an .npz of features: {error}") from error
    for split in ("train", "test"):
        arrays |= _checked(path, split, arrays[f"{split}_features"], arrays[f"{split}_labels"])
    widths = [arrays[f"{split}_features"].shape[1] for split in ("train", "test")]
    if widths[0] != widths[1]:
        raise DataError(f"{path}: train_features has {widths[0]} columns and test_features {widths[1]}")
    names = _class_names(path, arrays)
    train, test = (
        Features(arrays[f"{split}_features"], labels, np.arange(len(labels)), names)
        for split in ("train", "test")
        for labels in (arrays[f"{split}_labels"],)
    )
    for part, what in ((train, "training"), (test, "test")):
        try:
            part.labelled(what)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return train, test


def _read(path: Path, archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """Return one array after checking its header; `numpy.load` would allocate whatever the header claims."""
    info = archive.getinfo(member)
    with archive.open(info) as stream:
        header = read_array_header(stream)
    if header.dtype.hasobject:
        raise DataError(f"{path}: {member} holds Python objects, which could run code and are not read")
    size, there = math.prod(header.shape) * header.dtype.itemsize, info.file_size - header.length
    if size != there:
        raise DataError(
            f"{path}: the header of {member} claims {header.dtype} of shape {header.shape}, {size:,} bytes, but "
            f"{there:,} are there"
        )
    with archive.open(info) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _checked(path: Path, split: str, features: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return features as float32 [N, width] and labels as int64 [N]. Raises DataError if they are anything else."""
    if features.ndim != 2 or features.dtype.kind not in "fiu" or 0 in features.shape:
        raise DataError(
            f"{path}: {split}_features is {features.dtype} of shape {features.shape}; it must be numbers "
            "[images, features], with at least one image and at least one feature"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {split}_labels is {labels.dtype} of shape {labels.shape}; it must be integers [images], "
            "0 or larger, or -1 for an unknown class"
        )
    if len(labels) != len(features):
        raise DataError(f"{path}: {split}_features has {len(features)} rows and {split}_labels {len(labels)}")
    if labels.min() < -1:
        raise DataError(
            f"{path}: {split}_labels holds {labels.min()}; a label is 0 or larger, or -1 for an unknown class"
        )
    return {
        f"{split}_features": features.astype(np.float32, copy=False),
        f"{split}_labels": labels.astype(np.int64, copy=False),
    }


def _class_names(path: Path, arrays: dict[str, Any]) -> list[str]:
    largest = max(int(arrays[f"{split}_labels"].max()) for split in ("train", "test"))
    if "class_names" not in arrays:
        return [str(number) for number in range(largest + 1)]
    names = arrays["class_names"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: class_names is {names.dtype} of shape {names.shape}; it must be text [classes]")
    if largest >= len(names):
        raise DataError(f"{path}: label {largest} has no name: class_names holds {len(names)}")
    return [str(name) for name in names]
