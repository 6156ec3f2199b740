"""Labels of ILSVRC2012's validation images, from the files they are published in. Torch-free.

The images are numbered from 1, in their names. Three numberings of classes are about: that of everybody's networks
(sorted by WordNet id, 0 to 999), that of the development kit (ILSVRC2012_ID, 1 to 1000, another order), and none,
where WordNet ids are written out. A file that does not say which of them it uses is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vitrail.data.benchmarks.imagenet_classes import wnids
from vitrail.errors import DataError

LABEL_FILES = (
    "ILSVRC2012_devkit_t12",
    "ILSVRC2012_validation_ground_truth.txt",
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "val.txt",
)
"""Where labels are looked for beside the images, if no file is named."""
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_LINE = re.compile(r"(?:\S*?ILSVRC2012_val_(\d{8})[^\s,]*[\s,]+)?(n\d{8}|\d{1,4})(?![^\s,])")


def read_real(path: Path) -> list[tuple[int, ...]]:
    """Return the classes, 0 to 999, that each validation image shows by ImageNet ReaL, in the order of the images.

    An image may have several and may have none. Raises DataError for a file that is not real.json.
    """
    value = _json(path)
    if not isinstance(value, list) or not all(_are_classes(one) for one in value):
        raise DataError(f"{path} is not real.json: that is a list with one list of classes (0 to 999) for each image")
    return [tuple(one) for one in value]


def _are_classes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1000 for one in value)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error


def read_labels(path: Path) -> dict[int, int]:
    """Return the class, 0 to 999, of each validation image by its number, which begins at 1.

    `path` is the development kit's folder, its ground truth with meta.mat beside it, or a text file whose lines are
    WordNet ids in the order of the images, or file names with a WordNet id or a class number (val.txt, and
    LOC_val_solution.csv of Kaggle). Raises DataError, with the line, for anything else.
    """
    if path.is_dir():
        folder = path / "data" if (path / "data").is_dir() else path
        return read_labels(folder / TRUTH)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text file of labels: {error.reason} at byte {error.start}") from error
    lines = [line for line in lines if line and not line.startswith("ImageId")]
    if lines and all(line.isdecimal() for line in lines):
        return _ground_truth(path, lines)
    position = {wnid: number for number, wnid in enumerate(wnids())}
    labels: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.match(line)
        if match is None or (match[1] is None and match[2].isdecimal()):
            raise DataError(f"{path}: {line[:60]!r} does not say which class image {number} has; a WordNet id would")
        label = int(match[2]) if match[2].isdecimal() else position.get(match[2], -1)
        if not 0 <= label < 1000:
            raise DataError(f"{path}: {match[2]!r} in {line[:60]!r} is no class of ILSVRC2012")
        labels[int(match[1] or number)] = label
    return labels


def _ground_truth(path: Path, lines: list[str]) -> dict[int, int]:
    """Classes by the development kit's own numbers, which its meta.mat translates."""
    meta = path.parent / META
    if not meta.is_file():
        raise DataError(
            f"{path} holds numbers alone, and the development kit numbers classes in an order of its own: put its "
            f"{META} beside it, or name a file with WordNet ids"
        )
    position = {wnid: number for number, wnid in enumerate(wnids())}
    names = _devkit_classes(meta)
    try:
        return {number: position[names[int(line)]] for number, line in enumerate(lines, start=1)}
    except KeyError as error:
        raise DataError(f"{path}: {error} is no class of {meta}") from error


def _devkit_classes(path: Path) -> dict[int, str]:
    """ILSVRC2012_ID -> WordNet id, of the classes that have no classes below them."""
    from scipy.io import loadmat  # comes with scikit-learn

    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if not int(row["num_children"])}
    except Exception as error:  # for a damaged file scipy raises anything
        raise DataError(f"{path} is not the meta.mat of ILSVRC2012's development kit: {error}") from error
