"""Classes and labels of ILSVRC2012 (ImageNet) and of ObjectNet, and which answers are right. Torch-free.

The classes have the numbers 0 to 999 in the order of their WordNet ids. The validation images are numbered from 1 in
their file names. Published files of labels name classes in three ways: by the number above, by the ILSVRC2012_ID of the
development kit (1 to 1000, in another order), or by WordNet id. A file that does not show which it uses is refused.

"ObjectNet: A large-scale bias-controlled dataset" (Barbu et al., 2019) has 313 classes of household things. 113 of them
are also in ImageNet, some as several classes: a chair is a barber chair, a folding chair or a rocking chair. An answer
is right if it is one of the object's ImageNet classes. An answer among ImageNet's other classes is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from vitrail.data.benchmarks.catalog import packaged_text
from vitrail.data.item import UNKNOWN
from vitrail.errors import DataError
from vitrail.files import read_json, read_json_object, read_text


@cache
def _marked() -> tuple[tuple[str, str], ...]:
    """Return (WordNet id, marks of the sets that contain the class) of each class."""
    lines = packaged_text("imagenet.txt").splitlines()
    return tuple((line[:9], line[10:]) for line in lines if not line.startswith("#"))


@cache
def wnids() -> tuple[str, ...]:
    """Return the WordNet id of each class, such as n01440764, in the order of their numbers 0 to 999."""
    return tuple(wnid for wnid, _ in _marked())


@cache
def class_numbers() -> dict[str, int]:
    """Return WordNet id -> number of the class."""
    return {wnid: number for number, wnid in enumerate(wnids())}


def part(mark: str) -> np.ndarray:
    """Return the numbers, int64 [200], of the classes of ImageNet-A ("a") or ImageNet-R ("r")."""
    return np.array([number for number, (_, marks) in enumerate(_marked()) if mark in marks], dtype=np.int64)


@dataclass(frozen=True)
class AnswerKey:
    """Which outputs of the network are right for each label of a source.

    An image may have several right answers (ImageNet ReaL). A class may have several outputs, and an output may belong
    to no class (ObjectNet). Only `right` decides which answers are right; `label` and `output` decide under which class
    an image and an answer are listed.
    """

    right: np.ndarray
    """bool [labels, outputs]: whether the output is a right answer. Each label has at least one."""
    label: np.ndarray
    """int64 [labels]: the class under which images with this label are listed."""
    output: np.ndarray
    """int64 [outputs]: the class of this output; UNKNOWN if it belongs to none of the classes."""

    def marks(self, labels: np.ndarray) -> np.ndarray:
        """Return bool [B, outputs]: the right answers for these labels [B]; none for UNKNOWN."""
        return self.right[labels] & (labels >= 0)[:, None]

    def as_classes(self, labels: np.ndarray, top: np.ndarray, hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels [N], answers [N, k]) as classes. A right answer gets the class of its image.

        `labels` [N] are those of the source, `top` [N, k] are outputs (-1: no answer), and `hit` bool [N, k] tells
        whether each output is right.
        """
        classes = np.where(labels >= 0, self.label[labels], UNKNOWN)
        others = np.where(top >= 0, self.output[top], UNKNOWN)
        return classes, np.where(hit, classes[:, None], others)


def right_answers(classes: Collection[Sequence[int]]) -> np.ndarray:
    """Return bool [labels, 1000]: the right answers for each label, from the ImageNet classes of each label."""
    right = np.zeros((len(classes), 1000), dtype=bool)
    for row, valid in zip(right, classes, strict=True):
        row[list(valid)] = True
    return right


LABEL_FILES = (
    "ILSVRC2012_devkit_t12",
    "ILSVRC2012_validation_ground_truth.txt",
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "val.txt",
)
"""Files and folders beside the images that are searched for labels if the user names no file."""
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_LINE = re.compile(r"(?:\S*?ILSVRC2012_val_(\d{8})[^\s,]*[\s,]+)?(n\d{8}|\d{1,4})(?![^\s,])")


def read_real(path: Path) -> list[tuple[int, ...]]:
    """Return the classes, 0 to 999, of each validation image by ImageNet ReaL, in the order of the images.

    An image may have several classes or none. Raises DataError for a file that is not real.json.
    """
    value = read_json(path, DataError)
    lists = isinstance(value, list) and all(isinstance(one, list) for one in value)
    if not lists or not all(type(number) is int and 0 <= number < 1000 for one in value for number in one):
        raise DataError(f"{path} is not real.json, which is a list with one list of classes (0 to 999) for each image")
    return [tuple(one) for one in value]


