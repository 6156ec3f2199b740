"""The interface of all data sources: images by index, and a report of what was left out.

A reader (`folder`, `table`, `arrow`, `shards`, `arrays`) turns a path into a `DataSet`: its splits, each an
`IndexedSource`, and `Findings`, which say what was left out and why. `roles` chooses and joins the splits.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np

from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import UNKNOWN as UNKNOWN
from vitrail.data.labels.sets import (
    Answers,
    Label,
    Labels,
    LabelSets,
    Named,
    as_sets,
    class_counts,
    classes_of_answers,
    concatenated,
    label_at,
    one_label,
    order_classes,
    translated,
)
from vitrail.errors import DataError, DecodeError
from vitrail.words import listing

T = TypeVar("T")

ROLES = {
    "train": ("train", "training", "train800", "train800val200"),
    "validation": ("validation", "val", "valid", "dev", "val200"),
    "test": ("test", "testing"),
}
"""Purpose of a split -> its usual names."""


SYSTEM_FILE = "hidden or system file"
"""Reason why a file or folder is ignored (`image_names.is_junk`)."""
_EXAMPLES = 3
"""Number of ignored files of a kind that are named."""


class Item(NamedTuple):
    """One image as it is stored, with its label (index into `class_names`) and its id."""

    image: bytes | np.ndarray
    """The bytes of an image file, or uint8 [H, W, 3]."""
    label: Label
    """Index of its class; with several labels the indices, int64 [k]; UNKNOWN; or numbers, float64 [targets]."""
    id: str


@runtime_checkable
class IndexedSource(Protocol):
    """Images by index, with labels, sizes and ids that are known before an image is read.

    Several threads may read at once. `source[i]` raises `DecodeError` (reason "unreadable") if its bytes cannot be
    read.
    """

    class_names: list[str]
    sizes: np.ndarray
    """Stored bytes of each image, int64 [N]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...

    @property
    def labels(self) -> Labels:
        """int64 [N], `LabelSets` for images with several labels, `Numbers`, or `Answers`."""
        ...

    def id(self, index: int) -> str:
        """Return the name of an image, unique in its split and independent of where the data lie."""
        ...


@runtime_checkable
class RemoteSource(IndexedSource, Protocol):
    """A source that should be asked for many images at once, because each request takes a network round trip."""

    remote: bool
    """Should images be requested ahead of time?"""

    def fetch(self, indices: np.ndarray) -> list[bytes | np.ndarray | DecodeError]:
        """Return `source[i].image` for each index, or the DecodeError of an image that cannot be read."""
        ...


def is_remote(source: IndexedSource) -> TypeGuard[RemoteSource]:
    """Return whether images of this source should be requested ahead of time."""
    return bool(getattr(source, "remote", False))


def is_number(id: str) -> bool:
    """Return whether an id says only which number an image has, as `Reader.id`: after a change it may be another's."""
    return re.search(r"\[\d+\]$", id) is not None


class Reader(ABC):
    """Base of sources that read their images one by one; an `IndexedSource`. `name` begins ids that are numbers."""

    groups: Sequence[str] | None = None
    """For each image its cell in the column `Data.group`; None without this column."""

    def __init__(self, labels: Labels, sizes: np.ndarray, class_names: list[str], name: str = "") -> None:
        self.labels, self.sizes, self.class_names, self._name = labels, sizes, class_names, name

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        return Item(self.image(index), label_at(self.labels, index), self.id(index))

    @abstractmethod
    def image(self, index: int) -> bytes | np.ndarray:
        """Return an image as it is stored (`Item.image`)."""

    def id(self, index: int) -> str:
        """See `IndexedSource.id`: the name and the number of the image, counted from 0."""
        return f"{self._name}[{index}]"

    def state(self, index: int) -> str:
        """Return what changes when a stored image does, found without reading it; "" if nothing is known."""
        return ""


def ids(source: IndexedSource, indices: np.ndarray) -> list[str]:
    """Return the ids of several images, in one call if the source supports it."""
    many = getattr(source, "ids", None)
    return [source.id(index) for index in indices.tolist()] if many is None else list(many(indices))


class Rejected(NamedTuple):
    """Something that looks like an image but was left out when the data were opened."""

    id: str
    reason: str


