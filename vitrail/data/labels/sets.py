"""The labels of images: one class for each (an int64 array), any number of classes (`LabelSets`), or `Numbers`.

Several of these side by side are `Answers`.

A source has one kind in `labels`. All have a length and are cut by an array of indices, `labels[indices]`. Code that
can use one class per image only calls `one_label`, which rejects the other kinds by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from vitrail.data.labels.numbers import Numbers
from vitrail.errors import DataError
from vitrail.words import listing

UNKNOWN = -1
"""Label of an image whose class is not known."""
SEPARATOR = "|"
"""Text between the names of an image's labels where they are written in one cell."""

Label = int | np.ndarray
"""Label of one image: a class, or the classes of a set, int64 [k], ascending; or UNKNOWN; or float64 [targets]; or a
row of `Answers`, float64 [width]."""
BETWEEN = ": "
"""Text between the name of an answer and that of one of its classes."""


class LabelSets:
    """A set of classes for each image; it may be empty. Takes 8 bytes per image and 4 per label.

    ends: int64 [N], where the labels of each image end in `classes`. classes: int32 [labels], ascending within an
    image. width: Number of classes. known: bool [N], whether the labels of an image are known (default: all).
    """

    what = "sets of labels"
    """Name of this kind of labels in messages."""

    def __init__(self, ends: np.ndarray, classes: np.ndarray, width: int, known: np.ndarray | None = None) -> None:
        self.ends, self.classes, self.width = ends, classes, width
        self.known = np.ones(len(ends), dtype=bool) if known is None else known

    @classmethod
    def of_pairs(
        cls, rows: np.ndarray, classes: np.ndarray, count: int, width: int, known: np.ndarray | None = None
    ) -> LabelSets:
        """Return the labels of `count` images from pairs of an image and a class, in any order; repeats count once."""
        keys = np.unique(rows.astype(np.int64) * width + classes)
        ends = np.searchsorted(keys, (np.arange(count) + 1) * width)
        return cls(ends, (keys % max(width, 1)).astype(np.int32), width, known)

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | None], width: int) -> LabelSets:
        """Return the labels of images from the classes of each; None for an image with unknown labels."""
        counts = [0 if one is None else len(one) for one in sets]
        classes = np.fromiter(chain.from_iterable(one for one in sets if one is not None), np.int64, sum(counts))
        known = np.array([one is not None for one in sets], dtype=bool)
        return cls.of_pairs(np.repeat(np.arange(len(sets)), counts), classes, len(sets), width, known)

    @classmethod
    def of_one(cls, labels: np.ndarray, width: int) -> LabelSets:
        """Return sets of one class each; UNKNOWN remains unknown."""
        known = labels >= 0
        return cls(np.cumsum(known, dtype=np.int64), labels[known].astype(np.int32), width, known)

    @classmethod
    def of_marks(cls, marks: np.ndarray) -> LabelSets:
        """Return the labels from bool [N, classes]."""
        rows, classes = np.nonzero(marks)
        return cls.of_pairs(rows, classes, *marks.shape)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, indices: np.ndarray | slice) -> LabelSets:
        rows = np.arange(len(self))[indices]
        counts = self.counts[rows]
        ends = np.cumsum(counts)
        # the place of each label: the begin of its image in `classes`, and its rank within the image
        places = np.repeat((self.ends - self.counts)[rows] - (ends - counts), counts) + np.arange(counts.sum())
        return LabelSets(ends, self.classes[places], self.width, self.known[rows])

    @property
    def counts(self) -> np.ndarray:
        """int64 [N]: number of labels of each image."""
        return np.diff(self.ends, prepend=0)

    @property
    def rows(self) -> np.ndarray:
        """int64 [labels]: the image of each entry of `classes`."""
        return np.repeat(np.arange(len(self)), self.counts)

    def at(self, index: int) -> Label:
        """Return the classes of an image, int64 [k], or UNKNOWN."""
        if not self.known[index]:
            return UNKNOWN
        begin = 0 if index % len(self) == 0 else int(self.ends[index - 1])
        return self.classes[begin : int(self.ends[index])].astype(np.int64)

    def renamed(self, table: np.ndarray, width: int) -> LabelSets:
        """See `translated`."""
        return LabelSets.of_pairs(self.rows, table[self.classes], len(self), width, self.known)

    def joined(self, others: list[LabelSets]) -> LabelSets:
        """Return these labels with those of other images behind them."""
        sets = [self, *others]
        starts = np.cumsum([0, *(len(one.classes) for one in sets)])
        ends = np.concatenate([one.ends + start for one, start in zip(sets, starts, strict=False)])
        classes, mask = (np.concatenate([getattr(one, name) for one in sets]) for name in ("classes", "known"))
        return LabelSets(ends, classes, self.width, mask)

    def marks(self) -> np.ndarray:
        """Return int8 [N, classes]: 1 for a label, 0 for none, and -1 in the whole row of an unknown image."""
        marks = np.zeros((len(self), self.width), dtype=np.int8)
        marks[self.rows, self.classes] = 1
        marks[~self.known] = UNKNOWN
        return marks


