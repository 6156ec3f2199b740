"""ObjectNet's classes in terms of ImageNet's, from the files that its authors publish with it. Torch-free.

"ObjectNet: A large-scale bias-controlled dataset" (Barbu et al., 2019) has 313 classes of household things. 113 of them
are also in ImageNet, some as several classes: a chair is a barber chair, a folding chair or a rocking chair. An answer
is right if it is one of the object's ImageNet classes. An answer among ImageNet's other classes is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.data.benchmarks.imagenet_labels import AnswerKey, right_answers
from vitrail.data.item import UNKNOWN
from vitrail.errors import DataError
from vitrail.files import read_json_object, read_text

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