@dataclass
class Findings:
    """Everything that was left out while the data were opened: nothing is left out silently."""

    kind: str
    """folder, labelled files, csv, parquet, hub, shards, packed, arrays, digits, tfds, lists."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Reason -> number of files, or columns of tables, that were ignored."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the names of the first of them."""
    dropped: list[Rejected] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """How the data were read, where nothing is wrong."""
    outside: int = 0
    """Number of images outside the folder of the data: through a link, or through their paths in a table."""
    first_outside: str = ""
    """Path of the first of them."""

    def lies_outside(self, path: str) -> None:
        """Count one more image that lies outside the folder of the data."""
        self.outside += 1
        self.first_outside = self.first_outside or path

    def ignore(self, reason: str, name: str) -> None:
        """Count one more file, or column of a table, that was ignored for this reason."""
        self.ignored[reason] = self.ignored.get(reason, 0) + 1
        if len(first := self.examples.setdefault(reason, [])) < _EXAMPLES:
            first.append(name)

    def drop(self, id: str, reason: str) -> None:
        """List an image (or a file named like one) that was left out."""
        self.dropped.append(Rejected(id, reason))

    def require_whole(self, path: str) -> None:
        """Raise DataError if any of the data at `path` was left out or caused a warning."""
        lines = [*self.warnings, *(f"{item.id}: {item.reason}" for item in self.dropped)]
        if lines:
            more = "" if len(lines) == 1 else f" (and {len(lines) - 1} more)"
            raise DataError(
                f"{path} is not used as a whole, and data.strict is set: {lines[0]}{more}. "
                "Correct the data, or unset data.strict"
            )

    def lines(self) -> list[str]:
        """Return the findings as lines for a terminal; none if nothing was left out."""
        lines = [*self.warnings, *self.notes]
        for reason, count in sorted(self.ignored.items()):
            first = self.examples.get(reason, [])
            more = ", ..." if count > len(first) else ""
            lines.append(f"ignored {count} x {reason}" + (f": {', '.join(first)}{more}" if first else ""))
        lines += [f"left out {item.id}: {item.reason}" for item in self.dropped]
        return lines


@dataclass
class DataSet:
    """The splits of a data set by name (a single split named "" if the data are not split), and the findings."""

    splits: dict[str, IndexedSource]
    findings: Findings

    @property
    def count(self) -> int:
        """Number of images in all splits."""
        return sum(map(len, self.splits.values()))


class Subset:
    """Some images of a source, with labels as indices into another list of class names; an `IndexedSource` itself.

    With `several` labels are sets, of one class each where the source has one label for each image.
    """

    def __init__(
        self,
        source: IndexedSource,
        indices: np.ndarray | None = None,
        class_names: Sequence[str] | None = None,
        *,
        several: bool = False,
    ) -> None:
        self._source = source
        self._indices = None if indices is None else np.asarray(indices, dtype=np.int64)
        self.class_names = list(source.class_names if class_names is None else class_names)
        labels = _translate(source.labels, source.class_names, self.class_names)
        labels = as_sets(labels, len(self.class_names)) if several else labels
        self.labels: Labels = labels if self._indices is None else labels[self._indices]
        self.sizes = source.sizes if self._indices is None else source.sizes[self._indices]
        self.remote = is_remote(source)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        item = self._source[self._there(index)]
        return Item(item.image, label_at(self.labels, index), item.id)

    def id(self, index: int) -> str:
        """See `IndexedSource.id`."""
        return self._source.id(self._there(index))

    def ids(self, indices: np.ndarray) -> list[str]:
        """Return the ids of several images."""
        return ids(self._source, indices if self._indices is None else self._indices[indices])

    def fetch(self, indices: np.ndarray) -> list[bytes | np.ndarray | DecodeError]:
        """See `RemoteSource.fetch`."""
        assert is_remote(self._source)
        return self._source.fetch(indices if self._indices is None else self._indices[indices])

    def within(self, index: int) -> tuple[IndexedSource, int]:
        """Return the source that an image is taken from, and its index there."""
        return self._source, self._there(index)

    def _there(self, index: int) -> int:
        """Return the index in the source of an image of this subset."""
        return range(len(self))[index] if self._indices is None else int(self._indices[index])


class Unlabelled(Subset):
    """A source whose labels are all UNKNOWN, for use with splits whose classes are `class_names`."""

    def __init__(self, source: IndexedSource, class_names: Sequence[str]) -> None:
        super().__init__(source)
        self.class_names = list(class_names)
        self.labels = np.full(len(source), UNKNOWN, dtype=np.int64)


class Relabelled(Subset):
    """The images of a source whose classes are among others, under their names there; an `IndexedSource` itself.

    places: For each class of the source, which has one label for each image, its place among `class_names`; UNKNOWN
    leaves out its images.
    """

    def __init__(self, source: IndexedSource, class_names: Sequence[str], places: np.ndarray) -> None:
        theirs = one_label(source.labels, "a list of classes that are known by name")
        labels = np.where(theirs == UNKNOWN, UNKNOWN, places[theirs])
        kept = (labels != UNKNOWN) | (theirs == UNKNOWN)
        super().__init__(source, np.flatnonzero(kept))
        self.class_names, self.labels = list(class_names), labels[kept]


