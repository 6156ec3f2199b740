"""Images that are in two sets at once, or twice in one: exact copies, and near ones by their perceptual hashes.

Pre-training sets are de-duplicated against the test sets of all downstream tasks (paper, section 4.1, after
Kolesnikov et al. 2020), since a network that has seen a test image is measured too well. What is found is listed,
and so are the training images that remain; nothing is changed or copied.

The cost is one read of every image (`hashes_of`) and a search (`near_pairs`) that at the default
distance compares a few hundredths of all pairs: 50 bytes an image, and 20 bytes a pair that is found.

Measured on 960 flowers and 72 ImageNet photographs: at distance 6 every JPEG of quality 20 and more, every size from
32 pixels to twice the original, blur and gray are found again, 99.7 % of central crops of 98 %, 79 % of those of 95 %
and 13 % of those of 90 %; at 10 it is 99 % and 54 %, to be confirmed by a network. Of 531,996 pairs of these
photographs 60 were found at distance 6: photographs that the set has twice, and none that are different.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.check import Bad, Progress, equal_groups
from vitrail.data.copies.hashes import Hashes, hashes_of, joined, near_pairs
from vitrail.data.item import DataSet, Listed, View, role_of
from vitrail.errors import DataError, UsageError

HELD_OUT = ("test", "validation")
"""Roles of splits from which nothing may be taken away."""


class Name(NamedTuple):
    """Which image it is."""

    data: str
    split: str
    id: str


@dataclass(frozen=True)
class HashedSplit:
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
    data: str, found: DataSet, splits: Iterable[str], *, workers: int = 0, progress: Progress | None = None
) -> list[HashedSplit]:
    """Hash some splits of what `find(data)` returned, held-out ones first. Raises as `hashes_of` does."""
    parts = [
        HashedSplit(data, name, found.splits[name], hashes_of(found.splits[name], workers=workers, progress=progress))
        for name in splits
    ]
    return sorted(parts, key=lambda part: not part.held_out)


def training_splits(found: DataSet) -> list[str]:
    """Return the splits that are trained on: all but those called test or validation; all if there are no others."""
    return [name for name in found.splits if role_of(name) not in HELD_OUT] or list(found.splits)


def split_apart(found: DataSet) -> str:
    """Return the split that training must not see: test if there is one, else validation, else the first."""
    roles = {name: role_of(name) for name in found.splits}
    return min(roles, key=lambda name: (*HELD_OUT, roles[name]).index(roles[name]))


class HashedImages:
    """Images of several parts under one numbering."""

    def __init__(self, parts: Sequence[HashedSplit]) -> None:
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


DISTANCE = 6
"""Bits of 64 in which the frequencies of two copies may differ."""
WIDE = 10
"""The same where a network decides among what is found."""
GRADIENT_SLACK = 10
"""So many bits more may differ in the gradients, which are noisier."""
FARTHEST = 31
"""At 32 half of all pairs are copies."""
MOST = 20_000_000
"""Pairs found, above which the distance was too large for these images."""
COLUMNS = (*Name._fields, *(f"other_{name}" for name in Name._fields), "distance", "exact", "mirrored", "cosine")
"""Of the table of pairs."""


@dataclass(frozen=True)
class Pairs:
    """Images that are copies of each other, by their numbers; sorted by the right one, then by the left."""

    left: np.ndarray
    """int64 [P]."""
    right: np.ndarray
    """int64 [P]."""
    distance: np.ndarray
    """uint8 [P]: bits in which the frequencies differ."""
    exact: np.ndarray
    """bool [P]: are the stored bytes the same?"""
    mirrored: np.ndarray
    """bool [P]: is one the mirror image of the other?"""
    cosine: np.ndarray
    """float32 [P]: of the angle between their features; NaN where no network was asked."""

    def __len__(self) -> int:
        return len(self.left)

    def chosen(self, which: np.ndarray | slice) -> Pairs:
        """Return some of the pairs, by a mask or by their places."""
        return Pairs(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    def confirmed(self, cosine: np.ndarray, least: float) -> Pairs:
        """Return the exact pairs and those whose features are as near as `least`; `cosine` is float32 [P]."""
        return replace(self, cosine=cosine).chosen(self.exact | (cosine >= least))


def find_copies(
    left: HashedImages, right: HashedImages | None, *, distance: int = DISTANCE, mirrored: bool = False
) -> Pairs:
    """Return the copies that images of `left` have in `right`; None: in `left` itself, the left one coming first.

    Copies have the same stored bytes; or at most `distance` bits of their frequencies differ and at most
    `GRADIENT_SLACK` more of their gradients; `mirrored`: or so with the mirror image of the right one. Of images
    with the same bytes each is paired with the first, and what is near to them with the first of them and it with
    all: no image is left out, and the number of pairs stays small. Raises UsageError for an impossible distance and
    DataError for more than `MOST` pairs.
    """
    if not 0 <= distance <= FARTHEST:
        raise UsageError(f"distance is {distance}: valid are 0 (equal hashes) to {FARTHEST}")
    found = [_exact(left, right), *_near(left, right, distance, mirrored=False)]
    if mirrored:
        found += _near(left, right, distance, mirrored=True)
    pairs = Pairs(*(np.concatenate(column) for column in zip(*found, strict=True)))
    # of several ways in which a pair was found the plainest is kept: exact, not mirrored, nearest
    pairs = pairs.chosen(np.lexsort((pairs.distance, pairs.mirrored, ~pairs.exact, pairs.left, pairs.right)))
    again = (pairs.left[1:] == pairs.left[:-1]) & (pairs.right[1:] == pairs.right[:-1])
    return pairs.chosen(np.append(True, ~again)[: len(pairs)])


_Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""The fields of `Pairs`."""


