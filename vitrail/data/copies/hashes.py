"""Perceptual hashes: 64 bits of an image that stay almost the same when the image is compressed again or resized.

Each image has two hashes, from one grey thumbnail of 32 x 32 pixels:

- `frequencies` (pHash): whether each of the 8 x 8 lowest frequencies of the thumbnail's discrete cosine transform is
  above their median;
- `gradients` (dHash): whether the mean of each cell of a grid of 8 x 9 cells is below the mean of its right neighbour.

Two pictures that have one hash in common by chance seldom have the other in common. Both are also stored for the mirror
image, together with a digest of the stored bytes, which finds exact copies. The hashes of every 32,768 images are a
table in the cache folder. An interrupted scan therefore continues where it stopped, and a second scan reads 50 bytes
per image. Measured on one core: 1.5 ms for an ImageNet file, nearly all of it decoding.

Copies that are a part of the picture are found by the hashes of an image's windows, compared with those of whole
images. The hash of a crop differs from that of its original, and resembles that of the window of the original that was
cut out. So every image has a hash for each of `WINDOWS`, which have 78 to 94 % of its height and width. Of photographs
that were cropped at random by 5, 10 and 20 % of each side, 95, 100 and 88 % are found; by the hashes of whole images
43, 0 and 0 % (`python -m benchmarks.dedup`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self
from uuid import uuid4

import numpy as np
from PIL import Image

from vitrail.data.cache import cached_file, pa, pc, stored_table
from vitrail.data.check import OnProgress, digest
from vitrail.data.images.pixels import picture
from vitrail.data.item import IndexedSource, Reader, origin
from vitrail.data.loading.prefetch import each_image, threads
from vitrail.errors import DecodeError

BITS = 64
TILE = 1 << 17
"""Number of hashes compared at a time. Their differences, 1 MiB, fit into a core's cache."""
_SHORTEST = 5  # bands of fewer bits cost more time than they save

HashBlock = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Indices on the left, indices on the right, number of differing bits: int64 [K], int64 [K], uint8 [K]."""


def near_pairs(left: np.ndarray, right: np.ndarray, distance: int) -> Iterator[HashBlock]:
    """Yield each pair of `left` uint64 [N] and `right` uint64 [M] that differs in at most `distance` bits, once.

    A pair that differs in at most `distance` bits agrees in at least one of `distance` + 1 bands of bits, so only
    hashes that agree in a band are compared. The memory is that of the sorted hashes and one tile, not N x M.
    """
    earlier: list[np.uint64] = []
    for band in bands(distance):
        for i, j, differing in _agreeing(left, right, band, distance):
            difference = left[i] ^ right[j]
            new = np.ones(len(i), dtype=bool)
            for other in earlier:  # a pair that agrees in an earlier band was found there
                new &= (difference & other) != 0
            if new.any():
                yield i[new], j[new], differing[new]
        earlier.append(band)


def bands(distance: int) -> list[np.uint64]:
    """Return the bands as bit masks; if bands save no time, one empty mask, in which all hashes agree."""
    count = distance + 1
    if BITS // count < _SHORTEST:
        return [np.uint64(0)]
    edges = [BITS * number // count for number in range(count + 1)]
    return [np.uint64((1 << end) - (1 << begin)) for begin, end in pairwise(edges)]


def _agreeing(left: np.ndarray, right: np.ndarray, band: np.uint64, distance: int) -> Iterator[HashBlock]:
    """Yield the pairs within `distance` among the hashes that agree in a band."""
    left_order, right_order = (np.argsort(side & band, kind="stable") for side in (left, right))
    left, right = left[left_order], right[right_order]
    left_keys, left_starts = np.unique(left & band, return_index=True)
    right_keys, right_starts = np.unique(right & band, return_index=True)
    left_ends, right_ends = np.append(left_starts[1:], len(left)), np.append(right_starts[1:], len(right))
    _, ours, theirs = np.intersect1d(left_keys, right_keys, assume_unique=True, return_indices=True)
    for one, two in zip(ours.tolist(), theirs.tolist(), strict=True):
        begin, other = left_starts[one], right_starts[two]
        for i, j, differing in _compared(left[begin : left_ends[one]], right[other : right_ends[two]], distance):
            yield left_order[begin + i], right_order[other + j], differing


def _compared(left: np.ndarray, right: np.ndarray, distance: int) -> Iterator[HashBlock]:
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
_DECODED = 128  # length of the shorter side to which a JPEG may be decoded
_VERSION = 1  # increase it whenever the hash of an unchanged image changes


@dataclass(frozen=True)
class ArrayTable:
    """Base of dataclasses whose fields are arrays of the same length, the columns of a table."""

    def __len__(self) -> int:
        return len(self._arrays()[0])

    def _arrays(self) -> list[np.ndarray]:
        return [getattr(self, field.name) for field in fields(self)]

    def rows_at(self, which: np.ndarray | slice) -> Self:
        """Return some of the rows, by a mask or by their places."""
        return type(self)(*(array[which] for array in self._arrays()))

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of several tables, one after another."""
        return cls(*map(np.concatenate, zip(*(part._arrays() for part in parts), strict=True)))


