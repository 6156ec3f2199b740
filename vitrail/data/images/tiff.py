"""TIFF files with all bands and bits, by the package tifffile: Pillow reads four bands, and colours with 8 bits."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from vitrail.data.images.decode import upright
from vitrail.errors import DecodeError
from vitrail.version import install_extra

if TYPE_CHECKING:
    from tifffile import TiffPage

MAX_PAGES = 1024
"""Maximum number of pages, as of channels of a network."""
COMPRESSIONS = {1: "none", 5: "LZW", 8: "deflate", 32946: "deflate", 32773: "packbits", 34925: "LZMA", 50000: "zstd"}
"""Lossless compressions that are read. Others belong to photographs, for which 8-bit RGB is made."""
PALETTE, SEPARATED = 3, 5  # photometric interpretations: the values are no intensities of bands
ORIENTATION = 274  # a tag
REDUCED, MASK = 1, 4  # bits of the tag NewSubfileType


class TiffHeader(NamedTuple):
    """The bands of a TIFF: shape [H, W, bands], type, and EXIF orientation."""

    shape: tuple[int, int, int]
    dtype: str
    orientation: int


def header(data: bytes, max_bytes: int) -> TiffHeader:
    """Return what the pages of a TIFF hold together. Raises DecodeError."""
    with opened(io.BytesIO(data)) as pages:
        bands, first = 0, pages[0]
        for page in pages:
            _check(page, first)
            bands += int(page.samplesperpixel)
            if page.imagelength * page.imagewidth * bands * np.dtype(page.dtype).itemsize > max_bytes:
                raise DecodeError(f"the TIFF has more than {max_bytes:,} bytes of values", reason="too-many-pixels")
            ends = [start + count for start, count in zip(page.dataoffsets, page.databytecounts, strict=True)]
            if max(ends, default=0) > len(data):
                raise DecodeError("the TIFF is cut off: its data end before its last row", reason="truncated")
        turn = first.tags.valueof(ORIENTATION, 1)
        return TiffHeader((first.imagelength, first.imagewidth, bands), np.dtype(first.dtype).name, int(turn))


def values(data: bytes, about: TiffHeader) -> np.ndarray:
    """Return the bands that `header` described, upright: [H, W, bands]. Raises DecodeError."""
    with opened(io.BytesIO(data)) as pages:
        found = [_bands_last(page, page.asarray()) for page in pages]
    return upright(np.concatenate(found, axis=2), about.orientation if 1 <= about.orientation <= 8 else 1)


@contextmanager
def opened(file: BinaryIO) -> Iterator[list[TiffPage]]:
    """Context with the pages that hold bands. Turns what tifffile raises for hostile bytes into DecodeError."""
    try:
        import tifffile
    except ImportError as error:
        message = f"the bands of TIFF files need the package tifffile: {install_extra('bands')}"
        raise DecodeError(message, reason="unsupported") from error
    logging.getLogger("tifffile").disabled = True  # 26 bytes make it write 2,000 lines; its errors become reasons
    try:
        with tifffile.TiffFile(file) as tiff:
            found: list[TiffPage] = []
            for number, page in enumerate(tiff.pages):
                if number >= MAX_PAGES:
                    raise DecodeError(f"the TIFF has more than {MAX_PAGES:,} pages", reason="unsupported")
                whole = page.aspage()
                if not whole.subfiletype & (REDUCED | MASK):
                    found.append(whole)
            if not found:
                raise DecodeError("the TIFF has no page with an image", reason="unsupported")
            yield found
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # as with Pillow, hostile bytes cause any exception
        raise DecodeError(f"corrupt TIFF file: {error or type(error).__name__}", reason="corrupt") from error


def _check(page: TiffPage, first: TiffPage) -> None:
    """Raise DecodeError for a page whose values are not bands, or not of the size and the type of the first page."""
    if page.compression not in COMPRESSIONS:
        names = ", ".join(dict.fromkeys(COMPRESSIONS.values()))
        message = f"a TIFF with compression {int(page.compression)}. Compressions that keep all bits are read: {names}"
        raise DecodeError(message, reason="unsupported")
    if page.photometric in (PALETTE, SEPARATED):
        raise DecodeError("a TIFF with a palette or with inks (CMYK) has no bands", reason="unsupported")
    if page.dtype is None or page.imagedepth != 1:
        raise DecodeError("a TIFF of an unknown type of values, or of volumes", reason="unsupported")
    about, expected = ((one.imagelength, one.imagewidth, one.dtype) for one in (page, first))
    if about != expected:
        message = f"the pages of the TIFF differ in height, width or type: {expected} and {about}"
        raise DecodeError(message, reason="unsupported")


def _bands_last(page: TiffPage, array: np.ndarray) -> np.ndarray:
    """Return the values of a page as [H, W, bands]."""
    if array.ndim == 2:
        return array[:, :, None]
    return array.transpose(1, 2, 0) if page.axes[0] == "S" else array
