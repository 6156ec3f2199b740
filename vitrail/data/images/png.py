"""Whether the data of a PNG are complete. If a stream ends early but cleanly, Pillow leaves the missing rows black."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from vitrail.errors import DecodeError

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Colour type -> values per pixel."""
# (first column, first row, columns apart, rows apart) of each pass of an interlaced picture
PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
PIECE = 1 << 20


def is_interlaced(data: bytes) -> bool:
    """Return whether a PNG is interlaced."""
    return data[28] != 0


def bits(data: bytes) -> int:
    """Return the bits of a sample; 0 if the header is cut off."""
    return data[24] if len(data) > 24 else 0


def shape(data: bytes) -> tuple[int, ...]:
    """Return [H, W] of a grey PNG, [H, W, channels] of another one. Raises DecodeError if its header is cut off."""
    if len(data) < 29:
        raise DecodeError("the PNG is cut off within its header", reason="truncated")
    width, height, _, colour = struct.unpack_from(">IIBB", data, 16)
    channels = CHANNELS.get(colour, 1)
    return (height, width) if channels == 1 else (height, width, channels)


def is_whole(data: bytes) -> bool:
    """Return whether the compressed data of a PNG have as many bytes as its header needs. Memory is bounded."""
    wanted, stream = _bytes_needed(data), zlib.decompressobj()
    try:
        for chunk in _compressed(data):
            while chunk and wanted > 0:
                wanted -= len(stream.decompress(chunk, PIECE))
                chunk = stream.unconsumed_tail
    except zlib.error:  # the decoder has accepted what it needed
        return True
    return wanted <= 0


def _bytes_needed(data: bytes) -> int:
    """Return the length of the picture before compression: a filter byte and the pixels of each row."""
    width, height, bits, colour = struct.unpack_from(">IIBB", data, 16)
    bits *= CHANNELS.get(colour, 1)
    total = 0
    for left, top, across, down in PASSES if is_interlaced(data) else ((0, 0, 1, 1),):
        columns, rows = -((left - width) // across), -((top - height) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total


def _compressed(data: bytes) -> Iterator[bytes]:
    """Yield the contents of the IDAT chunks."""
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            yield data[at + 8 : at + 8 + length]
        at += 12 + length