def _columns(left: np.ndarray, right: np.ndarray, distance: np.ndarray, exact: bool, mirrored: bool) -> _Columns:
    flags = np.full((2, len(left)), [[exact], [mirrored]])
    return left, right, distance.astype(np.uint8), *flags, np.full(len(left), np.nan, np.float32)


def _exact(left: HashedImages, right: HashedImages | None) -> _Columns:
    """Images with the same bytes."""
    if right is None:
        place, second = left.copies.spread(left.copies.firsts)
        first = left.copies.firsts[place]
        first, second = first[first != second], second[first != second]
    else:
        mine, theirs = left.copies.firsts, right.copies.firsts
        digests = np.concatenate([left.hashes.digest[mine], right.hashes.digest[theirs]])
        both = np.array(equal_groups(digests), dtype=np.int64).reshape(-1, 2)  # one of each side
        first, second, _ = _all_members(left, right, mine[both[:, 0]], theirs[both[:, 1] - len(mine)])
    return _columns(first, second, np.zeros(len(first)), True, False)


def _near(left: HashedImages, right: HashedImages | None, distance: int, *, mirrored: bool) -> Iterator[_Columns]:
    """Images with similar hashes that have not the same bytes."""
    other, way = left if right is None else right, int(mirrored)
    mine, theirs = (side.copies.firsts[side.hashes.hashed[side.copies.firsts]] for side in (left, other))
    ours, others = left.hashes.frequencies[mine, 0], other.hashes.frequencies[theirs, way]
    count = 0
    for i, j, bits in near_pairs(ours, others, distance):
        a, b = mine[i], theirs[j]
        gradients = left.hashes.gradients[a, 0] ^ other.hashes.gradients[b, way]
        good = np.bitwise_count(gradients) <= distance + GRADIENT_SLACK
        good &= (a < b) if right is None else (left.hashes.digest[a] != other.hashes.digest[b]).any(axis=1)
        first, second, place = _all_members(left, other, a[good], b[good])
        if right is None:
            first, second = np.minimum(first, second), np.maximum(first, second)
        count += len(first)
        if count > MOST:
            raise DataError(
                f"more than {MOST:,} pairs of these images differ in at most {distance} bits: they are too much alike "
                "for this distance; choose a smaller one"
            )
        yield _columns(first, second, bits[good][place], False, mirrored)