class Answers:
    """Several answers for each image, each with labels of its own kind.

    parts: Name of each answer -> its labels and class names. Among the classes of all answers, a class is
    "species: cat", and a number has the name of its answer.
    """

    def __init__(self, parts: Mapping[str, Named]) -> None:
        self.parts = dict(parts)

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())).labels)

    def __getitem__(self, indices: np.ndarray | slice) -> Answers:
        return Answers({name: Named(part.labels[indices], part.class_names) for name, part in self.parts.items()})

    @property
    def width(self) -> int:
        """Length of a row: 1 for a class, and for labels and numbers their number."""
        return sum(label_width(part.labels) for part in self.parts.values())

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether any answer of an image is known."""
        found: np.ndarray = np.any([known(part.labels) for part in self.parts.values()], axis=0)
        return found

    @property
    def class_names(self) -> list[str]:
        """Names of the outputs of all answers, in order."""
        return [
            name if isinstance(part.labels, Numbers) else f"{name}{BETWEEN}{one}"
            for name, part in self.parts.items()
            for one in part.class_names
        ]

    def at(self, index: int) -> np.ndarray:
        """Return the row of an image: a class, or 1 for each label and 0 for the others, -1 if unknown; or numbers."""
        row: list[float] = []
        for labels, _ in self.parts.values():
            label = label_at(labels, index)
            if isinstance(labels, LabelSets):
                marks = np.zeros(labels.width) if isinstance(label, np.ndarray) else np.full(labels.width, UNKNOWN)
                if isinstance(label, np.ndarray):
                    marks[label] = 1
                row.extend(marks.tolist())
            else:
                row.extend([label] if isinstance(label, int) else label.tolist())
        return np.array(row)

    def strata(self) -> np.ndarray | LabelSets:
        """Return the classes of all answers as one set for each image; one class for all if there are only numbers."""
        pairs, begin = [], 0
        for labels, names in self.parts.values():
            if not isinstance(labels, Numbers):
                sets = as_sets(labels, len(names))
                pairs.append((sets.rows, sets.classes + begin))
                begin += len(names)
        if not pairs:
            return np.zeros(len(self), dtype=np.int64)
        rows, classes = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return LabelSets.of_pairs(rows, classes, len(self), begin)


Labels = np.ndarray | LabelSets | Numbers | Answers
"""int64 [N], or a set for each image, or numbers, or several of these."""


class Named(NamedTuple):
    """Labels, and the name of each class."""

    labels: Labels
    class_names: list[str]


def label_width(labels: Labels) -> int:
    """Return how many values say the label of an image in a row of `Answers`."""
    return 1 if isinstance(labels, np.ndarray) else labels.width


def classes_of_answers(class_names: Iterable[str]) -> dict[str, list[str]]:
    """Return the name of each answer -> its own class names, from those of the outputs (`Answers.class_names`)."""
    found: dict[str, list[str]] = {}
    for name in class_names:
        answer, between, own = name.partition(BETWEEN)
        found.setdefault(answer, []).append(own if between else answer)
    return found


def named(values: Sequence[str | Sequence[str] | None], class_names: Sequence[str] | None = None) -> Named:
    """Return labels of named classes: a name, several names, or None (unknown) for each image.

    The labels are sets if a value is not a name. Classes are `class_names`, else all names, in order. Raises DataError
    for a name that is not among `class_names`.
    """
    if class_names is None and all(isinstance(value, str) for value in values):  # the usual case, and the fastest
        names = order_classes({str(value) for value in set(values)})
        number = {name: index for index, name in enumerate(names)}
        return Named(np.fromiter((number[value] for value in values), np.int64, len(values)), names)  # type: ignore[index]
    sets = [(value,) if isinstance(value, str) else value for value in values]
    found = {name for one in sets if one is not None for name in one}
    names = order_classes(found) if class_names is None else list(class_names)
    number = {name: index for index, name in enumerate(names)}
    if unknown := sorted(found - number.keys()):
        raise DataError(
            f"labels that are not among the {len(names)} known classes: {listing(unknown)}; known are {listing(names)}"
        )
    classes = [None if one is None else [number[name] for name in one] for one in sets]
    if any(not isinstance(value, str) for value in values if value is not None):
        return Named(LabelSets.of(classes, len(names)), names)
    return Named(np.array([UNKNOWN if one is None else one[0] for one in classes], dtype=np.int64), names)


def distinct_names(labels: Iterable[str | Iterable[str] | None]) -> set[str]:
    """Return all names in labels as `named` takes them."""
    return {name for one in labels if one is not None for name in ([one] if isinstance(one, str) else one)}


def label_at(labels: Labels, index: int) -> Label:
    """Return the label of one image."""
    return int(labels[index]) if isinstance(labels, np.ndarray) else labels.at(index)


def label_names(labels: Labels, index: int, class_names: Sequence[str]) -> list[str]:
    """Return the names of an image's classes, or its numbers as texts; none for an unknown label."""
    if isinstance(labels, Answers):
        each = {name: label_text(part, index, names) for name, (part, names) in labels.parts.items()}
        return [f"{name}{BETWEEN}{text}" for name, text in each.items() if text]
    if isinstance(labels, Numbers):
        return [f"{value:.6g}" for value in labels.at(index).tolist() if value == value]
    label = label_at(labels, index)
    classes = [label] if isinstance(label, int) else label.tolist()
    return [class_names[number] for number in classes if number != UNKNOWN]


