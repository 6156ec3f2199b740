"""The tiles of images as a network's input, one after another, in threads that work ahead.

A tile is prepared as an image is, except for resizing and cropping: it is resized to the network's size without a crop,
and stays as it is if it has this size.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.data.bands.pixels import Pixels, pixels_of
from vitrail.data.images.geometry import Compose, Op, Squash
from vitrail.data.loading.prefetch import ThreadPool, ordered, stuck, threads
from vitrail.data.settings import Preprocess
from vitrail.data.tiles.grid import TileBox, Tiling
from vitrail.data.tiles.image import TiledImage, open_image, read_tile
from vitrail.errors import DecodeError

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


def tile_transform(preprocess: Preprocess) -> Op:
    """Return the transform of tiles; its result has exactly the size `preprocess.image_size`."""
    squash = Squash(preprocess.image_size, preprocess.interpolation)
    return Compose((squash,), pixels_of(preprocess.bands))


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
    opened = partial(_opened, tiling=tiling, pixels=pixels, given=given)
    for path, image in ordered(pool, opened, files, ahead=2, hung=lambda path: stuck(str(path))):
        if isinstance(image, DecodeError):
            yield Tile(path, None, image)
            continue
        for box in tiling.boxes(image.height, image.width):
            yield Tile(path, box, image)
        del image  # before the next one is waited for


def _opened(
    path: Path, tiling: Tiling, pixels: Pixels, given: Collection[Path]
) -> tuple[Path, TiledImage | DecodeError]:
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
