"""Perceptual hashes: 64 bits of an image that stay almost the same when it is compressed again or resized.

Two of them, from one grey thumbnail of 32 x 32 pixels:

- `frequencies` (pHash): the 8 x 8 lowest frequencies of its discrete cosine transform, each above their median or not;
- `gradients` (dHash): its means over a grid of 8 x 9 cells, each below its right neighbour or not.

Pictures that share one of them by chance seldom share the other. Each is also stored for the mirror image, with a
digest of the stored bytes, for exact copies. An image is read once: the hashes of every 32,768 images are a table in
the cache folder, so that an interrupted scan continues where it stopped, and a second one reads 50 bytes per image.
Measured on one core: 1.5 ms for an ImageNet file, nearly all of it decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from vitrail.data.cache import cached_file, stored_table
from vitrail.data.check import Progress
from vitrail.data.copies.leaks import digest
from vitrail.data.images.decode import decode
from vitrail.data.item import Listed
from vitrail.data.loading.prefetch import Pool, ordered, stuck, threads
from vitrail.data.sources.folder import file_of
from vitrail.errors import DecodeError

BITS = 64
TILE = 1 << 17
"""Number of hashes compared at a time. Their differences, 1 MiB, fit into a core's cache."""
_SHORTEST = 5  # bits of a band below which bands cost more than they save

Block = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Indices on the left, indices on the right, number of differing bits: int64 [K], int64 [K], uint8 [K]."""


def near_pairs(left: np.ndarray, right: np.ndarray, distance: int) -> Iterator[Block]:
    """Yield every pair of `left` uint64 [N] and `right` uint64 [M] that differs in at most `distance` bits once.

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
    """Return the bands as bit masks. If bands would save nothing, return one empty mask, in which all hashes agree."""
    count = distance + 1
    if BITS // count < _SHORTEST:
        return [np.uint64(0)]
    edges = [BITS * number // count for number in range(count + 1)]
    return [np.uint64((1 << end) - (1 << begin)) for begin, end in pairwise(edges)]


def _agreeing(left: np.ndarray, right: np.ndarray, band: np.uint64, distance: int) -> Iterator[Block]:
    """Yield the pairs within `distance` among the hashes that agree in a band."""
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
    """Yield the pairs within `distance` by comparing all pairs, one tile at a time."""
    for column in range(0, len(right), TILE):
        part = right[column : column + TILE]
        rows = max(1, TILE // len(part))
        for row in range(0, len(left), rows):
            differing = np.bitwise_count(left[row : row + rows, None] ^ part)
            hits = np.flatnonzero(differing.ravel() <= distance)
            if len(hits):
                i, j = np.divmod(hits, len(part))
                yield row + i, column + j, differing.ravel()[hits]


SIDE = 32
"""Side of the thumbnail in pixels."""
LOW = 8
"""Number of frequencies per direction, and of rows of cells."""
FLAT = 3.0
"""Standard deviation in grey levels below which a thumbnail counts as one colour, so that its hashes are noise."""
CHUNK = 1 << 15
"""Number of images in one cached table."""
_ROWS = 256  # thumbnails hashed together
_VERSION = 1  # increase it whenever the hash of an unchanged image changes


@dataclass(frozen=True)
class Hashes:
    """The hashes of N images, in the order of their source."""

    digest: np.ndarray
    """uint64 [N, 2]: equal for equal stored bytes; zeros for an image that cannot be read."""
    frequencies: np.ndarray
    """uint64 [N, 2]: hashes of the image and of its mirror image."""
    gradients: np.ndarray
    """uint64 [N, 2]: hashes of the image and of its mirror image."""
    flat: np.ndarray
    """bool [N]: whether the image has one colour, so that only its digest can be compared."""
    reason: np.ndarray
    """object [N]: why an image cannot be read (`DecodeError.reason`), "" if it can."""

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def hashed(self) -> np.ndarray:
        """bool [N]: whether the image can be read and does not have one colour, so that its hashes can be compared."""
        return ~self.flat & self.digest.any(axis=1)


def joined(parts: Sequence[Hashes]) -> Hashes:
    """Return the hashes of several sources, one after another."""
    names = Hashes.__dataclass_fields__
    return Hashes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def thumbnail(image: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3] -> grey uint8 [32, 32]: luma of ITU-R 601, antialiased, whatever the aspect ratio."""
    grey = Image.fromarray(image).convert("L")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def hash_thumbnails(thumbnails: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grey uint8 [N, 32, 32] -> `frequencies` and `gradients` uint64 [N, 2], `flat` bool [N]."""
    values = thumbnails.astype(np.float64)
    # rounded, so that noise of the sums does not change values that are 0 by symmetry
    low = (_COSINES @ values @ _COSINES.T).round(3)
    mirrored = low * np.where(
        np.arange(LOW) % 2, -1, 1
    )  # frequencies that are odd from left to right change their sign
    pair = np.stack([low, mirrored], axis=1).reshape(len(values), 2, -1)
    frequencies = _packed(pair > np.median(pair, axis=2, keepdims=True))
    cells = _ROW_CELLS @ values @ _COLUMN_CELLS.T  # sums of whole numbers: exact
    pair = np.stack([cells, cells[:, :, ::-1]], axis=1)
    gradients = _packed((pair[..., 1:] > pair[..., :-1]).reshape(len(values), 2, -1))
    return frequencies, gradients, values.std(axis=(1, 2)) < FLAT


def _packed(bits: np.ndarray) -> np.ndarray:
    """bool [N, 2, 64] -> uint64 [N, 2]."""
    return np.packbits(bits, axis=2).view(np.uint64)[..., 0]


def _cells(count: int) -> np.ndarray:
    """Weights [count, 32] of the pixels in `count` equal cells, in parts of a pixel that are whole numbers."""
    edges = np.arange(count + 1) * SIDE
    begin, end = edges[:-1, None], edges[1:, None]
    pixels = np.arange(SIDE) * count
    return (np.minimum(end, pixels + count) - np.maximum(begin, pixels)).clip(min=0).astype(np.float64)


_COSINES = np.cos(np.pi * np.outer(np.arange(LOW), 2 * np.arange(SIDE) + 1) / (2 * SIDE))
_ROW_CELLS, _COLUMN_CELLS = _cells(LOW), _cells(LOW + 1)

_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("digest", "digest_2", "frequencies", "frequencies_mirrored"), pa.uint64()),
        **dict.fromkeys(("gradients", "gradients_mirrored"), pa.uint64()),
        "flat": pa.bool_(),
        "reason": pa.string(),
    }
)