def label_text(labels: Labels, index: int, class_names: Sequence[str]) -> str:
    """Return the names of an image's classes as one text; "" for none and for an unknown label."""
    return SEPARATOR.join(label_names(labels, index, class_names))


def set_text(names: Iterable[str]) -> str:
    """Return the names of an image's labels as one text that no class name equals: "\0cat\0dog", "\0" for none."""
    return "\0" + "\0".join(sorted(names))


def stored_texts(labels: Labels, class_names: Sequence[str]) -> list[str]:
    """Return each image's label as an index stores it: the name of a class, a `set_text`, or numbers; "" if unknown."""
    if isinstance(labels, Answers):
        return [json.dumps(row) for row in zip(*(stored_texts(*part) for part in labels.parts.values()), strict=True)]
    if isinstance(labels, Numbers):
        return labels.texts()
    if not isinstance(labels, LabelSets):
        names = [*class_names, ""]
        return [names[label] for label in labels.tolist()]
    rows = zip(np.split(labels.classes, labels.ends)[:-1], labels.known.tolist(), strict=True)
    return [set_text(class_names[label] for label in row.tolist()) if known else "" for row, known in rows]


def names_of_text(text: str) -> str | list[str]:
    """Return what `stored_texts` stored as a text: the name of a class, or those of a set."""
    if not text.startswith("\0"):
        return text
    return text[1:].split("\0") if len(text) > 1 else []


def known(labels: Labels) -> np.ndarray:
    """Return whether the labels of each image are known, bool [N]."""
    return labels >= 0 if isinstance(labels, np.ndarray) else labels.known


