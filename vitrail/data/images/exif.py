"""Which way up a picture is: the one EXIF tag that changes pixels."""

from __future__ import annotations

import struct

import numpy as np

ORIENTATION = 0x0112
# TIFF field types an orientation is written with in the wild: BYTE, SHORT, LONG
INTEGER_FORMATS = {1: "B", 3: "H", 4: "I"}


def orientation(exif: bytes) -> int:
    """Return the EXIF orientation 1..8 of an EXIF block, with or without its "Exif" prefix.

    Read here rather than by a library because it runs for every image and must never warn or raise: a block
    that is absent, cut or malformed means 1, as it stands. Only the first directory counts, as in browsers.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == ORIENTATION:
                (value,) = struct.unpack_from(order + INTEGER_FORMATS.get(kind, "H"), tiff, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Turn an image [H, W, C] stored with EXIF `orientation` the way it is to be seen; contiguous.

    Orientations 5 to 8 exchange height and width.
    """
    if orientation >= 5:
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)
