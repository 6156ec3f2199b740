"""A small picture of an image of any size, whose parts are read one after another."""

from __future__ import annotations

import numpy as np

from vitrail.data.bands.pixels import Pixels
from vitrail.data.tiles.image import TiledImage
from vitrail.errors import DecodeError

LONGEST = 1200
"""Maximum length of the picture's longer side."""
PART = 2**22
"""Number of pixels that are read at once."""
MISSING = 235
"""Grey level of parts that cannot be read."""
SMALLEST = 16
"""Side of a part, in pixels of the picture, that is left out as a whole if it is damaged."""


def reduced(image: TiledImage, pixels: Pixels) -> np.ndarray:
    """Return a picture of an image, uint8 [h, w, 3], whose pixels are means of squares of the image's own pixels."""
    factor = -(-max(image.height, image.width) // LONGEST)
    down, across = min(factor, image.height), min(factor, image.width)
    picture = np.full((image.height // down, image.width // across, 3), MISSING, np.uint8)

    def draw(top: int, left: int, bottom: int, right: int) -> None:
        height, width = bottom - top, right - left
        try:
            values = image.values(top * down, left * across, height * down, width * across)
            means = values.reshape(height, down, width, across, -1).mean(axis=(1, 3), dtype=np.float32)
            if not np.issubdtype(values.dtype, np.floating):
                means = np.rint(means)
            picture[top:bottom, left:right] = pixels.shown(pixels.read(means.astype(values.dtype)))
        except DecodeError:
            if max(height, width) <= SMALLEST:
                return
            if height >= width:
                halves = (top, left, top + height // 2, right), (top + height // 2, left, bottom, right)
            else:
                halves = (top, left, bottom, left + width // 2), (top, left + width // 2, bottom, right)
            for half in halves:
                draw(*half)

    rows, columns = picture.shape[:2]
    step = max(1, PART // (down * columns * across))
    for top in range(0, rows, step):
        draw(top, 0, min(top + step, rows), columns)
    return picture