def class_counts(labels: Labels, classes: int) -> np.ndarray:
    """Return the number of images of each class, int64 [classes]. An image counts for each of its labels or targets."""
    if isinstance(labels, Answers):
        return np.concatenate([class_counts(part, len(names)) for part, names in labels.parts.values()])
    if isinstance(labels, Numbers):
        return np.full(classes, np.count_nonzero(labels.known))
    numbers = labels.classes if isinstance(labels, LabelSets) else labels[labels >= 0]
    return np.bincount(numbers, minlength=classes)


def translated(labels: Labels, table: np.ndarray, width: int) -> Labels:
    """Return the labels with class c renamed to `table[c]`, int64 [classes], as one of `width` classes.

    `labels` are of one kind."""
    assert not isinstance(labels, Answers)
    if isinstance(labels, LabelSets):
        return labels.renamed(table, width)
    if isinstance(labels, Numbers):
        return Numbers(labels.values[:, np.argsort(table)])
    return np.append(table, UNKNOWN)[labels]  # UNKNOWN = -1 picks the last entry


def concatenated(parts: Sequence[Labels]) -> Labels:
    """Return the labels of several sources in sequence; sets if those of any source are sets."""
    if of_answers := [part.parts for part in parts if isinstance(part, Answers)]:
        every = {name: [one[name].labels for one in of_answers] for name in of_answers[0]}
        return Answers(
            {name: Named(concatenated(each), of_answers[0][name].class_names) for name, each in every.items()}
        )
    if numbers := [part.values for part in parts if isinstance(part, Numbers)]:
        return Numbers(np.concatenate(numbers))
    width = next((part.width for part in parts if isinstance(part, LabelSets)), None)
    if width is None:
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    first, *others = [as_sets(part, width) for part in parts]
    return first.joined(others)


def as_sets(labels: Labels, width: int) -> LabelSets:
    """Return labels as sets: one class becomes a set of one. `labels` are no numbers and no answers."""
    assert not isinstance(labels, Numbers | Answers)
    return labels if isinstance(labels, LabelSets) else LabelSets.of_one(labels, width)


def as_one(labels: Labels) -> np.ndarray | None:
    """Return sets of exactly one class each as int64 [N]; None if an image with known labels has another number.

    `labels` are no numbers and no answers."""
    assert not isinstance(labels, Numbers | Answers)
    if not isinstance(labels, LabelSets):
        return labels
    if not np.array_equal(labels.counts, labels.known):
        return None
    one = np.full(len(labels), UNKNOWN, dtype=np.int64)
    one[labels.known] = labels.classes
    return one


def one_label(labels: Labels, what: str) -> np.ndarray:
    """Return int64 [N]. Raises DataError, which names `what` needs it, for images with several labels or numbers."""
    if isinstance(labels, Answers):
        raise DataError(
            f"{what} needs one class for each image, and these images have several answers "
            f"({listing(list(labels.parts))}). Leave one of them in data.answers"
        )
    if isinstance(labels, Numbers):
        raise DataError(
            f"{what} needs one class for each image, and the labels of these images are numbers. Train and measure a "
            "network for numbers with `vitrail train --objective.kind regression` and `vitrail evaluate`"
        )
    if isinstance(labels, LabelSets):
        raise DataError(
            f"{what} needs one label for each image, and these images have {labels.what} ({summary(labels)}). Train "
            "and measure a network for them with `vitrail train` and `vitrail evaluate`"
        )
    return labels


def summary(labels: LabelSets) -> str:
    """Return the number of labels in words: "2.4 labels per image of 80 classes, 120 images without a label"."""
    counts = labels.counts[labels.known]
    mean = counts.mean() if len(counts) else 0.0
    without = int(np.count_nonzero(counts == 0))
    none = f", {without:,} image{'s' * (without != 1)} without a label" if without else ""
    return f"{mean:.2g} labels per image of {labels.width:,} classes{none}"


def order_classes(names: set[str]) -> list[str]:
    """Sort class names: by value if all are integers of at most 1,000 digits, else by code point."""
    if all(re.fullmatch(r"-?\d{1,1000}", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
