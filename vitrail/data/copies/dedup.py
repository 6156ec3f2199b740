"""Images that are in two sets, or twice in one set: exact copies, and candidates for near copies by perceptual hashes.

Pre-training sets are de-duplicated against the test sets of all downstream tasks (paper, section 4.1, after
Kolesnikov et al. 2020), because the accuracy on a test image seen in training is too high. The copies and the remaining
training images are written as lists; no image is changed or copied.

The cost is one read of every image (`hashes_of`) and a search (`near_pairs`), which compares a few hundredths of all
pairs at the default distance. The memory is 50 bytes per image and 20 bytes per pair that is found.

Measured on 960 flowers and 72 ImageNet photographs. Distance 6 finds every JPEG of quality 20 and more, every size from
32 pixels to twice the original, blurred and gray copies, and central crops: 99.7 % of those of 98 %, 79 % of those of
95 % and 13 % of those of 90 %. Distance 10 finds 99 % and 54 % of the latter two, but a network must confirm its pairs.
Among 531,996 pairs of these photographs, distance 6 found 60. All of them are photographs that the set contains twice.
Images of one kind have many candidates that are no copies, so `confirm` compares their pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.check import BadImage, OnProgress, equal_groups
from vitrail.data.copies.hashes import ArrayTable, HashBlock, Hashes, hashes_of, near_pairs, near_windows, windows_of
from vitrail.data.item import DataSet, IndexedSource, Subset, role_of
from vitrail.data.labels.sets import label_text
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import DataError, UsageError
from vitrail.files import replacing_text

HELD_OUT = ("test", "validation")
"""Roles of splits whose images are never removed."""


class Name(NamedTuple):
    """Identity of an image."""

    data: str
    split: str
    id: str


@dataclass(frozen=True)
class HashedSplit:
    """One split of a data set, and its hashes."""

    data: str
    split: str
    source: IndexedSource
    hashes: Hashes

    @property
    def held_out(self) -> bool:
        """Whether it is a test or validation split."""
        return role_of(self.split) in HELD_OUT


def hashed(
    data: str, found: DataSet, splits: Iterable[str], *, workers: int = 0, progress: OnProgress | None = None
) -> list[HashedSplit]:
    """Hash some splits of `found`, the data set at `data`; held-out splits come first. Raises as `hashes_of` does."""
    parts = [
        HashedSplit(data, name, found.splits[name], hashes_of(found.splits[name], workers=workers, progress=progress))
        for name in splits
    ]
    return sorted(parts, key=lambda part: not part.held_out)


def splits_to_clean(found: DataSet) -> list[str]:
    """Return the training splits: all except test and validation, or all if there are no others."""
    return [name for name in found.splits if role_of(name) not in HELD_OUT] or list(found.splits)


def split_apart(found: DataSet) -> str:
    """Return the split whose images must not be in the training set: test, else validation, else the first."""
    roles = {name: role_of(name) for name in found.splits}
    return min(roles, key=lambda name: (*HELD_OUT, roles[name]).index(roles[name]))


class HashedImages:
    """The images of several splits and their hashes, with one numbering for all of them."""

    def __init__(self, parts: Sequence[HashedSplit]) -> None:
        self.parts = list(parts)
        self.ends = np.cumsum([len(part.source) for part in parts])
        self.hashes = Hashes.concatenated([part.hashes for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def part_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index in `parts` of the split that holds each image."""
        return np.searchsorted(self.ends, numbers, side="right")

    def numbers(self, place: int) -> range:
        """Return the numbers of the images of a split."""
        end = int(self.ends[place])
        return range(end - len(self.parts[place].source), end)

    def by_part(self, numbers: np.ndarray) -> Iterator[tuple[IndexedSource, np.ndarray, np.ndarray]]:
        """Yield (source, places in `numbers`, indices in the source) for each split that holds some of the images."""
        parts = self.part_of(numbers)
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            yield self.parts[part].source, places, numbers[places] - self.numbers(part).start

    def name(self, number: int) -> Name:
        """Return the identity of an image by its number."""
        part = self.parts[int(self.part_of(np.array(number)))]
        source, index = self.place(number)
        return Name(part.data, part.split, source.id(index))

    def place(self, number: int) -> tuple[IndexedSource, int]:
        """Return the source that holds an image, and its index there."""
        part = int(self.part_of(np.array(number)))
        return self.parts[part].source, number - self.numbers(part).start

    def label(self, number: int) -> str:
        """Return the label of an image as text, "" if it has none."""
        source, index = self.place(number)
        return label_text(source.labels, index, source.class_names)

    @cached_property
    def copies(self) -> Copies:
        """Groups of images with the same bytes."""
        return Copies(self.hashes)

    @cached_property
    def comparable(self) -> np.ndarray:
        """The first image of every group whose hashes can be compared."""
        firsts = self.copies.firsts
        return firsts[self.hashes.hashed[firsts]]

    @property
    def bad(self) -> Iterator[BadImage]:
        """Yield the images that cannot be read and are therefore not compared."""
        for number in np.flatnonzero(self.hashes.reason != "").tolist():
            name, reason = self.name(number), str(self.hashes.reason[number])
            yield BadImage(name.split, name.id, reason, f"{reason}; not compared")


