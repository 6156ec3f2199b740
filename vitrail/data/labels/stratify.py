"""Iterative stratification: splits of images with several labels in which each label has its share.

Sechidis, Tsoumakas and Vlahavas, "On the Stratification of Multi-Label Data" (ECML PKDD 2011), algorithm 1: the label
with the fewest images left is dealt with first, because later nothing could balance it. Each of its images goes to the
part that lacks this label most, then to the part that lacks images most. Images without a label come last.
"""

from __future__ import annotations

import heapq

import numpy as np

from vitrail.data.labels.sets import LabelSets, class_counts

_LEAF = 16
"""Number of images that are not divided further in a stratified order."""


def stratified(labels: LabelSets, ranks: np.ndarray, share: float) -> np.ndarray:
    """Return which images belong to the smaller part, bool [N].

    share: The part's share of the images, and of the images of each label; of a label with two images or more, the aim
    is at least one image in each part. ranks: One number per image; images are dealt with in this order, and the
    result does not depend on their places.
    """
    labels = _of_these_images(labels)
    counts = class_counts(labels, labels.width)
    # a label with one image is not rounded: halves of images with such labels only would be all and nothing
    part = np.where(counts > 1, np.clip(np.rint(share * counts), 1, np.maximum(counts - 1, 1)), share * counts)
    lacking = np.stack([counts - part, part])  # [2, classes]: images of each label that the rest and the part lack
    size = round(share * len(labels))
    room = [len(labels) - size, size]
    members = _members(labels, ranks)
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


def _of_these_images(labels: LabelSets) -> LabelSets:
    """Return the same sets of labels, without the classes that no image has."""
    present, classes = np.unique(labels.classes, return_inverse=True)
    return LabelSets(labels.ends, classes, len(present), labels.known)


def _members(labels: LabelSets, ranks: np.ndarray) -> list[list[int]]:
    """Return the images of each label in the order of their ranks."""
    rows = labels.rows
    order = np.lexsort((ranks[rows], labels.classes))
    ends = np.cumsum(class_counts(labels, labels.width))
    return [part.tolist() for part in np.split(rows[order], ends[:-1])]


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
