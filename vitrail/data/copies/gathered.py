"""The images of several splits and data sets, hashed and numbered through, to be compared with one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vitrail.data.check import Bad, Progress, equal_groups
from vitrail.data.copies.hashes import Hashes, hashes_of, joined
from vitrail.data.item import Found, Listed, role_of

HELD_OUT = ("test", "validation")
"""Roles of splits from which nothing may be taken away."""


class Name(NamedTuple):
    """Which image it is."""

    data: str
    split: str
    id: str


@dataclass(frozen=True)
class Part:
    """One split of a data set, and its hashes."""

    data: str
    split: str
    source: Listed
    hashes: Hashes

    @property
    def held_out(self) -> bool:
        """Is it a test or validation split?"""
        return role_of(self.split) in HELD_OUT


def hashed(
    data: str, found: Found, splits: Iterable[str], *, workers: int = 0, progress: Progress | None = None
) -> list[Part]:
    """Hash some splits of what `find(data)` returned, held-out ones first. Raises as `hashes_of` does."""
    parts = [
        Part(data, name, found.splits[name], hashes_of(found.splits[name], workers=workers, progress=progress))
        for name in splits
    ]
    return sorted(parts, key=lambda part: not part.held_out)


def training_splits(found: Found) -> list[str]:
    """Return the splits that are trained on: all but those called test or validation; all if there are no others."""
    return [name for name in found.splits if role_of(name) not in HELD_OUT] or list(found.splits)


def split_apart(found: Found) -> str:
    """Return the split that training must not see: test if there is one, else validation, else the first."""
    roles = {name: role_of(name) for name in found.splits}
    return min(roles, key=lambda name: (*HELD_OUT, roles[name]).index(roles[name]))


class Gathered:
    """Images of several parts under one numbering."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.ends = np.cumsum([len(part.source) for part in parts])
        self.hashes = joined([part.hashes for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def part_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the place in `parts` of the part that each image is in."""
        return np.searchsorted(self.ends, numbers, side="right")

    def numbers(self, place: int) -> range:
        """Return the numbers of a part's images."""
        end = int(self.ends[place])
        return range(end - len(self.parts[place].source), end)

    def name(self, number: int) -> Name:
        """Return which image a number is."""
        place = int(self.part_of(np.array(number)))
        part = self.parts[place]
        return Name(part.data, part.split, part.source.id(number - self.numbers(place).start))

    @cached_property
    def copies(self) -> Copies:
        """Which images have the same bytes."""
        return Copies(self.hashes)

    @property
    def bad(self) -> Iterator[Bad]:
        """The images that cannot be read, and are compared with nothing."""
        for number in np.flatnonzero(self.hashes.reason != "").tolist():
            name, reason = self.name(number), str(self.hashes.reason[number])
            yield Bad(name.split, name.id, reason, f"{reason}; compared with nothing")


class Copies:
    """Exact copies among many images: each group is known by the smallest of its numbers."""

    def __init__(self, hashes: Hashes) -> None:
        first = np.arange(len(hashes))
        for group in equal_groups(hashes.digest):
            first[group] = group[0]
        self._members = np.argsort(first, kind="stable")
        self._sizes = np.bincount(first, minlength=len(hashes))
        self._begins = np.cumsum(self._sizes) - self._sizes
        self.firsts = np.flatnonzero((self._sizes > 0) & hashes.digest.any(axis=1))
        """The first of every group, also of one alone; none that cannot be read."""

    def spread(self, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (place in `firsts`, member) of all members of these groups."""
        sizes = self._sizes[firsts]
        place = np.repeat(np.arange(len(firsts)), sizes)
        offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return place, self._members[np.repeat(self._begins[firsts], sizes) + offset]