@dataclass(frozen=True)
class Hashes(ArrayTable):
    """The hashes of N images, in the order of their source."""

    digest: np.ndarray
    """uint64 [N, 2]: equal for equal stored bytes; zeros if the image cannot be read."""
    frequencies: np.ndarray
    """uint64 [N, 2]: hashes of the image and of its mirror image."""
    gradients: np.ndarray
    """uint64 [N, 2]: hashes of the image and of its mirror image."""
    flat: np.ndarray
    """bool [N]: whether the image has one colour, so that only its digest can be compared."""
    reason: np.ndarray
    """object [N]: why the image cannot be read (`DecodeError.reason`); "" if it can be read."""

    @property
    def hashed(self) -> np.ndarray:
        """bool [N]: whether the hashes can be compared: the image is readable and has more than one colour."""
        return ~self.flat & self.digest.any(axis=1)


def thumbnail(image: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Return the grey thumbnail uint8 [side, side] of an image uint8 [H, W, 3]: ITU-R 601 luma, antialiased, squashed.

    The side is in pixels.
    """
    grey = Image.fromarray(image).convert("L")
    return np.asarray(grey.resize((side, side), Image.Resampling.BILINEAR))


def hash_thumbnails(thumbnails: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `frequencies` and `gradients` uint64 [N, 2] and `flat` bool [N] of thumbnails uint8 [N, 32, 32]."""
    values = thumbnails.astype(np.float64)
    # rounded, so that rounding errors of the sums do not change values that are 0 by symmetry
    low = (_COSINES @ values @ _COSINES.T).round(3)
    mirrored = low * np.where(np.arange(LOW) % 2, -1, 1)  # odd horizontal frequencies change their sign
    pair = np.stack([low, mirrored], axis=1).reshape(len(values), 2, -1)
    frequencies = packed(pair > np.median(pair, axis=2, keepdims=True))
    cells = _ROW_CELLS @ values @ _COLUMN_CELLS.T  # sums of whole numbers: exact
    pair = np.stack([cells, cells[:, :, ::-1]], axis=1)
    gradients = packed((pair[..., 1:] > pair[..., :-1]).reshape(len(values), 2, -1))
    return frequencies, gradients, values.std(axis=(1, 2)) < FLAT


def packed(bits: np.ndarray) -> np.ndarray:
    """Pack bool [N, K, 64] into uint64 [N, K]."""
    return np.packbits(bits, axis=2).view(np.uint64)[..., 0]


def _cells(count: int) -> np.ndarray:
    """Return the weights [count, 32] of the pixels in `count` equal cells, in units of 1 / count pixel."""
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


class _Thumbnail(NamedTuple):
    """Digest and thumbnail of one image."""

    digest: bytes
    pixels: np.ndarray
    """uint8 [side, side]; zeros if the image cannot be read."""
    reason: str
    """Why the image cannot be read; "" if it can be read."""


def hashes_of(source: IndexedSource, *, workers: int = 0, progress: OnProgress | None = None) -> Hashes:
    """Return the hashes of all images of a source, from the cache or else computed with `workers` threads.

    A cached table belongs to the same images in the same order, in files that were not changed (`Reader.state`).
    Raises DataError if the cache cannot be written.
    """
    tables = tables_of(source, "hashes", _SCHEMA, SIDE, _rows, workers, progress)
    return Hashes.concatenated([_read(table) for table in tables])


def tables_of(
    source: IndexedSource,
    kind: str,
    schema: pa.Schema,
    side: int,
    rows: Callable[[list[_Thumbnail]], pa.RecordBatch],
    workers: int,
    progress: OnProgress | None,
) -> Iterator[pa.Table]:
    """Yield a table for every `CHUNK` images of a source, from the cache or computed with `workers` threads.

    A table has what `rows` returns for lists of thumbnails of this `side`. Its column `reason` says why an image cannot
    be read (`DecodeError.reason`). `kind` is the name of its folder in the cache. Raises DataError if the cache cannot
    be written.
    """

    def compute(numbers: range, writer: pa.RecordBatchWriter) -> None:
        """Read some images and write their rows."""
        batch: list[_Thumbnail] = []
        read = partial(_read_thumbnail, side)
        for done, one in enumerate(each_image(pool, read, source, numbers), start=numbers.start + 1):
            batch.append(one)
            if len(batch) == _ROWS or done == numbers.stop:
                writer.write_batch(rows(batch))
                batch = []
            if progress is not None and done < numbers.stop:  # the last image is reported when its table is written
                progress(done, len(source))

    with threads(workers) as pool:
        for begin in range(0, len(source), CHUNK):
            numbers = range(begin, min(begin + CHUNK, len(source)))
            key = _key(source, numbers)
            target = cached_file(kind, key or uuid4().hex)
            table = stored_table(target, schema, partial(compute, numbers), f"the {kind} of images")
            if key is None or pc.any(pc.equal(table["reason"], "unreadable")).as_py():
                target.unlink(missing_ok=True)  # the disk may give these images the next time
            yield table
            if progress is not None:
                progress(numbers.stop, len(source))


def _key(source: IndexedSource, numbers: range) -> str | None:
    """Return a key of the images in a table, from their ids and states, without reading the images.

    None if what an image is stored in is not known, so that no table can belong to it.
    """
    key = hashlib.blake2b(digest_size=16)
    for index in numbers:
        reader, place = origin(source, index)
        if not (isinstance(reader, Reader) and (state := reader.state(place))):
            return None
        key.update(f"{source.id(index)}\0{state}\0".encode("utf-8", "surrogateescape"))
    return json.dumps([_VERSION, len(numbers), key.hexdigest()])


def _read_thumbnail(side: int, source: IndexedSource, index: int) -> _Thumbnail:
    """Return the digest and the thumbnail of one image, or why it cannot be read."""
    try:
        stored = source[index].image
        # a JPEG may be decoded at a fraction of its size, which changes the thumbnail by at most a level
        image = picture(stored, short_side=_DECODED)
        return _Thumbnail(digest(stored), thumbnail(image, side), "")
    except DecodeError as error:
        return _Thumbnail(bytes(16), np.zeros((side, side), np.uint8), error.reason)


def _rows(batch: list[_Thumbnail]) -> pa.RecordBatch:
    digests = np.frombuffer(b"".join(one.digest for one in batch), np.uint64).reshape(-1, 2)
    frequencies, gradients, flat = hash_thumbnails(np.stack([one.pixels for one in batch]))
    columns: list[Any] = [*digests.T, *frequencies.T, *gradients.T, flat, [one.reason for one in batch]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _read(table: pa.Table) -> Hashes:
    columns = [table[name].to_numpy() for name in _SCHEMA.names]
    first, second, third = (np.stack(columns[place : place + 2], axis=1) for place in (0, 2, 4))
    return Hashes(first, second, third, columns[6].astype(bool), columns[7].astype(object))


WINDOW_SIDE = 64
"""Side in pixels of the thumbnail that windows are cut out of."""
SCALES = (0.94, 0.90, 0.86, 0.82, 0.78)
"""Height and width of a window, as a share of the image's."""
STEP = 0.04
"""Largest distance between windows of one size, as a share of the image's side."""
NOTHING = 0
"""The hash of a window of one colour, and of an image that cannot be read. Other hashes have bits."""


def _begins(scale: float) -> np.ndarray:
    """Return where the windows of one size begin, in one direction, as shares of the side."""
    return np.linspace(0, 1 - scale, int(np.ceil((1 - scale) / STEP)) + 1)


WINDOWS = sum(len(_begins(scale)) ** 2 for scale in SCALES)
"""Number of windows of an image."""
_WINDOW_SCHEMA = pa.schema({"windows": pa.list_(pa.uint64(), WINDOWS), "reason": pa.string()})


def windows_of(source: IndexedSource, *, workers: int = 0, progress: OnProgress | None = None) -> np.ndarray:
    """Return the hashes of the windows of all images of a source, uint64 [N, `WINDOWS`], from the cache or computed.

    Raises DataError if the cache cannot be written.
    """
    parts = [np.empty((0, WINDOWS), np.uint64)]
    for table in tables_of(source, "window-hashes", _WINDOW_SCHEMA, WINDOW_SIDE, _window_rows, workers, progress):
        parts.append(table["windows"].combine_chunks().flatten().to_numpy().reshape(-1, WINDOWS))
    return np.concatenate(parts)


def _window_rows(batch: list[_Thumbnail]) -> pa.RecordBatch:
    values = pa.array(hash_windows(np.stack([one.pixels for one in batch])).ravel(), pa.uint64())
    reasons = pa.array([one.reason for one in batch], pa.string())
    return pa.record_batch([pa.FixedSizeListArray.from_arrays(values, WINDOWS), reasons], schema=_WINDOW_SCHEMA)


def hash_windows(thumbnails: np.ndarray) -> np.ndarray:
    """Return the frequency hash of each window, uint64 [N, `WINDOWS`], of thumbnails uint8 [N, side, side]."""
    values, found = thumbnails.astype(np.float64), []
    for scale in SCALES:
        begins = _begins(scale)
        waves = np.stack([_cosines(begin, begin + scale) for begin in begins])  # [begins, LOW, WINDOW_SIDE]
        low = np.einsum("nyls,xks->nyxlk", waves @ values[:, None], waves, optimize=True).round(3)
        bits = low.reshape(len(values), len(begins) ** 2, LOW * LOW)
        hashes = packed(bits > np.median(bits, axis=2, keepdims=True))
        found.append(np.where(_flat(values, scale), NOTHING, hashes))
    return np.concatenate(found, axis=1)


def _cosines(begin: float, end: float) -> np.ndarray:
    """Return the waves [LOW, side] of a window's discrete cosine transform; pixels at its edges count in part."""
    pixels = np.arange(WINDOW_SIDE)
    inside = np.clip(np.minimum(end * WINDOW_SIDE, pixels + 1) - np.maximum(begin * WINDOW_SIDE, pixels), 0, 1)
    place = ((pixels + 0.5) / WINDOW_SIDE - begin) / (end - begin)
    return np.cos(np.pi * np.outer(np.arange(LOW), place)) * inside


def _flat(values: np.ndarray, scale: float) -> np.ndarray:
    """Return bool [N, windows of this size]: whether a window has one colour, so that its hash is noise."""
    edges = [(round(begin * WINDOW_SIDE), round((begin + scale) * WINDOW_SIDE)) for begin in _begins(scale)]
    parts = [values[:, top:bottom, left:right] for top, bottom in edges for left, right in edges]
    return np.stack([part.std(axis=(1, 2)) < FLAT for part in parts], axis=1)


def near_windows(windows: np.ndarray, whole: np.ndarray, distance: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield (image, other image, differing bits) where a window of the first resembles the whole other one.

    windows: uint64 [N, `WINDOWS`]. whole: uint64 [M]. A pair may come several times, once for each window.
    """
    flat = windows.ravel()
    real = np.flatnonzero(flat != NOTHING)
    for i, j, bits in near_pairs(flat[real], whole, distance):
        yield real[i] // WINDOWS, j, bits
