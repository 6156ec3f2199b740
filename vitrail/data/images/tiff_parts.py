"""Read parts of a TIFF file without decoding the rest, in memory that does not depend on the size of the image.

A TIFF stores its image as pieces, strips of rows or tiles, each of which can be decoded alone. The pieces of a part are
copied, still compressed, into a small TIFF with the tags of the large one, and that is decoded as any other TIFF is. So
a part has exactly the pixels that it has in the whole image, and the pixel cap holds for every part.

Blocks of neighbouring pieces are decoded at once and kept while the tiles of a row need them.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitrail.data.images import tiff
from vitrail.data.images.decode import MAX_PIXELS, MAX_SIDE
from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels
from vitrail.data.sources.folder import MAX_BYTES
from vitrail.errors import DecodeError
from vitrail.files import open_regular, read_at, regular_descriptor

if TYPE_CHECKING:
    from tifffile import TiffPage

BLOCK = 2**23
"""Number of bytes of values that are decoded at once, unless a single piece has more."""
WIDTH, LENGTH, BITS, ROWS_PER_STRIP = 256, 257, 258, 278  # tags
STRIP_OFFSETS, STRIP_COUNTS, TILE_OFFSETS, TILE_COUNTS = 273, 279, 324, 325
KEPT = frozenset((258, 259, 262, 266, 277, 284, 292, 293, 317, 320, 322, 323, 332, 338, 339, 340, 341, 347, 529, 530,
                  531, 532))  # fmt: skip
"""Tags that say how values are stored."""
LONGEST_TAG = 2**20
"""Maximum bytes of such a tag; a palette has 0.4 MB."""
LONG, LONG8 = 4, 16  # types of tags; classic TIFF lacks the last one
UNCOMPRESSED, YCBCR, FLOAT = 1, 6, 3
CLAIMED = 10
"""Largest ratio of the bytes that an image claims to have to those of its file: a header may claim anything."""
ALL_PIECES = ("unsupported", "wrong-bands", "wrong-depth")
"""Reasons that hold for every piece of an image if they hold for the first one."""


class NotInParts(Exception):
    """An image can only be read as a whole; the message says why."""


class Entry(NamedTuple):
    """A tag with its value."""

    code: int
    kind: int
    number: int
    """Number of values of this kind."""
    value: bytes


@dataclass(frozen=True)
class StoredPage:
    """How a page of a TIFF is stored: the size of its pieces, and where each of them lies in the file."""

    height: int
    width: int
    piece: tuple[int, int]
    """Height and width of a piece in pixels."""
    planes: int
    """1, or the number of bands if each of them has pieces of its own."""
    tags: list[Entry]
    tiled: bool
    places: list[tuple[int, int]]
    """Offset and number of bytes of each piece: first those of the first plane, row by row."""
    rows: tuple[int, int] | None = None
    """For strips without compression: bytes of a row, and number of rows of a strip. Then a piece is a single row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Height and width of the page and of its pieces in pixels."""
        return self.height, self.width, *self.piece

    @property
    def bytes(self) -> int:
        """Number of bytes that the page claims to have in the file."""
        if self.rows is None:
            return sum(count for _, count in self.places)
        return self.rows[0] * self.height * self.planes

    def pieces(self, top: int, left: int, bottom: int, right: int) -> list[tuple[int, int]]:
        """Return offset and number of bytes of the pieces from (top, left) to (bottom, right), counted in pieces."""
        down, across = (-(-side // part) for side, part in zip((self.height, self.width), self.piece, strict=True))
        found = []
        for plane in range(self.planes):
            for row in range(top, min(bottom, down)):
                if self.rows is None:
                    first = (plane * down + row) * across
                    found += self.places[first + left : first + min(right, across)]
                else:
                    strip, within = divmod(row, self.rows[1])
                    strips = -(-self.height // self.rows[1])
                    found.append((self.places[plane * strips + strip][0] + within * self.rows[0], self.rows[0]))
        return found


class TiffParts:
    """A TIFF file of any size whose parts are read. Threads may share it.

    tile_height: Number of rows that a part has at most; so many rows of decoded blocks are kept. Raises DecodeError for
    a file that cannot be read, and NotInParts for one that must be read as a whole.
    """

    def __init__(self, path: Path, pixels: Pixels, tile_height: int) -> None:
        self._path, self._pixels = path, pixels
        try:
            # tifffile needs a file with a name
            with open(path, "rb", opener=lambda name, _: regular_descriptor(name)) as file:
                self._order, self._pages, size = _stored(file, pixels is EIGHT_BIT_RGB)
        except OSError as error:
            raise DecodeError(f"{path}: {error.strerror}", reason="unreadable") from error
        first = self._pages[0]
        self.height, self.width = first.height, first.width
        tall, wide = first.piece
        across = max(1, min(-(-self.width // wide), MAX_SIDE // wide, BLOCK // (tall * wide * size)))
        down = max(1, BLOCK // (tall * wide * across * size))
        if min(tall, self.height) * min(wide, self.width) > MAX_PIXELS:
            raise NotInParts(f"the file is stored in strips of {tall:,} x {wide:,} pixels")
        self._block_pieces = (down, across)
        self._block = (down * tall, across * wide)
        blocks_across = -(-self.width // self._block[1])
        self._kept = blocks_across * (-(-tile_height // self._block[0]) + 1)
        self._decoded: OrderedDict[tuple[int, int], np.ndarray | DecodeError] = OrderedDict()
        self._lock = threading.Lock()
        try:
            self._decode(0, 0, 1, 1)
        except DecodeError as error:
            if error.reason in ALL_PIECES:
                raise

    def values(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """Return a part as [height, width, channels], not normalised. Raises DecodeError if it is damaged."""
        part: np.ndarray | None = None
        tall, wide = self._block
        for row in range(top // tall, -(-(top + height) // tall)):
            for column in range(left // wide, -(-(left + width) // wide)):
                block = self._read_block(row, column)
                if isinstance(block, DecodeError):  # the damage may lie beside this part
                    return self._undamaged(top, left, height, width)
                if part is None:
                    part = np.empty((height, width, block.shape[2]), block.dtype)
                y, x = max(top, row * tall), max(left, column * wide)
                bottom, right = top + height - row * tall, left + width - column * wide
                found = block[y - row * tall : bottom, x - column * wide : right]
                part[y - top : y - top + found.shape[0], x - left : x - left + found.shape[1]] = found
        assert part is not None
        return part

    def _undamaged(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """Return a part from its own pieces alone."""
        tall, wide = self._pages[0].piece
        row, column = top // tall, left // wide
        values = self._decode(row, column, -(-(top + height) // tall), -(-(left + width) // wide))
        return values[top - row * tall :, left - column * wide :][:height, :width]

    def _read_block(self, row: int, column: int) -> np.ndarray | DecodeError:
        with self._lock:
            found = self._decoded.pop((row, column), None)
            if found is None:
                while len(self._decoded) >= self._kept:
                    self._decoded.popitem(last=False)
                down, across = self._block_pieces
                try:
                    found = self._decode(row * down, column * across, (row + 1) * down, (column + 1) * across)
                except DecodeError as error:
                    found = error
            self._decoded[row, column] = found
            return found

    def _decode(self, top: int, left: int, bottom: int, right: int) -> np.ndarray:
        """Decode the pieces from (top, left) to (bottom, right), counted in pieces. Raises DecodeError."""
        tall, wide = self._pages[0].piece
        height = min(bottom * tall, self.height) - top * tall
        width = min(right * wide, self.width) - left * wide
        try:
            with open_regular(self._path) as file:
                pages = [(page, _read(file.fileno(), page.pieces(top, left, bottom, right))) for page in self._pages]
        except OSError as error:
            raise DecodeError(f"{self._path}: {error.strerror}", reason="unreadable") from error
        values = self._pixels.values(small_tiff(self._order, height, width, pages))
        if values.shape[:2] != (height, width):
            raise DecodeError(f"a part of {height} x {width} pixels became {values.shape[:2]}", reason="corrupt")
        return values


def small_tiff(order: str, height: int, width: int, pages: Sequence[tuple[StoredPage, list[bytes]]]) -> bytes:
    """Return a TIFF of `height` x `width` pixels that consists of some pieces of each page of another TIFF.

    order: "<" or ">", the order of bytes.
    """
    parts = [struct.pack(f"{order}2sH", b"II" if order == "<" else b"MM", 42)]
    size, link = 8, 0  # bytes until now, and the part that ends in the place of the next directory
    for page, pieces in pages:
        offsets = []
        for piece in pieces:
            offsets.append(size)
            parts.append(piece)
            size += len(piece)
        codes = (TILE_OFFSETS, TILE_COUNTS) if page.tiled else (STRIP_OFFSETS, STRIP_COUNTS)
        whole = {WIDTH: [width], LENGTH: [height], codes[0]: offsets, codes[1]: [len(piece) for piece in pieces]}
        if not page.tiled:
            whole[ROWS_PER_STRIP] = [page.piece[0]]
        made = [
            Entry(code, LONG, len(values), struct.pack(f"{order}{len(values)}I", *values))
            for code, values in whole.items()
        ]
        entries = sorted([*page.tags, *made])
        directory = struct.pack(f"{order}H", len(entries))
        for entry in entries:
            place = entry.value.ljust(4, b"\0")
            if len(place) > 4:
                parts.append(place + b"\0" * (len(place) % 2))
                place = struct.pack(f"{order}I", size)
                size += len(parts[-1])
            directory += struct.pack(f"{order}HHI", *entry[:3]) + place
        parts[link] += struct.pack(f"{order}I", size)
        parts.append(directory)
        link, size = len(parts) - 1, size + len(directory) + 4
    parts[link] += struct.pack(f"{order}I", 0)
    return b"".join(parts)


def _read(descriptor: int, places: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return pieces of a file. Raises DecodeError if the file ends before them, OSError if it cannot be read."""
    if (size := sum(count for _, count in places)) > MAX_BYTES:
        raise DecodeError(f"{size:,} bytes in one part of the image, more than {MAX_BYTES:,}", reason="too-large")
    if max(offset + count for offset, count in places) > os.fstat(descriptor).st_size:
        raise DecodeError("the TIFF is cut off: it ends before this part of the image", reason="truncated")
    return [read_at(descriptor, count, offset) for offset, count in places]


