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


def reduced(image: TiledImage, pixels: Pixels) -> np.ndarray:
    """Return a picture of an image, uint8 [h, w, 3], whose pixels are means of squares of the image's own pixels."""
    factor = -(-max(image.height, image.width) // LONGEST)
    down, across = min(factor, image.height), min(factor, image.width)
    rows, columns = image.height // down, image.width // across
    step = max(1, PART // (down * columns * across))
    picture = np.full((rows, columns, 3), MISSING, np.uint8)
    for top in range(0, rows, step):
        count = min(step, rows - top)
        try:
            values = image.values(top * down, 0, count * down, columns * across)
            means = values.reshape(count, down, columns, across, -1).mean(axis=(1, 3), dtype=np.float32)
            if not np.issubdtype(values.dtype, np.floating):
                means = np.rint(means)
            picture[top : top + count] = pixels.shown(pixels.read(means.astype(values.dtype)))
        except DecodeError:
            continue  # the parts that can be read are shown
    return picture