class Copies:
    """Groups of exact copies; a group is identified by the smallest number among its images."""

    def __init__(self, hashes: Hashes) -> None:
        first = np.arange(len(hashes))
        for group in equal_groups(hashes.digest):
            first[group] = group[0]
        self._members = np.argsort(first, kind="stable")
        self._sizes = np.bincount(first, minlength=len(hashes))
        self._begins = np.cumsum(self._sizes) - self._sizes
        self.firsts = np.flatnonzero((self._sizes > 0) & hashes.digest.any(axis=1))
        """The first image of every group, including groups of one image, without unreadable images."""

    def spread(self, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (place in `firsts`, image) for all images of these groups."""
        sizes = self._sizes[firsts]
        place = np.repeat(np.arange(len(firsts)), sizes)
        offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return place, self._members[np.repeat(self._begins[firsts], sizes) + offset]


DISTANCE = 6
"""Maximum number of differing bits, of 64, between the frequency hashes of two copies."""
WIDE = 10
"""Maximum number of differing bits if a network confirms the pairs."""
GRADIENT_SLACK = 10
"""Number of additional bits that may differ in the gradient hashes, which are noisier."""
FARTHEST = 31
"""Largest valid distance: at 32 half of all pairs would count as copies."""
MOST = 20_000_000
"""Maximum number of pairs; with more, the distance is too large for these images."""
COLUMNS = (
    *(*Name._fields, *(f"other_{name}" for name in Name._fields)),
    *("distance", "correlation", "exact", "mirrored", "cosine", "copy"),
)
"""Columns of the table of pairs."""


@dataclass(frozen=True)
class Pairs(ArrayTable):
    """Pairs of similar images, by their numbers, sorted by the right one, then by the left."""

    left: np.ndarray
    """int64 [P]."""
    right: np.ndarray
    """int64 [P]."""
    distance: np.ndarray
    """uint8 [P]: number of bits in which the frequency hashes differ."""
    correlation: np.ndarray
    """float32 [P]: correlation of the details of the aligned pixels; NaN for equal bytes, and before `confirm`."""
    exact: np.ndarray
    """bool [P]: whether the stored bytes are equal."""
    mirrored: np.ndarray
    """bool [P]: whether one is the mirror image of the other."""
    cosine: np.ndarray
    """float32 [P]: cosine similarity of the features; NaN without a network."""
    copy: np.ndarray
    """bool [P]: whether they are copies of one picture for certain. Others are look-alikes, which are not removed."""

    @classmethod
    def found(cls, left: np.ndarray, right: np.ndarray, distance: np.ndarray, *, exact: bool, mirrored: bool) -> Pairs:
        """Return pairs that were all found in the same way, and not yet compared by pixels or by a network."""
        count = len(left)
        unknown = np.full(count, np.nan, np.float32)
        flags = np.full(count, exact), np.full(count, mirrored)
        return cls(left, right, distance.astype(np.uint8), unknown, *flags, unknown, np.full(count, exact))

    def confirmed(self, cosine: np.ndarray, least: float) -> Pairs:
        """Return the exact pairs and those with a cosine similarity of at least `least`; `cosine` is float32 [P]."""
        return replace(self, cosine=cosine).rows_at(self.exact | (cosine >= least))

    def with_equal_labels(self, images: HashedImages) -> Pairs:
        """Return the pairs, of which those of images with different labels are look-alikes. Both are of `images`."""
        both = zip(self.left.tolist(), self.right.tolist(), strict=True)
        labels = ((images.label(one), images.label(two)) for one, two in both)
        differ = [bool(one and two) and one != two for one, two in labels]
        return replace(self, copy=self.copy & ~np.array(differ, bool))


def candidates(
    left: HashedImages,
    right: HashedImages | None,
    *,
    distance: int = DISTANCE,
    mirrored: bool = False,
    crops: bool = False,
    workers: int = 0,
    progress: OnProgress | None = None,
) -> Pairs:
    """Return similar pairs of an image of `left` and one of `right`, or (None) within `left`, the earlier one first.

    Two images are similar if their stored bytes are equal, or if at most `distance` bits of their frequency hashes and
    at most `GRADIENT_SLACK` more bits of their gradient hashes differ. With `mirrored` the mirror image of the right
    one counts, too. With `crops` also a window of one image counts (`vitrail.data.copies.hashes`), for which images are
    read with `workers` threads. Images with the same bytes form a group: each image of a group is paired with the first
    of its group. If two groups are near, each image of one is paired with the first of the other. No copy is left out
    like this, and there are few pairs. Raises UsageError for an impossible distance and DataError for more than `MOST`
    pairs.
    """
    if not 0 <= distance <= FARTHEST:
        raise UsageError(f"distance is {distance}: valid are 0 (equal hashes) to {FARTHEST}")
    found = [_exact(left, right)]
    other = left if right is None else right
    sides = [(left, other)] if right is None else [(left, other), (other, left)]
    windows = [  # uint64 [N, windows] of each side
        np.concatenate([windows_of(part.source, workers=workers, progress=progress) for part in side.parts])
        for side, _ in sides
        if crops
    ]
    for way in (False, True)[: 1 + mirrored]:
        found += _found(left, right, _near(left, other, distance, int(way)), distance, mirrored=way)
        for hashes, (one, whole) in zip(windows, sides, strict=False):
            near = _near_crops(one, hashes, whole, distance, int(way))
            turned = ((a, b, bits) if one is left else (b, a, bits) for a, b, bits in near)
            found += _found(left, right, turned, distance, mirrored=way)
    pairs = Pairs.concatenated(found)
    # a pair that was found in several ways counts once: exact before near, mirrored last, nearest first
    pairs = pairs.rows_at(np.lexsort((pairs.distance, pairs.mirrored, ~pairs.exact, pairs.left, pairs.right)))
    again = (pairs.left[1:] == pairs.left[:-1]) & (pairs.right[1:] == pairs.right[:-1])
    return pairs.rows_at(np.append(True, ~again)[: len(pairs)])


def _exact(left: HashedImages, right: HashedImages | None) -> Pairs:
    """Return pairs of images with the same bytes."""
    if right is None:
        place, second = left.copies.spread(left.copies.firsts)
        first = left.copies.firsts[place]
        first, second = first[first != second], second[first != second]
    else:
        mine, theirs = left.copies.firsts, right.copies.firsts
        digests = np.concatenate([left.hashes.digest[mine], right.hashes.digest[theirs]])
        both = np.array(equal_groups(digests), dtype=np.int64).reshape(-1, 2)  # one of each side
        first, second, _ = _all_members(left, right, mine[both[:, 0]], theirs[both[:, 1] - len(mine)])
    return Pairs.found(first, second, np.zeros(len(first)), exact=True, mirrored=False)


def _near(left: HashedImages, right: HashedImages, distance: int, way: int) -> Iterator[HashBlock]:
    """Yield (left, right, bits) of images with similar hashes; `way` 1 takes the mirror image of the right one."""
    mine, theirs = left.comparable, right.comparable
    for i, j, bits in near_pairs(left.hashes.frequencies[mine, 0], right.hashes.frequencies[theirs, way], distance):
        a, b = mine[i], theirs[j]
        gradients = left.hashes.gradients[a, 0] ^ right.hashes.gradients[b, way]
        good = np.bitwise_count(gradients) <= distance + GRADIENT_SLACK
        good &= (a < b) | (left is not right)  # within one set each pair is found in both directions
        yield a[good], b[good], bits[good]


def _near_crops(
    one: HashedImages, windows: np.ndarray, whole: HashedImages, distance: int, way: int
) -> Iterator[HashBlock]:
    """Yield (image of `one`, image of `whole`, bits) where a window of the first resembles the second."""
    mine, theirs = one.comparable, whole.comparable
    for i, j, bits in near_windows(windows[mine], whole.hashes.frequencies[theirs, way], distance):
        _, first = np.unique(np.stack([i, j]), axis=1, return_index=True)
        yield mine[i[first]], theirs[j[first]], bits[first]


def _found(
    left: HashedImages, right: HashedImages | None, blocks: Iterable[HashBlock], distance: int, *, mirrored: bool
) -> Iterator[Pairs]:
    """Yield the pairs of images with different bytes that follow from near groups (left, right, bits)."""
    other, count = left if right is None else right, 0
    for a, b, bits in blocks:
        good = a != b if right is None else (left.hashes.digest[a] != other.hashes.digest[b]).any(axis=1)
        first, second, place = _all_members(left, other, a[good], b[good])
        if right is None:
            first, second = np.minimum(first, second), np.maximum(first, second)
        count += len(first)
        if count > MOST:
            raise DataError(
                f"more than {MOST:,} pairs of these images differ in at most {distance} bits: the images are too "
                "similar for this distance. Choose a smaller distance"
            )
        yield Pairs.found(first, second, bits[good][place], exact=False, mirrored=mirrored)


def _all_members(
    left: HashedImages, right: HashedImages, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (left, right, place in `a`) of the pairs of images for pairs (a, b) of groups.

    Each image of group a is paired with the first of group b, and the first of group a with each image of group b.
    """
    left_place, left_member = left.copies.spread(a)
    right_place, right_member = right.copies.spread(b)
    first, second = np.append(left_member, a[right_place]), np.append(b[left_place], right_member)
    return first, second, np.append(left_place, right_place)


def staying(left: HashedImages, right: HashedImages | None, pairs: Pairs) -> np.ndarray:
    """Return bool [N]: which images of `left` remain without the copies; look-alikes remain.

    Images without a copy in `right` remain. If `right` is None, all images of held-out splits, which come first in
    `left`, remain, and each other image that has no earlier copy that remains.
    """
    pairs = pairs.rows_at(pairs.copy)
    stays = np.ones(len(left), dtype=bool)
    if right is not None:
        stays[pairs.left] = False
        return stays
    fixed = sum(len(part.source) for part in left.parts if part.held_out)
    for first, second in zip(pairs.left.tolist(), pairs.right.tolist(), strict=True):  # sorted by the second
        if second >= fixed and stays[first]:
            stays[second] = False
    return stays


def remaining(found: DataSet, left: HashedImages, stays: np.ndarray) -> dict[str, IndexedSource]:
    """Return every split of `found` without the images of `left` that are removed."""
    splits = dict(found.splits)
    for place, part in enumerate(left.parts):
        numbers = left.numbers(place)
        splits[part.split] = Subset(part.source, np.flatnonzero(stays[numbers.start : numbers.stop]))
    return {name: source for name, source in splits.items() if len(source)}


def pair_rows(left: HashedImages, right: HashedImages, pairs: Pairs) -> Iterator[tuple[object, ...]]:
    """Yield the values of `COLUMNS` of each pair; the correlation and the cosine are "" if they are not known."""
    for place in range(len(pairs)):
        correlation, cosine = float(pairs.correlation[place]), float(pairs.cosine[place])
        yield (
            *left.name(int(pairs.left[place])),
            *right.name(int(pairs.right[place])),
            int(pairs.distance[place]),
            "" if np.isnan(correlation) else f"{correlation:.3f}",
            int(pairs.exact[place]),
            int(pairs.mirrored[place]),
            "" if np.isnan(cosine) else f"{cosine:.4f}",
            int(pairs.copy[place]),
        )


def write_pairs(file: Path, left: HashedImages, right: HashedImages, pairs: Pairs, *, raw: bool = False) -> None:
    """Write the pairs to a CSV file with the columns `COLUMNS`; `raw` is SafeWriter's.

    Raises UsageError if it cannot be written.
    """
    with replacing_text(file, UsageError) as stream:
        writer = SafeWriter(stream, raw=raw)
        writer.writerow(COLUMNS)
        writer.writerows(pair_rows(left, right, pairs))


@dataclass(frozen=True)
class Shared:
    """Number of images of one split that have a copy in another split, or an earlier copy in the same split."""

    data: str
    split: str
    other_data: str
    other_split: str
    exact: int
    """Number of images of the split with the same bytes as one of the other split."""
    near: int
    """Number of other images of the split with a near copy in the other split."""
    others: int
    """Number of images of the other split that have such a copy."""
    alike: int
    """Number of images of the split that are no copies, but look like one of the other split."""


def shared(left: HashedImages, right: HashedImages | None, pairs: Pairs) -> list[Shared]:
    """Count the pairs for each pair of splits. Within one data set, pairs of splits without copies are left out."""
    ours, theirs = (pairs.left, pairs.right) if right is not None else (pairs.right, pairs.left)
    other = left if right is None else right
    places = left.part_of(ours) * len(other.parts) + other.part_of(theirs)
    counts = []
    for place in range(len(left.parts) * len(other.parts)):
        here = places == place
        if right is None and not here.any():
            continue
        one, two = left.parts[place // len(other.parts)], other.parts[place % len(other.parts)]
        exact, copied, every = (np.unique(ours[here & kind]) for kind in (pairs.copy & pairs.exact, pairs.copy, True))
        names = one.data, one.split, two.data, two.split
        others = len(np.unique(theirs[here & pairs.copy]))
        counts.append(Shared(*names, len(exact), len(copied) - len(exact), others, len(every) - len(copied)))
    return counts
