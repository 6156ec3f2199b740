"""Open an image for reading its tiles: a TIFF file in parts, any other image whole and below the pixel cap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vitrail.data.bands.pixels import Banded, Pixels
from vitrail.data.images.decode import DICOM, format_of
from vitrail.data.sources.folder import read_file, read_pipe
from vitrail.data.tiles.grid import TileBox, Tiling
from vitrail.data.tiles.tiff_parts import NotInParts, TiffParts
from vitrail.errors import DecodeError
from vitrail.files import open_regular


class TiledImage(Protocol):
    """An image of which parts are read."""

    @property
    def height(self) -> int:
        """Number of rows."""

    @property
    def width(self) -> int:
        """Number of columns."""

    def values(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """Return a part as [height, width, channels], not normalised. Raises DecodeError if it is damaged."""


@dataclass(frozen=True)
class DecodedImage:
    """An image in memory, [height, width, channels]."""

    image: np.ndarray

    @property
    def height(self) -> int:
        """See TiledImage."""
        return int(self.image.shape[0])

    @property
    def width(self) -> int:
        """See TiledImage."""
        return int(self.image.shape[1])

    def values(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """See TiledImage."""
        return self.image[top : top + height, left : left + width]


def open_image(path: Path, pixels: Pixels, tile_height: int, *, pipe: bool = False) -> TiledImage:
    """Return an image whose tiles have `tile_height` rows. `pipe` says that it may be read only once.

    Raises DecodeError; for an image of too many pixels it says how to convert the file.
    """
    if pipe:
        return DecodedImage(pixels.values(read_pipe(path)))
    why, kind = "only TIFF files are read in parts", _kind(path)
    if kind == "TIFF":
        try:
            return TiffParts(path, pixels, tile_height)
        except NotInParts as reason:
            why = str(reason)
    try:
        return DecodedImage(pixels.values(read_file(path)))
    except DecodeError as error:
        if error.reason not in ("too-many-pixels", "too-large"):
            raise
        convert = _from_dicom(path, pixels) if kind == DICOM else _by_libvips(path)
        message = f"{error}. It cannot be read in parts: {why}. Convert it to a TIFF of tiles: {convert}"
        raise DecodeError(message, reason=error.reason) from error


def _by_libvips(path: Path) -> str:
    """Return the command that writes an ordinary image as a TIFF of tiles."""
    return f"vips autorot {path} '{path.with_suffix('')}-tiled.tif[tile,compression=deflate,bigtiff]'"


def _from_dicom(path: Path, pixels: Pixels) -> str:
    """Return the command that writes the values that vitrail reads from a DICOM file, which libvips does not read."""
    values = "pixels.pixel_array(f)"
    if isinstance(pixels, Banded) and pixels.bands.bits == "32f":
        values = f"pixels.apply_modality_lut({values}, dcmread(f)).astype('float32')"
    target = f"{path.with_suffix('')}-tiled.tif"
    return (
        f'python -c "import tifffile; from pydicom import dcmread, pixels; f = {str(path)!r}; '
        f'tifffile.imwrite({target!r}, {values}, tile=(256, 256), bigtiff=True)"'
    )


def _kind(path: Path) -> str:
    """Return the name of the file's format; "" if it has none, or cannot be read: reading it whole gives the reason."""
    try:
        with open_regular(path) as file:
            return format_of(file.read(512)).name
    except (OSError, DecodeError):
        return ""


def read_tile(image: TiledImage, box: TileBox, tiling: Tiling) -> np.ndarray:
    """Return a tile as [height, width, channels], not normalised.

    Beyond the end of an image that is smaller than a tile, its last pixels are repeated. Raises DecodeError.
    """
    values = image.values(box.y, box.x, box.height, box.width)
    missing = (tiling.height - box.height, tiling.width - box.width)
    return np.pad(values, [(0, missing[0]), (0, missing[1]), (0, 0)], mode="edge") if any(missing) else values
