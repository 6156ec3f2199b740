"""Refuse small files that ask for much work, from their headers, before a decoder runs.

Two things cost more than a file is long. A file may claim pixels that it hardly holds: formats that need no bits for an
even colour (arithmetic JPEG, lossless WebP, AVIF, JPEG 2000) claim 134 million pixels in 100 bytes. And a header may
have millions of parts, which Pillow reads one by one in Python, with the interpreter's lock.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import islice

from PIL import TiffImagePlugin

from vitrail.errors import DecodeError

FREE_PIXELS = 2**24
"""Number of pixels that any file may claim: 17 million."""
PIXELS_PER_BYTE = 2**15
"""Maximum number of pixels for each byte of a larger image. A white page of 35 million pixels, the emptiest ordinary
image, has 31,000 pixels for each byte as a fax (TIFF, group 4). Photographs have fewer than 200."""

MAX_PARTS = 2**14
"""Maximum number of parts of a header: segments, chunks, blocks or boxes."""
SMALL = 64
"""Bytes of a chunk with pixels, of which a large PNG has many; smaller ones count as parts."""
UNPACKED = 64
"""A chunk that is unpacked counts as this number of parts: Pillow makes up to a megabyte of a kilobyte."""

TILE_WIDTH, TILE_LENGTH = 322, 323  # TIFF tags
SMALLEST_TILE, MAX_TILES = 256, 2**16
"""Pillow takes 800 bytes for each tile. So tiles of fewer pixels are allowed only up to a number of them."""
NAKED = (b"\xff\x4f", b"\xff\x0a")
"""The first bytes of a JPEG 2000 and of a JPEG XL without boxes."""
FREE_TILES, J2K_TILE = 1024, 64 * 64
"""OpenJPEG takes 12 kB for each tile of a JPEG 2000. Beyond a number of them a tile needs this number of pixels."""
FREE_BLOCKS, J2K_BLOCK = 2**16, 8
"""It takes 500 bytes for each block of coefficients. Beyond a number of them a block needs 2 to this power values."""
SIZ, COD, COC, SOT, SOD, EOC = 0xFF51, 0xFF52, 0xFF53, 0xFF90, 0xFF93, 0xFFD9  # markers of JPEG 2000
OTHERS = frozenset(
    0xFF00 + low for low in (0x50, 0x55, 0x57, 0x58, 0x59, *range(0x5C, 0x62), 0x63, 0x64, 0x74, 0x75, 0x77, 0x78)
)
"""The other markers that OpenJPEG knows. After an unknown one it searches for the next, whatever its length."""
MAX_COMMENTS = 2**16
"""Bytes of comments in a PNM. Pillow reads them one by one, and holds the interpreter's lock."""


def check_claim(height: int, width: int, size: int) -> None:
    """Raise DecodeError if an image claims far more pixels than a file of `size` bytes holds."""
    pixels = height * width
    if pixels > FREE_PIXELS and pixels > PIXELS_PER_BYTE * size:
        message = (
            f"{width} x {height} pixels in a file of {size:,} bytes: an image of more than {FREE_PIXELS:,} pixels "
            f"needs a byte for each {PIXELS_PER_BYTE:,}. Save it with fewer pixels, or in another format"
        )
        raise DecodeError(message, reason="too-many-pixels")


def check_parts(data: bytes, format: str) -> None:
    """Raise DecodeError for a header whose parts take far more work than its picture."""
    if format == "TIFF":
        _check_tiles(data)
    elif format == "PNM":
        words = re.sub(rb"#[^\r\n]*[\r\n]?", b" ", data[:MAX_COMMENTS]).split(maxsplit=4)
        if len(data) > MAX_COMMENTS and (len(words) < 4 or (data[1:2] in b"123" and data.count(b"#") > MAX_COMMENTS)):
            message = f"the PNM has more than {MAX_COMMENTS:,} bytes of comments. Remove them"
            raise DecodeError(message, reason="corrupt")
    elif format in WALKS and sum(islice(WALKS[format](data), MAX_PARTS + 1)) > MAX_PARTS:
        raise too_many_parts(format)
    if format == "JPEG 2000":
        _check_codestream(data)


def too_many_parts(format: str) -> DecodeError:
    """Return the error for a header of more than `MAX_PARTS` parts."""
    message = f"the header of the {format} file has more than {MAX_PARTS:,} parts. Save the image again without them"
    return DecodeError(message, reason="corrupt")


def _check_tiles(data: bytes) -> None:
    header = TiffImagePlugin.ImageFileDirectory_v2(data[: 16 if b"+" in data[2:4] else 8])  # 43 is BigTIFF
    stream = BytesIO(data)
    stream.seek(header.next)
    header.load(stream)
    wide, long = header.get(TILE_WIDTH, 0), header.get(TILE_LENGTH, 0)
    if 0 < wide * long < SMALLEST_TILE and header.get(256, 0) * header.get(257, 0) > MAX_TILES * wide * long:
        message = f"tiles of {wide} x {long} pixels: a TIFF of more than {MAX_TILES:,} tiles needs larger ones"
        raise DecodeError(message, reason="too-many-pixels")


