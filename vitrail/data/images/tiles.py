"""The tiles of images as a network's input, one after another, in threads that work ahead.

A tile is a rectangle of the image's own pixels, which becomes one network input. Each row and each column of tiles
begins `side - overlap` pixels after the one before. The last one is shifted inward, so that every pixel lies in a tile,
and all tiles have one size.

A TIFF file is read in parts, any other image whole and below the pixel cap. A tile is prepared as an image is, except
for resizing and cropping: it is resized to the network's size without a crop, and stays as it is if it has this size.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vitrail.data.images.decode import DICOM, format_of
from vitrail.data.images.pixels import Banded, Pixels
from vitrail.data.images.tiff_parts import NotInParts, TiffParts
from vitrail.data.loading.prefetch import ThreadPool, ordered, stuck, threads
from vitrail.data.sources.folder import read_file, read_pipe
from vitrail.errors import DecodeError, UsageError
from vitrail.files import open_regular

if TYPE_CHECKING:
    from vitrail.data.images.geometry import Op


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


class TiledImage(Protocol):
    """An image of which parts are read."""

    height: int
    width: int

    def values(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """Return a part as [height, width, channels], not normalised. Raises DecodeError if it is damaged."""


class DecodedImage:
    """An image in memory, [height, width, channels]."""

    def __init__(self, image: np.ndarray) -> None:
        self.image = image
        self.height, self.width = image.shape[:2]

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
        tiled = f"{path.with_suffix('')}-tiled.tif"
        convert = f"vips autorot {path} '{tiled}[tile,compression=deflate,bigtiff]'"
        if kind == DICOM:
            convert = _from_dicom(path, pixels, tiled)
        message = f"{error}. It cannot be read in parts: {why}. Convert it to a TIFF of tiles: {convert}"
        raise DecodeError(message, reason=error.reason) from error


def _from_dicom(path: Path, pixels: Pixels, target: str) -> str:
    """Return the command that writes the values that vitrail reads from a DICOM file, which libvips does not read."""
    values = "pixels.pixel_array(f)"
    if isinstance(pixels, Banded) and pixels.bands.bits == "32f":
        values = f"pixels.apply_modality_lut({values}, dcmread(f)).astype('float32')"
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


log = logging.getLogger("vitrail")


class Tile(NamedTuple):
    """A tile that can be read, or an image that cannot."""

    path: Path
    box: TileBox | None
    """None for an image that cannot be read."""
    image: TiledImage | DecodeError


class PreparedTile(NamedTuple):
    """A tile as the network's input [H, W, channels], or the reason why it cannot be read."""

    path: Path
    box: TileBox | None
    image: np.ndarray | DecodeError


def tiles_of(
    files: Iterable[Path],
    tiling: Tiling,
    pixels: Pixels,
    *,
    given: Collection[Path] = (),
    pool: ThreadPool | None = None,
) -> Iterator[Tile]:
    """Yield the tiles of images, in order. An image that cannot be read is one tile with the reason.

    given: Files that the user named; only a pipe among these is read.
    """

    def opened(path: Path) -> tuple[Path, TiledImage | DecodeError]:
        try:
            image = open_image(path, pixels, tiling.height, pipe=path in given and path.is_fifo())
        except DecodeError as error:
            return path, error
        if image.height < tiling.height or image.width < tiling.width:
            log.warning(
                "%s has %d x %d pixels, and a tile %d x %d: its last pixels are repeated up to the end of the tile",
                path, image.width, image.height, tiling.width, tiling.height,
            )  # fmt: skip
        return path, image

    for path, image in ordered(pool, opened, files, ahead=2, hung=lambda path: stuck(str(path))):
        if isinstance(image, DecodeError):
            yield Tile(path, None, image)
            continue
        for box in tiling.boxes(image.height, image.width):
            yield Tile(path, box, image)
        del image  # before the next one is waited for


def prepared_tiles(
    files: Iterable[Path],
    tiling: Tiling,
    transform: Op,
    *,
    ahead: int,
    workers: int = 0,
    given: Collection[Path] = (),
    skip: int = 0,
) -> Generator[PreparedTile]:
    """Yield the tiles of images as the network's input, from number `skip` on.

    `workers` threads read them, `ahead` tiles at most. Raises DataError if a read takes longer than
    `prefetch.TIMEOUT`. `given` is that of `tiles_of`.
    """
    prepare = partial(_prepared, tiling=tiling, transform=transform)
    with threads(workers) as pool:
        tiles = islice(tiles_of(files, tiling, transform.pixels, given=given, pool=pool), skip, None)
        yield from ordered(pool, prepare, tiles, ahead=ahead, hung=lambda tile: stuck(str(tile.path)))


def _prepared(tile: Tile, tiling: Tiling, transform: Op) -> PreparedTile:
    if tile.box is None or isinstance(tile.image, DecodeError):
        assert isinstance(tile.image, DecodeError)
        return PreparedTile(tile.path, None, tile.image)
    try:
        values = transform.pixels.read(read_tile(tile.image, tile.box, tiling))
    except DecodeError as error:
        where = f"the tile at x {tile.box.x}, y {tile.box.y}: {error}"
        return PreparedTile(tile.path, tile.box, DecodeError(where, reason=error.reason))
    return PreparedTile(tile.path, tile.box, transform(values, np.random.default_rng(0)))  # nothing is random


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