def _stored(file: BufferedReader, picture: bool) -> tuple[str, list[StoredPage], int]:
    """Return the order of bytes, the pages that are needed, and the number of bytes of a pixel in memory.

    picture: The first page alone becomes 8-bit RGB, as of any other file. Raises NotInParts.
    """
    try:
        with tiff.opened(file) as pages:
            pages = pages[:1] if picture else pages
            first = pages[0]
            found = [_page(file, page) for page in pages]
            why = {
                "its first page is not the full image": first.index != 0,
                "floating-point numbers are scaled by the largest one of the image": picture
                and first.sampleformat == FLOAT,
                "its orientation says that it is stored turned": int(first.tags.valueof(tiff.ORIENTATION, 1)) != 1,
                "most of its data are missing": sum(page.bytes for page in found)
                > CLAIMED * os.fstat(file.fileno()).st_size,
                "its pages are stored in different ways": len({page.shape for page in found}) > 1,
            }
            bands = sum(int(page.samplesperpixel) for page in pages)
            order, size = first.parent.byteorder, max(bands, 3) * np.dtype(first.dtype).itemsize
    except DecodeError as error:  # Pillow may read it, or gives the reason
        raise NotInParts(str(error)) from error
    for reason, holds in why.items():
        if holds:
            raise NotInParts(reason)
    return order, found, size