def hashes_of(source: Listed, *, workers: int = 0, progress: Progress | None = None) -> Hashes:
    """Return the hashes of all images of a source: read from the cache, else computed with `workers` threads.

    A table in the cache is of images of the same ids and lengths in the same order, and, where they are files, of
    the same dates. Raises DataError where the cache cannot be written.
    """
    parts = []
    with threads(workers) as pool:
        for begin in range(0, len(source), CHUNK):
            numbers = range(begin, min(begin + CHUNK, len(source)))
            target = cached_file("hashes", _key(source, numbers))
            report = None if progress is None else partial(_report, progress, numbers, len(source))
            compute = partial(_compute, source, numbers, pool, report)
            parts.append(_read(stored_table(target, _SCHEMA, compute, "the hashes of images")))
            if progress is not None:
                progress(numbers.stop, len(source))
    return joined(parts)


def _report(progress: Progress, numbers: range, total: int, done: int) -> None:
    if done < len(numbers):  # the last image is reported when its table is written
        progress(numbers.start + done, total)


def _key(source: Listed, numbers: range) -> str:
    """Return a key of the images in a table: their ids, sizes and dates, without reading them."""
    state = hashlib.blake2b(digest_size=16)
    for index in numbers:
        file = file_of(source, index)
        try:
            date = file.stat().st_mtime_ns if file is not None else 0
        except OSError:  # reading it says why
            date = -1
        state.update(f"{file or source.id(index)}\0{source.sizes[index]}\0{date}\0".encode("utf-8", "surrogateescape"))
    return json.dumps([_VERSION, len(numbers), state.hexdigest()])


def _compute(
    source: Listed,
    numbers: range,
    pool: Pool | None,
    report: Callable[[int], None] | None,
    writer: pa.RecordBatchWriter,
) -> None:
    """Hash some images and write their rows."""
    looks: list[tuple[bytes, np.ndarray | None, str]] = []
    ahead = 64 if pool is None else 8 * pool.size
    found = ordered(pool, partial(_look, source), numbers, ahead=ahead, hung=lambda number: stuck(source.id(number)))
    for done, look in enumerate(found, start=1):
        looks.append(look)
        if len(looks) == _ROWS or done == len(numbers):
            writer.write_batch(_rows(looks))
            looks = []
        if report is not None:
            report(done)


def _look(source: Listed, index: int) -> tuple[bytes, np.ndarray | None, str]:
    """Return (digest, thumbnail, "") of one image, or (zeros, None, reason) if it cannot be read."""
    try:
        stored = source[index].image
        # a JPEG is decoded at a fraction of its size: that the thumbnail still is the same within a level
        image = decode(stored, short_side=4 * SIDE) if isinstance(stored, bytes) else stored
        return digest(stored), thumbnail(image), ""
    except DecodeError as error:
        return bytes(16), None, error.reason


def _rows(looks: list[tuple[bytes, np.ndarray | None, str]]) -> pa.RecordBatch:
    blank = np.zeros((SIDE, SIDE), np.uint8)
    thumbnails = np.stack([blank if small is None else small for _, small, _ in looks])
    digests = np.frombuffer(b"".join(mark for mark, _, _ in looks), np.uint64).reshape(-1, 2)
    frequencies, gradients, flat = hash_thumbnails(thumbnails)
    columns: list[Any] = [*digests.T, *frequencies.T, *gradients.T, flat, [reason for _, _, reason in looks]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _read(table: pa.Table) -> Hashes:
    columns = [table[name].to_numpy() for name in _SCHEMA.names]
    first, second, third = (np.stack(columns[place : place + 2], axis=1) for place in (0, 2, 4))
    return Hashes(first, second, third, columns[6].astype(bool), columns[7].astype(object))
