"""Where the tiles of an image lie. A tile is a rectangle of the image's own pixels, which becomes one network input.

Each row and each column of tiles begins `side - overlap` pixels after the one before. The last one is shifted inward,
so that every pixel lies in a tile, and all tiles have one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.errors import UsageError


class TileBox(NamedTuple):
    """A rectangle in an image, in pixels from its top left corner."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Tiling:
    """The size of tiles in pixels of the image, and by how many pixels neighbours overlap."""

    height: int
    width: int
    overlap: int = 0

    def boxes(self, height: int, width: int) -> Iterator[TileBox]:
        """Yield the tiles of a `height` x `width` image, row by row.

        Along a side that is shorter than a tile there is one tile, and its box ends where the image ends.
        """
        across = starts(width, self.width, self.overlap)
        for y in starts(height, self.height, self.overlap):
            for x in across:
                yield TileBox(x, y, min(self.width, width), min(self.height, height))


def tiling(width: int, overlap: int, image_size: tuple[int, int]) -> Tiling:
    """Return tiles that are `width` pixels wide, in the shape of a network's input `image_size` (height, width).

    Raises UsageError for an overlap that is not smaller than a tile.
    """
    height = max(1, round(width * image_size[0] / image_size[1]))
    if overlap >= min(height, width):
        raise UsageError(f"overlap is {overlap}; it must be below {min(height, width)}, the side of a tile")
    return Tiling(height, width, overlap)


def starts(length: int, tile: int, overlap: int) -> list[int]:
    """Return the first pixel of each tile along a side of `length` pixels."""
    last = max(length - tile, 0)
    return [*range(0, last, tile - overlap), last]
