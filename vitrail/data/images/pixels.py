"""How a network wants its pixels: as 8-bit RGB, or as the normalised bands of other images.

A transform (`vitrail.data.images.geometry.Op`) knows its pixels, so that whoever has the transform reads stored images
as the network was trained to see them.

`picture` makes a picture of any stored image, for people and for comparisons of images; no network reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vitrail.data.images.decode import DICOM, MAX_PIXELS, decode, format_of
from vitrail.data.images.stored import ARCHIVE, ARRAY, read_stored, stored
from vitrail.data.images.work import within_memory
from vitrail.data.settings import Bands
from vitrail.errors import DecodeError

DEVIATIONS = 2
"""Number of standard deviations from the mean of a band to black and to white in pictures, as in GIS programs."""


class Pixels(ABC):
    """The network's input of one kind of images. `read` raises DecodeError for an image that is not of this kind."""

    channels: int
    dtype: type[np.generic]

    @abstractmethod
    def values(self, stored: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """Return a stored image as [H, W, channels], not yet normalised. `read` of any part of it is this part's."""

    @abstractmethod
    def read(self, stored: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """Return a stored image as [H, W, channels] of `dtype`."""

    @abstractmethod
    def shown(self, image: np.ndarray) -> np.ndarray:
        """Return what `read` returned, or a transform of it, as a picture, uint8 [H, W, 3]."""


class RGB(Pixels):
    """RGB with 8 bits, which the network normalises itself."""

    channels = 3
    dtype = np.uint8

    def values(self, stored: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """See Pixels."""
        return decode(stored, max_pixels=max_pixels) if isinstance(stored, bytes) else stored

    def read(self, stored: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """See Pixels."""
        return self.values(stored, max_pixels)

    def shown(self, image: np.ndarray) -> np.ndarray:
        """See Pixels."""
        return image


@dataclass(frozen=True)
class Banded(Pixels):
    """Bands as float32, normalised by the statistics of the training images: (value - mean) / std."""

    bands: Bands
    dtype = np.float32

    @property
    def channels(self) -> int:  # type: ignore[override]
        """Number of bands."""
        return self.bands.channels

    @cached_property
    def _mean(self) -> Any:
        return np.array(self.bands.mean, np.float32)

    @cached_property
    def _scale(self) -> Any:
        return np.array([1 / deviation for deviation in self.bands.std], np.float32)

    def values(self, stored: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """See Pixels."""
        return read_stored(stored, self.channels, self.bands.bits, max_pixels)

    def read(self, stored: bytes | np.ndarray, max_pixels: int = MAX_PIXELS) -> np.ndarray:
        """See Pixels. An image with NaN or infinity has the reason "not-finite"."""
        values = self.values(stored, max_pixels)
        image = np.subtract(values, self._mean, dtype=np.float32, order="C", casting="same_kind")
        image *= self._scale
        if self.bands.bits == "32f":
            check_finite(image)
        return image

    def shown(self, image: np.ndarray) -> np.ndarray:
        """See Pixels. Black and white are `DEVIATIONS` from the mean, or the ends of the training images' values."""
        chosen = [band - 1 for band in self.bands.display]
        mean, std, low, high = (np.array(values, np.float32)[chosen] for values in self._statistics)
        black, white = (low - mean) / std, (high - mean) / std
        black, white = np.maximum(black, -DEVIATIONS), np.minimum(white, DEVIATIONS)
        share = (image[..., chosen] - black) / np.maximum(white - black, 1e-6)
        picture = np.rint(255 * share.clip(0, 1)).astype(np.uint8)
        return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:-1], 3)))

    @property
    def _statistics(self) -> tuple[tuple[float, ...], ...]:
        return self.bands.mean, self.bands.std, self.bands.low, self.bands.high


EIGHT_BIT_RGB = RGB()
"""The usual pixels."""


def pixels_of(bands: Bands | None) -> Pixels:
    """Return the pixels of `Preprocess.bands`."""
    return EIGHT_BIT_RGB if bands is None else Banded(bands)


def check_finite(image: np.ndarray) -> None:
    """Raise DecodeError, naming the bands, if an image [H, W, bands] has values that are not finite."""
    finite = np.isfinite(image).all(axis=(0, 1))
    if not finite.all():
        bands = ", ".join(str(1 + band) for band in np.flatnonzero(~finite).tolist())
        message = f"NaN or infinity in band {bands}. Replace these values, for example by the mean of the band"
        raise DecodeError(message, reason="not-finite")


ENDS = (2, 98)
"""Percentiles of an image's own values that become black and white, as in GIS programs."""


@within_memory()
def picture(image: bytes | np.ndarray, *, short_side: int | None = None) -> np.ndarray:
    """Return a stored image as a picture, uint8 [H, W, 3]. Raises DecodeError.

    An image file is decoded as `vitrail.data.images.decode.decode` does. Of one that holds bands the first three are
    red, green and blue, or the first one is grey, stretched between the `ENDS` of its values.
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        return image
    if isinstance(image, bytes):
        try:
            return decode(image, short_side=short_side)
        except DecodeError:
            if not _holds_bands(image):
                raise
    found = stored(image)
    bands = found.size()[2]
    assert found.bits is not None
    values = read_stored(image, bands, found.bits)[..., : 3 if bands >= 3 else 1].astype(np.float32)
    check_finite(values)
    black, white = np.percentile(values, ENDS, axis=(0, 1))
    stretched = np.rint(255 * ((values - black) / np.maximum(white - black, 1e-6)).clip(0, 1)).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(stretched, (*stretched.shape[:2], 3)))


def _holds_bands(data: bytes) -> bool:
    """Return whether an image file that is no picture holds bands: an array, DICOM, or a TIFF of more than four."""
    format = format_of(data).name
    try:
        return format in (ARRAY, ARCHIVE, DICOM) or (format == "TIFF" and stored(data).size()[2] > 4)
    except DecodeError:
        return False