class Concatenated:
    """Several splits in sequence, their classes matched by name; an `IndexedSource` itself.

    The id of an image is "<split>/<id in the split>", so that it stays unique.
    """

    def __init__(self, splits: Mapping[str, IndexedSource]) -> None:
        lists = [list(source.class_names) for source in splits.values()]
        same = all(names == lists[0] for names in lists)
        self.class_names = lists[0] if same else order_classes({name for names in lists for name in names})
        self._names = list(splits)
        self._parts = [Subset(source, class_names=self.class_names) for source in splits.values()]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self.labels = concatenated([part.labels for part in self._parts])
        self.sizes = np.concatenate([part.sizes for part in self._parts])
        self.remote = all(part.remote for part in self._parts)  # one place has one kind of file system

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Item:
        part, place = self._place(index)
        item = self._parts[part][place]
        return Item(item.image, item.label, self.id(index))

    def id(self, index: int) -> str:
        """See `IndexedSource.id`."""
        part, place = self._place(index)
        return f"{self._names[part]}/{self._parts[part].id(place)}"

    def within(self, index: int) -> tuple[IndexedSource, int]:
        """Return the split that an image is taken from, and its index there."""
        part, place = self._place(index)
        return self._parts[part], place

    def ids(self, indices: np.ndarray) -> list[str]:
        """Return the ids of several images."""
        return self._of_parts(indices, lambda name, part, places: [f"{name}/{id}" for id in part.ids(places)])

    def fetch(self, indices: np.ndarray) -> list[bytes | np.ndarray | DecodeError]:
        """See `RemoteSource.fetch`."""
        return self._of_parts(indices, lambda name, part, places: part.fetch(places))

    def _of_parts(self, indices: np.ndarray, ask: Callable[[str, Subset, np.ndarray], list[T]]) -> list[T]:
        """Ask each split for its images among `indices`, and return the answers in the order of `indices`."""
        answers: list[Any] = [None] * len(indices)
        parts = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(parts).tolist():
            part = self._parts[number]
            mine = np.flatnonzero(parts == number)
            places = indices[mine] - int(self._ends[number]) + len(part)
            for place, answer in zip(mine.tolist(), ask(self._names[number], part, places), strict=True):
                answers[place] = answer
        return answers

    def _place(self, index: int) -> tuple[int, int]:
        """Return the number of the split that holds an image, and the index of the image in that split."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, index - int(self._ends[part]) + len(self._parts[part])


def origin(source: IndexedSource, index: int) -> tuple[IndexedSource, int]:
    """Return the source that a reader opened for an image of `source`, and the image's index there."""
    while isinstance(source, Subset | Concatenated):
        source, index = source.within(index)
    return source, index


def _translate(labels: Labels, own: list[str], class_names: list[str]) -> Labels:
    """Return labels of classes with their `own` names as indices into `class_names`.

    Raises DataError for an unknown class.
    """
    if own == class_names:
        return labels
    if isinstance(labels, Answers):
        wanted = classes_of_answers(class_names)
        if lacking := [name for name in wanted if name not in labels.parts]:
            raise DataError(
                f"the answers of these images are {listing(list(labels.parts))}, and {listing(lacking)} is needed, "
                "too. Name its column in data.answers"
            )
        return Answers({name: Named(_translate(*labels.parts[name], names), names) for name, names in wanted.items()})
    if isinstance(labels, Numbers):
        if len(own) == len(class_names) == 1:  # the column of the only target may have another name
            return labels
        if sorted(own) != sorted(class_names):
            raise DataError(
                f"the targets of these images are {listing(own)}, and those needed are "
                f"{listing(class_names)}. Name their columns in data.label_columns"
            )
    position = {name: index for index, name in enumerate(class_names)}
    counts = class_counts(labels, len(own))
    extra = [name for name, count in zip(own, counts, strict=True) if count and name not in position]
    if extra:
        masks = isinstance(labels, LabelSets) and labels.what == "masks"
        advice = "Rename the class folders or labels, or leave these images out"
        raise DataError(
            f"classes that are not among the {len(class_names)} known ones: {listing(extra)}; "
            f"known are {listing(class_names)}. {'Name their values in data.ignore' if masks else advice}"
        )
    table = np.array([position.get(name, UNKNOWN) for name in own], dtype=np.int64)
    return translated(labels, table, len(class_names))


def split_word(name: str) -> str:
    """Return the usual name of a split that a name contains as a word: "training_set" -> "training"; "" if none."""
    usual = {one for names in ROLES.values() for one in names}
    return next((word for word in re.split(r"[-_. ]+", name.lower()) if word in usual), "")


def is_usual(name: str) -> bool:
    """Return whether a name is a usual name of a split and nothing more: "Train", not "train_2"."""
    return bool(name) and split_word(name) == name.lower()


def role_of(name: str) -> str | None:
    """Return "train", "validation" or "test" for a name that contains a usual name of such a split, else None."""
    word = split_word(name)
    return next((role for role, names in ROLES.items() if word in names), None)


def split_title(name: str) -> str:
    """Return how a message names a split: "split 'train'", or "the data" if they are not split."""
    return f"split {name!r}" if name else "the data"


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the indices 0 to `count` - 1, spread evenly, the first one always; none for count 0."""
    chosen = min(most, count)
    return np.arange(chosen, dtype=np.int64) * count // max(chosen, 1)
