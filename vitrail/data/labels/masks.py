"""Masks as labels: the class of each pixel of an image.

In memory an image has the path of its mask and the set of the classes in it, by which splits are stratified. The mask
is read when the image is.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.images.decode import class_values
from vitrail.data.labels.sets import LabelSets
from vitrail.data.settings import IGNORED
from vitrail.data.sources.folder import packed_names, read_file, unpacked_path
from vitrail.errors import DataError, DecodeError
from vitrail.plots import COLOURS


class Masks(LabelSets):
    """The masks of images, and the classes that each of them holds.

    files: StringDType [N], see `packed_names`. table: uint8 [256], the class of each value of a mask, or IGNORED.
    """

    what = "masks"

    def __init__(self, shown: LabelSets, files: np.ndarray, table: np.ndarray) -> None:
        super().__init__(shown.ends, shown.classes, shown.width)
        self.files, self.table = files, table

    @classmethod
    def of_files(cls, pixels: np.ndarray, files: list[Path], table: np.ndarray) -> Masks:
        """Return the masks in these files. `pixels` [N, classes] is not 0 for the classes in each of them."""
        return cls(LabelSets.of_marks(pixels > 0), packed_names(map(str, files)), table)

    def __getitem__(self, indices: np.ndarray | slice) -> Masks:
        return Masks(super().__getitem__(indices), self.files[indices], self.table)

    def renamed(self, table: np.ndarray, width: int) -> Masks:
        """See `LabelSets`."""
        to = np.append(table, np.full(256 - len(table), IGNORED)).astype(np.uint8)
        return Masks(super().renamed(table, width), self.files, to[self.table])

    def joined(self, others: list[LabelSets]) -> Masks:
        """See `LabelSets`."""
        files = [self.files, *(one.files for one in others if isinstance(one, Masks))]
        return Masks(super().joined(others), np.concatenate(files), self.table)

    def path(self, index: int) -> Path:
        """Return the file of a mask."""
        return unpacked_path(self.files[index])

    def mask(self, index: int) -> np.ndarray:
        """Return the class of each pixel, uint8 [H, W]; IGNORED where it does not count. Raises DecodeError."""
        path = self.path(index)
        try:
            found: np.ndarray = self.table[class_values(read_file(path))]
        except DecodeError as error:
            raise DecodeError(f"its mask {path}: {error}", reason=error.reason) from error
        return found


def mask_values(path: Path) -> np.ndarray:
    """Return the values of a mask, uint8 [H, W]. Raises DataError with the file if it cannot be read."""
    try:
        return class_values(read_file(path))
    except DecodeError as error:
        raise DataError(f"{path} cannot be used: {error}") from error


def class_colours(count: int) -> np.ndarray:
    """Return a colour for each class, and white for pixels that do not count, uint8 [256, 3].

    Up to seven classes have colours that everybody can tell apart. More have those of Pascal VOC: the bits of the
    class's number in turn are bits of red, green and blue.
    """
    table = np.full((256, 3), 255, dtype=np.uint8)
    if count <= len(COLOURS):
        table[:count] = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in COLOURS[:count]]
        return table
    numbers = np.arange(count)[:, None]
    bits = [(numbers >> 3 * level + np.arange(3) & 1) << 7 - level for level in range(3)]
    table[:count] = np.bitwise_or.reduce(bits)
    return table


def mask_png(mask: np.ndarray, classes: int) -> bytes:
    """Return a mask uint8 [H, W] as a PNG with a palette, whose indices are the numbers of the classes."""
    picture, file = Image.frombytes("P", mask.shape[::-1], np.ascontiguousarray(mask)), io.BytesIO()
    picture.putpalette(class_colours(classes).tobytes())
    picture.save(file, "PNG")
    return file.getvalue()
