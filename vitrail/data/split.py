"""Splits that are stratified, seeded and stable: the id of an image decides whether it is held out, not its position.

Every image has a pseudo-random rank, a hash of (seed, purpose, id). Adding images therefore moves few others to
another split, and a smaller share or subset is part of every larger one.

Of images with several labels each label has its share in a split, by iterative stratification: Sechidis, Tsoumakas and
Vlahavas, "On the Stratification of Multi-Label Data" (ECML PKDD 2011), algorithm 1: the label with the fewest images
left is dealt with first, because later nothing could balance it. Each of its images goes to the part that lacks this
label most, then to the part that lacks images most. Images without a label come last.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator

import numpy as np

from vitrail.data.groups import grouped_folds, hold_out_groups
from vitrail.data.item import IndexedSource, ids
from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Answers, LabelSets, class_counts, stored_texts
from vitrail.errors import UsageError

_LEAF = 16
"""Number of images that are not divided further in a stratified order."""


def stratified(labels: LabelSets, ranks: np.ndarray, share: float) -> np.ndarray:
    """Return which images belong to the smaller part, bool [N].

    share: The part's share of the images, and of the images of each label; of a label with two images or more, the aim
    is at least one image in each part. ranks: One number per image; images are dealt with in this order, and the
    result does not depend on their places.
    """
    present, classes = np.unique(labels.classes, return_inverse=True)
    labels = LabelSets(labels.ends, classes, len(present), labels.known)  # without classes that no image has
    counts = class_counts(labels, labels.width)
    # a label with one image is not rounded: halves of images with such labels only would be all and nothing
    part = np.where(counts > 1, np.clip(np.rint(share * counts), 1, np.maximum(counts - 1, 1)), share * counts)
    lacking = np.stack([counts - part, part])  # [2, classes]: images of each label that the rest and the part lack
    size = round(share * len(labels))
    room = [len(labels) - size, size]
    order, ends = np.lexsort((ranks[labels.rows], labels.classes)), np.cumsum(counts)
    members = [images.tolist() for images in np.split(labels.rows[order], ends[:-1])]  # of each label, by their ranks
    left = counts.copy()
    taken = np.full(len(labels), -1, dtype=np.int8)
    queue = [(int(count), label) for label, count in enumerate(counts.tolist()) if count]
    heapq.heapify(queue)
    while queue:
        count, label = heapq.heappop(queue)
        if count != left[label]:  # images of this label went away with a rarer label
            if left[label]:
                heapq.heappush(queue, (int(left[label]), label))
            continue
        for image in members[label]:
            if taken[image] >= 0:
                continue
            rest, wanted = lacking[:, label]
            side = int(wanted > rest or (wanted == rest and room[1] > room[0]))
            taken[image] = side
            room[side] -= 1
            its = labels.at(image)
            lacking[side, its] -= 1
            left[its] -= 1
    free = np.flatnonzero(taken < 0)
    free = free[np.argsort(ranks[free], kind="stable")]
    taken[free] = 0
    taken[free[: max(0, room[1])]] = 1
    return taken == 1


def stratified_order(labels: LabelSets, ranks: np.ndarray) -> np.ndarray:
    """Return an order of the images in which the first k have about the share of each label, for any k; int64 [N].

    The images are halved by `stratified` again and again. The first k images are whole halves, quarters, eighths and
    so on, and part of the smallest one.
    """
    done: list[np.ndarray] = []
    pending = [np.argsort(ranks, kind="stable")]
    while pending:
        images = pending.pop()
        if len(images) <= _LEAF:
            done.append(images)
            continue
        first = stratified(labels[images], ranks[images], 0.5)
        pending += [images[~first], images[first]]
    return np.concatenate(done) if done else np.empty(0, dtype=np.int64)


_BLOCK = 1 << 16


def hold_out(
    source: IndexedSource, share: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices for training, indices held out), int64, each ascending; with `groups` by `hold_out_groups`.

    Of every class with two images or more, round(share * n) but at least one is held out, and at least one
    remains. Images with several labels are split by iterative stratification (`vitrail.data.split`), which
    aims at the same; a smaller share is then not part of a larger one. Raises UsageError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise UsageError(f"the share to hold out must lie between 0 and 1, not {share}. Write 0.1 for a tenth")
    if groups is not None:
        return hold_out_groups(source, groups, share, seed)
    if isinstance(labels := _strata(source), LabelSets):
        out = stratified(labels, _ranks(source, seed, "hold-out"), share)
    else:
        position, count = _within_class(source, labels, seed, "hold-out")
        out = position < np.clip(np.rint(share * count), 1, count - 1)
    return np.flatnonzero(~out), np.flatnonzero(out)


def folds(source: IndexedSource, count: int, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the fold of each image, int64 [N] from 0 to count - 1, for cross-validation.

    Folds differ by at most one image, and so do the images of a class in them. Images with several labels are divided
    by iterative stratification, one fold after the other, which aims at the same. With `groups`, see `grouped_folds`.
    Raises UsageError for more folds than images.
    """
    if not 2 <= count <= len(source):
        raise UsageError(f"data.fold divides {len(source):,} training images into {count:,} folds; valid are 2 to that")
    if groups is not None:
        return grouped_folds(source, groups, count, seed)
    ranks, labels = _ranks(source, seed, "fold"), _strata(source)
    found = np.empty(len(source), dtype=np.int64)
    if not isinstance(labels, LabelSets):
        found[np.lexsort((ranks, labels))] = np.arange(len(source)) % count
        return found
    left = np.arange(len(source))
    for fold in range(count - 1):
        chosen = stratified(labels[left], ranks[left], 1 / (count - fold))
        found[left[chosen]] = fold
        left = left[~chosen]
    found[left] = count - 1
    return found


