"""Pairs of 64-bit hashes that differ in few bits, without comparing all with all.

Of `distance` + 1 bands of bits, two hashes that differ in at most `distance` bits agree in one band at least. So for
each band only hashes with equal bits there are compared: exact, and at distance 6 a seventieth of the work where the
bits are evenly spread. From distance 12 on the bands are too short to save anything, and all are compared with all.

Measured on one busy core (AMD EPYC): 1.28 million hashes against 100,000, as unevenly spread as CIFAR-100's, take 12 s
at distance 6 and 2 minutes at 10, and 230 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

BITS = 64
TILE = 1 << 17
"""Hashes compared at a time: their differences, a MiB, stay in a core's cache."""
_SHORTEST = 5  # bits of a band below which bands cost more than they save

Block = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Numbers on the left, numbers on the right, bits in which they differ: int64 [K], int64 [K], uint8 [K]."""


def near_pairs(left: np.ndarray, right: np.ndarray, distance: int) -> Iterator[Block]:
    """Yield every pair of `left` uint64 [N] and `right` uint64 [M] that differs in at most `distance` bits, once.

    Memory is that of both sorted, and of a tile, whatever N x M is.
    """
    earlier: list[np.uint64] = []
    for band in bands(distance):
        for i, j, differing in _agreeing(left, right, band, distance):
            difference = left[i] ^ right[j]
            new = np.ones(len(i), dtype=bool)
            for other in earlier:  # where they agree there too, the pair has been found there
                new &= (difference & other) != 0
            if new.any():
                yield i[new], j[new], differing[new]
        earlier.append(band)


def bands(distance: int) -> list[np.uint64]:
    """Return the bands as masks: one of no bits at all, in which everything agrees, where bands save nothing."""
    count = distance + 1
    if BITS // count < _SHORTEST:
        return [np.uint64(0)]
    edges = [BITS * number // count for number in range(count + 1)]
    return [np.uint64((1 << end) - (1 << begin)) for begin, end in pairwise(edges)]


def _agreeing(left: np.ndarray, right: np.ndarray, band: np.uint64, distance: int) -> Iterator[Block]:
    """The pairs within `distance` among those that agree in a band."""
    places = [np.argsort(side & band, kind="stable") for side in (left, right)]
    hashes = [side[place] for side, place in zip((left, right), places, strict=True)]
    keys = [np.unique(side & band, return_index=True) for side in hashes]
    ends = [np.append(starts[1:], len(side)) for (_, starts), side in zip(keys, hashes, strict=True)]
    _, first, second = np.intersect1d(keys[0][0], keys[1][0], assume_unique=True, return_indices=True)
    for one, two in zip(first.tolist(), second.tolist(), strict=True):
        begin, other = int(keys[0][1][one]), int(keys[1][1][two])
        near = _compared(hashes[0][begin : ends[0][one]], hashes[1][other : ends[1][two]], distance)
        for i, j, differing in near:
            yield places[0][begin + i], places[1][other + j], differing


def _compared(left: np.ndarray, right: np.ndarray, distance: int) -> Iterator[Block]:
    """The pairs within `distance`, by comparing all, a tile at a time."""
    for column in range(0, len(right), TILE):
        part = right[column : column + TILE]
        rows = max(1, TILE // len(part))
        for row in range(0, len(left), rows):
            differing = np.bitwise_count(left[row : row + rows, None] ^ part)
            hits = np.flatnonzero(differing.ravel() <= distance)
            if len(hits):
                i, j = np.divmod(hits, len(part))
                yield row + i, column + j, differing.ravel()[hits]