def read_answers(path: Path) -> dict[int, int]:
    """Return number of the validation image, from 1 -> its class, 0 to 999.

    `path` is the development kit's folder, or its ground truth with meta.mat beside it, or a text file. The lines of a
    text file are WordNet ids in the order of the images, or file names with a WordNet id or a class number (val.txt,
    and LOC_val_solution.csv of Kaggle). Raises DataError, which quotes the line, for anything else.
    """
    if path.is_dir():
        folder = path / "data" if (path / "data").is_dir() else path
        return read_answers(folder / TRUTH)
    lines = [line.strip() for line in read_text(path, DataError).splitlines()]
    lines = [line for line in lines if line and not line.startswith("ImageId")]
    if lines and all(line.isdecimal() for line in lines):
        return _ground_truth(path, lines)
    labels: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.match(line)
        if match is None or (match[1] is None and match[2].isdecimal()):
            raise DataError(f"{path}: {line[:60]!r} does not say which class image {number} has; a WordNet id would")
        label = int(match[2]) if match[2].isdecimal() else class_numbers().get(match[2], -1)
        if not 0 <= label < 1000:
            raise DataError(f"{path}: {match[2]!r} in {line[:60]!r} is not a class of ILSVRC2012")
        labels[int(match[1] or number)] = label
    return labels


def _ground_truth(path: Path, lines: list[str]) -> dict[int, int]:
    """Return the classes of lines that hold the development kit's own class numbers, which meta.mat translates."""
    meta = path.parent / META
    if not meta.is_file():
        raise DataError(
            f"{path} holds numbers only, and the development kit has its own order of classes. Put its {META} beside "
            "the file, or name a file with WordNet ids"
        )
    names = _devkit_classes(meta)
    try:
        return {number: class_numbers()[names[int(line)]] for number, line in enumerate(lines, start=1)}
    except KeyError as error:
        raise DataError(f"{path}: {error} is not a class of {meta}") from error


def _devkit_classes(path: Path) -> dict[int, str]:
    """Return ILSVRC2012_ID -> WordNet id of the classes that have no classes below them."""
    from scipy.io import loadmat  # comes with scikit-learn

    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if not int(row["num_children"])}
    except Exception as error:  # for a damaged file scipy raises anything
        raise DataError(f"{path} is not the meta.mat of ILSVRC2012's development kit: {error}") from error


FOLDERS, OVERLAP = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NUMBERS, LABELS = "pytorch_to_imagenet_2012_id.json", "imagenet_to_label_2012_v2"


@dataclass(frozen=True)
class ObjectNetClasses:
    """ObjectNet's classes that ImageNet also has: their folders, their names, and their ImageNet classes (0 to 999)."""

    folders: list[str]
    names: list[str]
    classes: list[tuple[int, ...]]

    def key(self) -> AnswerKey:
        """Return which of ImageNet's 1,000 outputs are right for each of these classes."""
        output = np.full(1000, UNKNOWN, dtype=np.int64)
        for number, classes in enumerate(self.classes):
            output[list(classes)] = number
        return AnswerKey(right_answers(self.classes), np.arange(len(self.names)), output)


def read_mapping(folder: Path) -> ObjectNetClasses:
    """Read the four files of ObjectNet's folder `mappings`; classes are in the order of their folders' names.

    The ImageNet labels of a class are text, separated by "; ". Each label is a line of imagenet_to_label_2012_v2.
    pytorch_to_imagenet_2012_id.json maps the number of an ImageNet class to the number of its line, from 0.
    Raises DataError for a file that is missing or does not fit the others.
    """
    if lacking := [name for name in (FOLDERS, OVERLAP, NUMBERS, LABELS) if not (folder / name).is_file()]:
        raise DataError(f"{folder / lacking[0]}, which is part of ObjectNet, does not exist")
    class_of = _class_of_label(folder)
    overlap = read_json_object(folder / OVERLAP, DataError)
    folders = read_json_object(folder / FOLDERS, DataError)
    known = sorted((name, label) for name, label in folders.items() if str(label) in overlap)
    if lost := sorted(overlap.keys() - {label for _, label in known}):
        raise DataError(f"{folder / OVERLAP} has a class {lost[0]!r}, for which {FOLDERS} has no folder")
    classes = []
    for _, label in known:
        texts = [text.strip() for text in str(overlap[label]).split("; ")]
        if strangers := [text for text in texts if text not in class_of]:
            raise DataError(f"{folder / OVERLAP}: {strangers[0]!r} of {label!r} is not a line of {LABELS}")
        classes.append(tuple(sorted({number for text in texts for number in class_of[text]})))
    return ObjectNetClasses([name for name, _ in known], [label for _, label in known], classes)


def _class_of_label(folder: Path) -> dict[str, list[int]]:
    """Return the label of ImageNet classes -> the numbers of the classes; a few classes have the same label."""
    lines = read_text(folder / LABELS, DataError).splitlines()
    content = read_json_object(folder / NUMBERS, DataError)
    if not all(type(line) is int for line in content.values()):
        raise DataError(f"{folder / NUMBERS} should map numbers of classes to numbers of lines")
    line_of = {int(number): line for number, line in content.items() if number.isdecimal()}
    if not set(line_of) == set(line_of.values()) == set(range(len(lines))) == set(range(1000)):
        raise DataError(f"{folder / NUMBERS} should give each class 0 to 999 a line, from 0, of the 1,000 of {LABELS}")
    found: dict[str, list[int]] = {}
    for number, line in line_of.items():
        found.setdefault(lines[line].strip(), []).append(number)
    return found
