"""JPEG XL, decoded by libjxl through the package imagecodecs, as an image of Pillow's.

libjxl has no limits of its own, so the header is read here (ISO/IEC 18181-1, annexes D and E), before any pixel. The
orientation is part of it: libjxl applies it, and an orientation in EXIF beside it does not count.

| stored | picture |
|---|---|
| 8 bits or fewer, 9 to 16 bits | the upper 8 of the declared bits |
| float | 0 to 1 becomes 0 to 255; values outside are clipped |
| grey or RGB, with or without alpha | itself; other extra channels are "unsupported" |
| animation | the first picture |
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile

from vitrail.data.images.work import MAX_PARTS, NAKED, boxes
from vitrail.errors import DecodeError

_HEAD = 4096
"""Number of bytes of a codestream in which the part of its header lies that is read. A name takes up to 1,071."""
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
"""Width : height of a size that states only its height, and its number from 1."""
_EIGHTHS, _PIXELS = ((1, 5),), ((1, 9), (1, 13), (1, 18), (1, 30))
_PREVIEW_EIGHTHS, _PREVIEW = ((16, 0), (32, 0), (1, 5), (33, 9)), ((1, 6), (65, 8), (321, 10), (1345, 12))
"""Notations of a side, see `_Bits.one_of`."""
_ENUM = ((0, 0), (1, 0), (2, 4), (18, 6))
_ALPHA, _GREY = 0, 1  # of a channel, of a colour space


class Header(NamedTuple):
    """Size of the upright picture in pixels, Pillow's mode of its 8-bit values, and the bits of a sample as stored."""

    width: int
    height: int
    mode: str = "RGB"
    bits: int | None = 8
    """None for float values."""


class JpegXLFile(ImageFile):
    """A JPEG XL file, opened from its header alone."""

    format = "JPEG XL"

    def _open(self) -> None:
        assert self.fp is not None
        self._data = self.fp.read()
        self._header = header(self._data)
        self._size, self._mode = (self._header.width, self._header.height), self._header.mode

    def load(self) -> Image.core.PixelAccess | None:
        """Decode the picture in this thread alone, as other formats are."""
        if self._data:
            from imagecodecs import jpegxl_decode

            values = _eight_bits(jpegxl_decode(self._data, index=0, numthreads=1), self._header.bits)
            picture = Image.fromarray(values)
            if (picture.size, picture.mode) != (self.size, self.mode):
                message = f"the header states {self.size} {self.mode}, and the picture is {picture.size} {picture.mode}"
                raise DecodeError(message, reason="corrupt")
            self.im, self._data = picture.im, b""
        return super().load()


def _eight_bits(values: np.ndarray, bits: int | None) -> np.ndarray:
    """Return decoded values of `bits` as uint8."""
    if bits is None:
        return np.rint(np.nan_to_num(values.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)
    if bits > 8:
        return (values >> bits - 8).astype(np.uint8)
    return (values.astype(np.uint16) * 255 // (2**bits - 1)).astype(np.uint8)


def header(data: bytes) -> Header:
    """Return what the header of a JPEG XL states. Raises DecodeError, also for channels other than alpha."""
    take = _Bits(_codestream(data))
    width, height = _size(take)
    if take(1):
        return Header(width, height)
    if take(1):
        if take(3) >= 4:  # orientations 5 to 8
            width, height = height, width
        if take(1):  # the size at which to show it
            _size(take)
        if take(1):
            _size(take, preview=True)
        if take(1):  # an animation: ticks a second as a fraction, number of loops, time codes
            take.one_of((100, 0), (1000, 0), (1, 10), (1, 30))
            take.one_of((1, 0), (1001, 0), (1, 8), (1, 10))
            take.one_of((0, 0), (0, 3), (0, 16), (0, 32))
            take(1)
    bits = _depth(take)
    take(1)  # whether 16 bits hold the values of a lossless image
    extra = take.one_of((0, 0), (1, 0), (2, 4), (1, 12))
    if extra > 1 or (extra and not _is_alpha(take)):
        message = f"a JPEG XL file of {extra} channels besides its colours is not supported, except for alpha"
        raise DecodeError(message, reason="unsupported")
    take(1)  # whether the colours are XYB
    grey = not take(1) and (take(1), take.one_of(*_ENUM))[1] == _GREY
    return Header(width, height, ("L" if grey else "RGB") + "A" * extra, bits)


def _size(take: _Bits, preview: bool = False) -> tuple[int, int]:
    """Return (width, height) of an image or of its preview."""
    eighths, pixels = (_PREVIEW_EIGHTHS, _PREVIEW) if preview else (_EIGHTHS, _PIXELS)
    small = take(1)

    def side() -> int:
        return 8 * take.one_of(*eighths) if small else take.one_of(*pixels)

    height = side()
    ratio = take(3)
    return (height * _RATIOS[ratio - 1][0] // _RATIOS[ratio - 1][1] if ratio else side()), height


def _depth(take: _Bits) -> int | None:
    """Return the bits of a sample; None for float."""
    if take(1):
        take.one_of((32, 0), (16, 0), (24, 0), (1, 6))
        take(4)  # bits of the exponent
        return None
    return take.one_of((8, 0), (10, 0), (12, 0), (1, 6))


def _is_alpha(take: _Bits) -> bool:
    """Return whether an extra channel is alpha, and skip the rest of what it states."""
    if take(1):
        return True
    kind = take.one_of(*_ENUM)
    _depth(take)
    take.one_of((0, 0), (3, 0), (4, 0), (1, 3))  # how much smaller it is
    take(8 * take.one_of((0, 0), (0, 4), (16, 5), (48, 10)))  # its name
    if kind == _ALPHA:
        take(1)  # whether the colours are multiplied by it
    return kind == _ALPHA


class _Bits:
    """Reads numbers from bytes, their lowest bits first."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "little"), 8 * len(data)

    def __call__(self, count: int) -> int:
        """Return the number in the next `count` bits. Raises DecodeError after the last bit."""
        self._left -= count
        if self._left < 0:
            raise DecodeError("the JPEG XL file ends in its header", reason="truncated")
        value = self._value & (1 << count) - 1
        self._value >>= count
        return value

    def one_of(self, *kinds: tuple[int, int]) -> int:
        """Return a number in one of four notations (smallest value, bits beyond it); two bits choose one.

        With a single notation there are no bits to choose one.
        """
        smallest, bits = kinds[self(2) if len(kinds) > 1 else 0]
        return smallest + self(bits)


def _codestream(data: bytes) -> bytes:
    """Return the beginning of a codestream, after its two magic bytes, from the boxes of the file if it has any."""
    if data.startswith(NAKED):
        return data[2:_HEAD]
    found = b""
    for kind, at in islice(boxes(data), MAX_PARTS):
        if kind == b"jxlc":
            return data[at + 2 : at + _HEAD]
        if kind == b"jxlp":  # a part of it, after 4 bytes that number the parts
            length = int.from_bytes(data[at - 8 : at - 4], "big") - 8
            found += data[at + 4 : at + min(length, _HEAD) if length > 0 else at + _HEAD]
            if len(found) >= _HEAD:
                break
    return found[2:]