def _page(file: BufferedReader, page: TiffPage) -> StoredPage:
    height, width = int(page.imagelength), int(page.imagewidth)
    tiled = bool(page.is_tiled)
    planes = int(page.samplesperpixel) if page.planarconfig == 2 else 1
    strip = min(int(page.rowsperstrip) or height, height)
    piece = (int(page.tilelength), int(page.tilewidth)) if tiled else (strip, width)
    places = list(zip(map(int, page.dataoffsets), map(int, page.databytecounts), strict=True))
    rows = None
    if not tiled and page.compression == UNCOMPRESSED and page.photometric != YCBCR:
        bits = page.tags.valueof(BITS, 1)
        bits = sum(bits) if isinstance(bits, tuple) else bits * (int(page.samplesperpixel))
        rows, piece = (-(-width * bits // planes // 8), strip), (1, width)
    down, across = -(-height // (strip if rows else piece[0])), -(-width // piece[1])
    if min(height, width, *piece) < 1 or len(places) != planes * down * across:
        raise DecodeError(
            f"corrupt TIFF file: {len(places):,} pieces of an image of {height} x {width}", reason="corrupt"
        )
    tags = [_entry(file, tag, page.parent.byteorder) for tag in page.tags if tag.code in KEPT]
    return StoredPage(height, width, piece, planes, tags, tiled, places, rows)


def _entry(file: BufferedReader, tag: Any, order: str) -> Entry:
    """Return a tag as classic TIFF stores it."""
    if tag.valuebytecount > LONGEST_TAG:
        raise DecodeError(f"corrupt TIFF file: tag {tag.code} has {tag.valuebytecount:,} bytes", reason="corrupt")
    value = read_at(file.fileno(), tag.valuebytecount, tag.valueoffset)
    if tag.dtype == LONG8:
        numbers = struct.unpack(f"{order}{tag.count}Q", value)
        return Entry(tag.code, LONG, tag.count, struct.pack(f"{order}{tag.count}I", *numbers))
    return Entry(tag.code, int(tag.dtype), tag.count, value)
