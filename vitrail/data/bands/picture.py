"""A picture of any stored image, for people and for comparisons of images; no network reads it."""

from __future__ import annotations

import numpy as np

from vitrail.data.bands.pixels import check_finite
from vitrail.data.bands.stored import ARCHIVE, ARRAY, read, stored
from vitrail.data.images.decode import DICOM, decode, format_of
from vitrail.data.images.work import within_memory
from vitrail.errors import DecodeError

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
    values = read(image, bands, found.bits)[..., : 3 if bands >= 3 else 1].astype(np.float32)
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
