"""Masks as labels: the class of each pixel of an image.

In memory an image has the path of its mask and the set of the classes in it, by which splits are stratified. The mask
is read when the image is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitrail.data.images.decode import class_values
from vitrail.data.labels.sets import LabelSets
from vitrail.data.settings import IGNORED
from vitrail.data.sources.folder import packed_names, read_file, unpacked_path
from vitrail.errors import DataError, DecodeError


class Masks(LabelSets):
    """The masks of images, and the classes that each of them holds.

    files: StringDType [N], see `packed_names`. table: uint8 [256], the class of each value of a mask, or IGNORED.
    """

    what = "masks"

    def __init__(self, shown: LabelSets, files: np.ndarray, table: np.ndarray) -> None:
        super().__init__(shown.ends, shown.classes, shown.width)
        self.files, self.table = files, table

    @classmethod
    def of(cls, pixels: np.ndarray, files: list[Path], table: np.ndarray) -> Masks:
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
