"""Features in an .npz: what `vitrail embed` writes and `vitrail probe --features` reads, whoever wrote it.

Of a data set: train_features, train_labels, test_features, test_labels; class_names, train_ids and test_ids where
they are known. Of loose files: features and ids (their paths), and labels and class_names where they are known.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from vitrail.errors import DataError
from vitrail.evaluation.features import Features

KEYS = ("train_features", "train_labels", "test_features", "test_labels")
_BROKEN = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, SyntaxError, TokenError)


def save_features(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an .npz that appears when it is whole; nothing is copied. Raises DataError."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load_features(path: str | Path) -> tuple[Features, Features]:
    """Return the features of training and of test images.

    Without class_names, classes are called by their numbers. Raises DataError, naming array and problem, for an
    array that is missing, of a wrong type or shape, not finite or torn, and for Python objects, which are not read.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            if missing := [key for key in KEYS if key not in members]:
                raise DataError(
                    f"{path} lacks {', '.join(missing)}: it holds {', '.join(sorted(members)) or 'nothing'}, and "
                    f"needed are {', '.join(KEYS)}, as `vitrail embed` writes them from a data set with splits"
                )
            optional = [key for key in ("class_names",) if key in members]
            arrays = {key: _read(path, archive, members[key]) for key in (*KEYS, *optional)}
    except _BROKEN as error:
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
            part.known(what)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return train, test


def _read(path: Path, archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """One array, after a look at its header: `numpy.load` would allocate whatever that claims."""
    info = archive.getinfo(member)
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        shape, _, dtype = (
            np.lib.format.read_array_header_1_0(stream)
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0(stream)
        )
        if dtype.hasobject:
            raise DataError(f"{path}: {member} holds Python objects, which could run code and are not read")
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size != info.file_size - stream.tell():
            raise DataError(
                f"{path}: the header of {member} claims {dtype} of shape {shape}, {size:,} bytes, but "
                f"{info.file_size - stream.tell():,} are there"
            )
    with archive.open(info) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _checked(path: Path, split: str, features: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Features as float32 [N, width] and labels as int64 [N]."""
    if features.ndim != 2 or features.dtype.kind not in "fiu" or 0 in features.shape:
        raise DataError(
            f"{path}: {split}_features is {features.dtype} of shape {features.shape}; it must be numbers "
            "[images, features], at least one of each"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {split}_labels is {labels.dtype} of shape {labels.shape}; it must be integers [images], "
            "from 0 on, -1 where the class is not known"
        )
    if len(labels) != len(features):
        raise DataError(f"{path}: {split}_features has {len(features)} rows and {split}_labels {len(labels)}")
    if labels.min() < -1:
        raise DataError(f"{path}: {split}_labels holds {labels.min()}; labels go from 0 on, -1 is an unknown class")
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
