"""Copies that are a part of the picture: the hashes of an image's windows, compared with those of whole images.

The hash of a crop differs from that of its original, and resembles that of the window of the original that was cut out.
So every image has a hash for each of `WINDOWS`, which have 78 to 94 % of its height and width. Of photographs that were
cropped at random by 5, 10 and 20 % of each side, 95, 100 and 88 % are found; by the hashes of whole images 43, 0 and
0 % (`python -m benchmarks.dedup`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.arrow_package import pa
from vitrail.data.bands.picture import picture
from vitrail.data.check import OnProgress
from vitrail.data.copies.hashes import FLAT, LOW, near_pairs, packed, tables_of
from vitrail.data.item import Listed
from vitrail.errors import DecodeError

SIDE = 64
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
_SCHEMA = pa.schema({"windows": pa.list_(pa.uint64(), WINDOWS), "reason": pa.string()})


def windows_of(source: Listed, *, workers: int = 0, progress: OnProgress | None = None) -> np.ndarray:
    """Return the hashes of the windows of all images of a source, uint64 [N, `WINDOWS`], from the cache or computed.

    Raises DataError if the cache cannot be written.
    """
    parts = [np.empty((0, WINDOWS), np.uint64)]
    for table in tables_of(source, "window-hashes", _SCHEMA, _thumbnail, _rows, workers, progress):
        parts.append(table["windows"].combine_chunks().flatten().to_numpy().reshape(-1, WINDOWS))
    return np.concatenate(parts)


class _Thumbnail(NamedTuple):
    """Thumbnail of one image."""

    pixels: np.ndarray
    """uint8 [SIDE, SIDE]; zeros if the image cannot be read."""
    reason: str
    """Why the image cannot be read; "" if it can be read."""


def _rows(batch: list[_Thumbnail]) -> pa.RecordBatch:
    values = pa.array(hash_windows(np.stack([one.pixels for one in batch])).ravel(), pa.uint64())
    reasons = pa.array([one.reason for one in batch], pa.string())
    return pa.record_batch([pa.FixedSizeListArray.from_arrays(values, WINDOWS), reasons], schema=_SCHEMA)


def _thumbnail(source: Listed, index: int) -> _Thumbnail:
    """Return the grey thumbnail of one image, or why it cannot be read."""
    try:
        image = picture(source[index].image, short_side=2 * SIDE)
    except DecodeError as error:
        return _Thumbnail(np.zeros((SIDE, SIDE), np.uint8), error.reason)
    grey = Image.fromarray(image).convert("L")
    return _Thumbnail(np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR)), "")


def hash_windows(thumbnails: np.ndarray) -> np.ndarray:
    """Return uint64 [N, `WINDOWS`] of thumbnails uint8 [N, SIDE, SIDE]: the frequency hash of each window."""
    values, found = thumbnails.astype(np.float64), []
    for scale in SCALES:
        begins = _begins(scale)
        waves = np.stack([_cosines(begin, begin + scale) for begin in begins])  # [begins, LOW, SIDE]
        low = np.einsum("nyls,xks->nyxlk", waves @ values[:, None], waves, optimize=True).round(3)
        bits = low.reshape(len(values), len(begins) ** 2, LOW * LOW)
        hashes = packed(bits > np.median(bits, axis=2, keepdims=True))
        found.append(np.where(_flat(values, scale), NOTHING, hashes))
    return np.concatenate(found, axis=1)


def _cosines(begin: float, end: float) -> np.ndarray:
    """Return the waves [LOW, SIDE] of a window's discrete cosine transform; pixels at its edges count in part."""
    pixels = np.arange(SIDE)
    inside = np.clip(np.minimum(end * SIDE, pixels + 1) - np.maximum(begin * SIDE, pixels), 0, 1)
    place = ((pixels + 0.5) / SIDE - begin) / (end - begin)
    return np.cos(np.pi * np.outer(np.arange(LOW), place)) * inside


def _flat(values: np.ndarray, scale: float) -> np.ndarray:
    """Return bool [N, windows of this size]: whether a window has one colour, so that its hash is noise."""
    edges = [(round(begin * SIDE), round((begin + scale) * SIDE)) for begin in _begins(scale)]
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
