"""Statistics of each band over training images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.bands.pixels import check_finite
from vitrail.data.bands.stored import read
from vitrail.data.item import Listed, evenly_spaced
from vitrail.data.loading.prefetch import each_image, threads
from vitrail.data.settings import Bands, Bits
from vitrail.device import available_cores
from vitrail.errors import DataError, DecodeError

MEASURED = 1000
"""Largest number of training images whose values are read."""


@dataclass
class _Moments:
    """Mean, sum of squared differences from it, and ends of the values of an image's bands, float64 [bands] each."""

    count: int
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def add(self, other: _Moments) -> None:
        """Add the values of another image (Chan et al. 1979, equation 2.1: exact for large means, too)."""
        count, apart = self.count + other.count, other.mean - self.mean
        self.mean += apart * (other.count / count)
        self.squares += other.squares + apart**2 * (self.count * other.count / count)
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.count = count


def measured(train: Listed, channels: int, bits: Bits, decisions: dict[str, str]) -> Bands:
    """Return the statistics over at most `MEASURED` training images, evenly spaced. Note in `decisions` how many.

    An image that cannot be read is left out here; the loader reports it. Raises DataError if there is no other.
    """
    rows = evenly_spaced(len(train), MEASURED)

    def moments(source: Listed, index: int) -> _Moments | DecodeError:
        try:
            values = read(source[index].image, channels, bits).astype(np.float64)
            check_finite(values)
        except DecodeError as error:
            return error
        mean = values.mean(axis=(0, 1))
        squares = np.square(values - mean).sum(axis=(0, 1))
        return _Moments(values[..., 0].size, mean, squares, values.min(axis=(0, 1)), values.max(axis=(0, 1)))

    total: _Moments | None = None
    read_images, first = 0, None
    with threads(available_cores()) as pool:
        for found in each_image(pool, moments, train, rows):
            if isinstance(found, DecodeError):
                first = first or found
            elif total is None:
                total, read_images = found, 1
            else:
                total.add(found)
                read_images += 1
    if total is None:
        raise DataError(f"none of {len(rows)} training images can be read with these bands. The first: {first}")
    std = np.sqrt(total.squares / total.count)
    constant = ", ".join(str(1 + band) for band in np.flatnonzero(std == 0).tolist())
    decisions["statistics"] = f"mean and std of each band: those of {read_images} training images"
    if constant:
        decisions["statistics"] += f"; band {constant} has one value only, from which nothing can be learned"
    std[std == 0] = 1.0
    return Bands(bits, *(tuple(values.tolist()) for values in (total.mean, std, total.low, total.high)))