def _all_members(
    left: HashedImages, right: HashedImages, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of groups as (left, right, place in `a`) of images: all of one with the first of the other, and back."""
    place, member = left.copies.spread(a)
    place_2, member_2 = right.copies.spread(b)
    return np.append(member, a[place_2]), np.append(b[place], member_2), np.append(place, place_2)


def staying(left: HashedImages, right: HashedImages | None, pairs: Pairs) -> np.ndarray:
    """Return bool [N]: which images of `left` remain when copies are taken away.

    Those without a copy in `right`. Where it is None: all of the held-out splits, which come first in `left`, and of
    the others each that has no copy before it that stays.
    """
    stays = np.ones(len(left), dtype=bool)
    if right is not None:
        stays[pairs.left] = False
        return stays
    fixed = sum(len(part.source) for part in left.parts if part.held_out)
    for first, second in zip(pairs.left.tolist(), pairs.right.tolist(), strict=True):  # sorted by the second
        if second >= fixed and stays[first]:
            stays[second] = False
    return stays


def remaining(found: DataSet, left: HashedImages, stays: np.ndarray) -> dict[str, Listed]:
    """Return every split of `found`, without the images of `left` that do not stay."""
    splits = dict(found.splits)
    for place, part in enumerate(left.parts):
        numbers = left.numbers(place)
        splits[part.split] = View(part.source, np.flatnonzero(stays[numbers.start : numbers.stop]))
    return {name: source for name, source in splits.items() if len(source)}


@dataclass(frozen=True)
class Shared:
    """How many images of one split have a copy in another; within one split: an earlier copy."""

    data: str
    split: str
    other_data: str
    other_split: str
    exact: int
    """Images of the split with the same bytes as one of the other split."""
    near: int
    """Further images of the split that look like one of the other."""
    others: int
    """Images of the other split that have such a copy."""


def shared(left: HashedImages, right: HashedImages | None, pairs: Pairs) -> list[Shared]:
    """Count the pairs by their splits; among one set's own splits, those that have any."""
    ours, theirs = (pairs.left, pairs.right) if right is not None else (pairs.right, pairs.left)
    other = left if right is None else right
    places = left.part_of(ours) * len(other.parts) + other.part_of(theirs)
    counts = []
    for place in range(len(left.parts) * len(other.parts)):
        here = places == place
        if right is None and not here.any():
            continue
        one, two = left.parts[place // len(other.parts)], other.parts[place % len(other.parts)]
        exact, every = np.unique(ours[here & pairs.exact]), np.unique(ours[here])
        names = one.data, one.split, two.data, two.split
        counts.append(Shared(*names, len(exact), len(every) - len(exact), len(np.unique(theirs[here]))))
    return counts


def rows(left: HashedImages, right: HashedImages, pairs: Pairs) -> Iterator[tuple[object, ...]]:
    """Yield the values of `COLUMNS` of each pair."""
    for place in range(len(pairs)):
        cosine = float(pairs.cosine[place])
        yield (
            *left.name(int(pairs.left[place])),
            *right.name(int(pairs.right[place])),
            int(pairs.distance[place]),
            int(pairs.exact[place]),
            int(pairs.mirrored[place]),
            "" if np.isnan(cosine) else f"{cosine:.4f}",
        )


def write_pairs(file: Path, left: HashedImages, right: HashedImages, pairs: Pairs) -> None:
    """Write the pairs to a CSV: which images, bits that differ, exact, mirrored, cosine ("" where none was asked).

    Raises UsageError where the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", newline="", encoding="utf-8", errors="surrogateescape") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows(left, right, pairs))
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error
