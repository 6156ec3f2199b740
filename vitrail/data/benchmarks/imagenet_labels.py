"""Classes and labels of ILSVRC2012 (ImageNet), and which answers are right. Torch-free.

The classes are numbered 0 to 999 in the order of their WordNet ids. The validation images are numbered from 1, in their
file names. Published label files use three numberings of the classes: the one above, ILSVRC2012_ID of the development
kit (1 to 1000, another order), or WordNet ids. A file that does not show which numbering it uses is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.item import UNKNOWN
from vitrail.errors import DataError


@cache
def _marked() -> tuple[tuple[str, str], ...]:
    lines = files("vitrail.data.benchmarks").joinpath("imagenet.txt").read_text(encoding="utf-8").splitlines()
    return tuple((line[:9], line[10:]) for line in lines if not line.startswith("#"))


@cache
def wnids() -> tuple[str, ...]:
    """Return the WordNet id of each class, such as n01440764, in the order of their numbers 0 to 999."""
    return tuple(wnid for wnid, _ in _marked())


def part(mark: str) -> np.ndarray:
    """Return the numbers, int64 [200], of the classes of ImageNet-A ("a") or ImageNet-R ("r")."""
    return np.array([number for number, (_, marks) in enumerate(_marked()) if mark in marks], dtype=np.int64)


@dataclass(frozen=True)
class AnswerKey:
    """The outputs of the network that are right for each label of a source.

    An image may have several right answers (ImageNet ReaL), a class several outputs, and an output no class
    (ObjectNet). `right` alone decides which answers are right; `label` and `output` say under which class an image
    and an answer are listed.
    """

    right: np.ndarray
    """bool [labels, outputs]: is this output a right answer? At least one is, for each label."""
    label: np.ndarray
    """int64 [labels]: the class that images with this label count for."""
    output: np.ndarray
    """int64 [outputs]: the class that this output stands for; UNKNOWN where it is none of the classes."""

    def marks(self, labels: np.ndarray) -> np.ndarray:
        """Return bool [B, outputs]: the right answers for these labels [B]; none for UNKNOWN."""
        return self.right[labels] & (labels >= 0)[:, None]

    def as_classes(self, labels: np.ndarray, top: np.ndarray, hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels [N], answers [N, k]) as classes; a right answer is the class of its image.

        labels are those of the source, `top` [N, k] outputs (-1: no answer), `hit` bool [N, k] whether they are right.
        """
        classes = np.where(labels >= 0, self.label[labels], UNKNOWN)
        others = np.where(top >= 0, self.output[top], UNKNOWN)
        return classes, np.where(hit, classes[:, None], others)


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