def subset(source: IndexedSource, size: int | float, seed: int) -> np.ndarray:
    """Return the ascending indices of `size` images, or of that share of them if it is not a whole number.

    Classes are in proportion (stratified), and a smaller subset lies in every larger one of the same seed. Raises
    UsageError unless 1 <= size <= len(source), or 0 < size <= 1 for a share.
    """
    share = isinstance(size, float)
    if not (0 < size <= 1 if share else 1 <= size <= len(source)):
        raise UsageError(f"a subset of {size} images: valid are 1..{len(source)}, or a share above 0.0 and up to 1.0")
    count = max(1, round(size * len(source))) if share else int(size)
    if isinstance(labels := _strata(source), LabelSets):
        return np.sort(stratified_order(labels, _ranks(source, seed, "subset"))[:count])
    position, members = _within_class(source, labels, seed, "subset")
    # the k-th of the n images of a class has position (k + 1/2) / n, so any prefix has all classes in proportion
    order = np.lexsort((_ranks(source, seed, "tie"), (position + 0.5) / members))
    return np.sort(order[:count])


def _strata(source: IndexedSource) -> np.ndarray | LabelSets:
    """Return the classes in which splits are stratified: one for all images whose labels are numbers."""
    labels = source.labels
    if isinstance(labels, Answers):
        return labels.strata()
    return np.zeros(len(source), dtype=np.int64) if isinstance(labels, Numbers) else labels


def _within_class(source: IndexedSource, labels: np.ndarray, seed: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (place of each image in its class by rank, number of images of its class)."""
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((_ranks(source, seed, purpose), inverse))
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order)) - starts
    return position, counts[inverse]


def _ranks(source: IndexedSource, seed: int, purpose: str) -> np.ndarray:
    """Return one pseudo-random uint64 per image, a function of (seed, purpose, id)."""
    prefix = f"{seed}/{purpose}/".encode()
    ranks = np.empty(len(source), dtype=np.uint64)
    for block in _blocks(len(source)):
        hashes = [
            hashlib.blake2b(prefix + id.encode("utf-8", "surrogateescape"), digest_size=8).digest()
            for id in ids(source, block)
        ]
        ranks[block] = np.frombuffer(b"".join(hashes), dtype="<u8")
    return ranks


def _blocks(count: int) -> Iterator[np.ndarray]:
    """Yield 0..count-1 in blocks, so that the ids of a block fit in memory for any `count`."""
    for begin in range(0, count, _BLOCK):
        yield np.arange(begin, min(begin + _BLOCK, count))


def row_digest(id: str, size: int, name: str) -> bytes:
    """Return a hash of one image's id, stored bytes and class as text (`stored_texts`); 8 bytes."""
    return hashlib.blake2b(f"{id}\0{size}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()


def fingerprint(splits: dict[str, IndexedSource]) -> str:
    """Return a hash of names, sizes and classes of all images, whatever their order; 16 hex digits.

    Dates and the location of the data do not matter. Contents matter only if they change the length of a file.
    """
    total = hashlib.blake2b(digest_size=8)
    for name in sorted(splits):
        rows = np.sort(_digests(splits[name])).astype(">u8")
        total.update(f"{name}\0{len(rows)}\0".encode())
        total.update(rows.data)
    return total.hexdigest()


def _digests(source: IndexedSource) -> np.ndarray:
    """Return `row_digest` of every image as a number, uint64 [N]; an index may already contain them."""
    indexed = getattr(source, "digests", None)
    if indexed is not None and (digests := indexed()) is not None:
        return np.asarray(digests)
    labels = source.labels
    digests = np.empty(len(source), dtype=np.uint64)
    for block in _blocks(len(source)):
        rows = zip(
            ids(source, block),
            source.sizes[block].tolist(),
            stored_texts(labels[block], source.class_names),
            strict=True,
        )
        joined = b"".join(row_digest(id, size, name) for id, size, name in rows)
        digests[block] = np.frombuffer(joined, dtype=">u8")
    return digests
