"""ObjectNet's classes in terms of ImageNet's, from the files its authors publish with it. Torch-free.

"ObjectNet: A large-scale bias-controlled dataset" (Barbu et al., 2019): 313 classes of household things, of which
113 are also in ImageNet, some of them as several classes (a chair is a barber chair, a folding chair or a rocking
chair). An answer is right if it is one of them; an answer among ImageNet's other classes is wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.benchmarks.imagenet_labels import AnswerKey
from vitrail.data.item import UNKNOWN
from vitrail.errors import DataError

FOLDERS, OVERLAP = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NUMBERS, LABELS = "pytorch_to_imagenet_2012_id.json", "imagenet_to_label_2012_v2"
BORDER = 2
"""Pixels cut from each side: the images have a red border of one, which blurs into the next."""


@dataclass(frozen=True)
class Mapping:
    """ObjectNet's classes that ImageNet has, too: the folder, the class's name, its ImageNet numbers (0 to 999)."""

    folders: list[str]
    names: list[str]
    classes: list[tuple[int, ...]]

    def key(self) -> AnswerKey:
        """Return which of ImageNet's 1,000 outputs are right for each of these classes."""
        right = np.zeros((len(self.names), 1000), dtype=bool)
        output = np.full(1000, UNKNOWN, dtype=np.int64)
        for number, classes in enumerate(self.classes):
            right[number, list(classes)] = True
            output[list(classes)] = number
        return AnswerKey(right, np.arange(len(self.names)), output)


def read_mapping(folder: Path) -> Mapping:
    """Read the four files of ObjectNet's folder `mappings`; classes are in the order of their folders' names.

    A class's ImageNet labels are written out, separated by "; "; a label is a line of imagenet_to_label_2012_v2, and
    the number of that line, from 0, is what pytorch_to_imagenet_2012_id.json gives for ImageNet's class numbers.
    Raises DataError for a file that is missing or does not fit the others.
    """
    labels = _read(folder, LABELS).splitlines()
    lines = _object(folder, NUMBERS)
    if not all(type(line) is int for line in lines.values()):
        raise DataError(f"{folder / NUMBERS} should map numbers of classes to numbers of lines")
    class_of = {line: int(number) for number, line in lines.items() if number.isdecimal()}
    if set(class_of) != set(range(1000)) or set(class_of.values()) != set(range(1000)) or len(labels) != 1000:
        raise DataError(f"{folder / NUMBERS} should give each class 0 to 999 a line, from 0, of the 1,000 of {LABELS}")
    numbers: dict[str, list[int]] = {}
    for line, label in enumerate(labels):
        numbers.setdefault(label.strip(), []).append(class_of[line])
    overlap = _object(folder, OVERLAP)
    known = sorted((name, label) for name, label in _object(folder, FOLDERS).items() if str(label) in overlap)
    if lost := sorted(overlap.keys() - {label for _, label in known}):
        raise DataError(f"{folder / OVERLAP} has a class {lost[0]!r} that {FOLDERS} has no folder for")
    classes = []
    for _, label in known:
        texts = str(overlap[label]).split("; ")
        if strangers := [text for text in texts if text.strip() not in numbers]:
            raise DataError(f"{folder / OVERLAP}: {strangers[0]!r} of {label!r} is no line of {LABELS}")
        classes.append(tuple(sorted({number for text in texts for number in numbers[text.strip()]})))
    return Mapping([name for name, _ in known], [label for _, label in known], classes)


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder / name}, which is part of ObjectNet, cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{folder / name} is not UTF-8 text") from error


def _object(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(_read(folder, name))
    except ValueError as error:
        raise DataError(f"{folder / name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{folder / name} should be one JSON object, not {type(value).__name__}")
    return value