def _check_codestream(data: bytes) -> None:
    """Raise DecodeError for a JPEG 2000 of many small tiles, or many small blocks of coefficients."""
    pixels = samples = 0
    for marker, segment in _segments(data):
        if marker == SIZ and len(segment) >= 36:
            width, height, left, top, wide, long, tiles_left, tiles_top = struct.unpack(">8I", segment[2:34])
            across, down = -((tiles_left - width) // max(wide, 1)), -((tiles_top - height) // max(long, 1))
            pixels = max(width - left, 0) * max(height - top, 0)
            samples = pixels * int.from_bytes(segment[34:36], "big")
            if across * down > max(FREE_TILES, pixels // J2K_TILE):
                message = f"{across * down:,} tiles of {wide} x {long} pixels: this JPEG 2000 needs larger ones"
                raise DecodeError(message, reason="too-many-pixels")
        elif marker in (COD, COC):
            skipped = 5 if marker == COD else 2 if samples < 257 * pixels else 3  # bytes before the number of levels
            exponents = [2 + (value & 15) for value in segment[skipped + 1 : skipped + 3]]
            sides = [sum(exponents), *((value & 15) + (value >> 4) for value in segment[skipped + 5 :])]
            if samples >> min(sides) > max(FREE_BLOCKS, samples >> J2K_BLOCK):
                message = f"blocks of {1 << min(sides)} values: this JPEG 2000 needs larger ones"
                raise DecodeError(message, reason="too-many-pixels")


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of the segments of a JPEG 2000, in its header and in those of its tiles."""
    at, tile, parts = _codestream(data) + 2, 0, 0
    while at >= 2 and at + 4 <= len(data):
        marker, length = struct.unpack_from(">HH", data, at)
        parts += 1
        if parts > MAX_PARTS * UNPACKED:
            raise too_many_parts("JPEG 2000")
        if marker == SOT:
            tile = at + int.from_bytes(data[at + 6 : at + 10], "big")
        if marker == SOD:
            if tile <= at:  # to the end of the file
                return
            at = tile
            continue
        if marker == EOC:
            return
        if marker not in OTHERS and marker not in (SIZ, COD, COC, SOT):
            raise DecodeError(f"corrupt JPEG 2000 file: unknown marker {marker:#x}", reason="corrupt")
        yield marker, data[at + 4 : at + 2 + length]
        at += 2 + length


def _codestream(data: bytes) -> int:
    """Return where the codestream of a JPEG 2000 begins; -2 if there is none."""
    if data[:2] == b"\xff\x4f":
        return 0
    return next((at for kind, at in boxes(data) if kind == b"jp2c"), -2)


def _chunks(data: bytes) -> Iterator[int]:
    """Yield the weight of each chunk of a PNG."""
    at = 8
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind not in (b"IDAT", b"fdAT") or length < SMALL:
            yield UNPACKED if kind in (b"iCCP", b"zTXt", b"iTXt") else 1
        at += 12 + length


def _blocks(data: bytes) -> Iterator[int]:
    """Yield 1 for each block of a GIF before its first picture."""
    flags = data[10] if len(data) > 10 else 0
    at = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    while at < len(data) and data[at : at + 1] not in b",;":
        yield 1
        if data[at : at + 1] == b"!":
            at += 2
            while at < len(data) and data[at]:
                yield 1
                at += 1 + data[at]
        at += 1


def boxes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield kind and begin of the content of each box of a JPEG 2000, also of those in its header; of a JPEG XL."""
    at = 0
    while at + 8 <= len(data) and data[:2] not in NAKED:
        length, kind, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if length == 1:
            length, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        yield kind, at + head
        if length < 8:  # to the end of the file
            return
        at += head if kind == b"jp2h" else length


WALKS: dict[str, Callable[[bytes], Iterator[int]]] = {
    "PNG": _chunks,
    "GIF": _blocks,
    "JPEG 2000": lambda data: (1 for _ in boxes(data)),
    "JPEG XL": lambda data: (1 for _ in boxes(data)),
}
"""Format -> function that yields the weights of the parts of a file. Those of a JPEG are counted where it is read."""


@contextmanager
def within_memory() -> Iterator[None]:
    """Turn a failed allocation into DecodeError "out-of-memory": the image is listed, and the others are read."""
    try:
        yield
    except MemoryError as error:
        raise no_memory() from error


def no_memory() -> DecodeError:
    """Return the error for an image for which the memory does not suffice."""
    message = "the image needs more memory than there is. Make it smaller, or free memory"
    return DecodeError(message, reason="out-of-memory")
