"""`predict --tiles` and `embed --tiles`: what the flags mean, and maps of the predictions."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import DecodeError, UsageError
from vitrail.files import refuse_other_files
from vitrail.version import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.data.images.tiles import TileBox, Tiling
    from vitrail.data.settings import Preprocess
    from vitrail.tasks.prediction import Prediction, Row

log = logging.getLogger("vitrail")
TABLE = "tiles.csv"
OURS = re.compile(rf"\..*|{re.escape(TABLE)}.*|.*\.map(-\d+)?\.png")
"""Names of the files in a folder of results."""


def check_tiles(tiles: int | None, overlap: int, **others: Any) -> None:
    """Raise UsageError for an overlap without tiles or as large as them, and for other flags that tiles exclude."""
    if tiles is None:
        if overlap:
            raise UsageError(f"--overlap {overlap} is the overlap of tiles: give --tiles SIDE, too")
        return
    if overlap >= tiles:
        raise UsageError(f"overlap is {overlap}; it must be below {tiles}, the side of a tile")
    if wrong := [f"--{name}" for name, given in others.items() if given]:
        raise UsageError(f"{wrong[0]} is not valid with --tiles: remove one of them")


def check_folder(out: str | Path, images: Iterable[str | Path]) -> Path:
    """Return the folder for results of tiles. Raises DataError within the images, UsageError for other files in it."""
    from vitrail.data.cache import refuse_within

    refuse_within(out, *images)
    refuse_other_files(Path(out), lambda name: OURS.fullmatch(name) is not None, UsageError)
    need("matplotlib")
    return Path(out)


def files_of_rows(images: Iterable[str | Path], tiling: Tiling | None, preprocess: Preprocess) -> Iterator[Path]:
    """Yield the file of each row of the predictions for `images`, in order."""
    from vitrail.data.images.pixels import pixels_of
    from vitrail.data.images.tiles import tiles_of
    from vitrail.data.sources.files import find_images

    files = find_images(images)
    if tiling is None:
        return files
    return (tile.path for tile in tiles_of(files, tiling, pixels_of(preprocess.bands)))


class TileMaps:
    """A map of the predictions for each image, drawn into a folder."""

    def __init__(self, images: tuple[str | Path, ...], tiling: Tiling, preprocess: Preprocess) -> None:
        self._images, self._tiling, self._preprocess = images, tiling, preprocess
        self._found: dict[str, dict[TileBox, Any]] = {}

    def seen(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows, and remember their predictions."""
        for row in rows:
            box = getattr(row, "box", None)
            if box is not None:
                self._found.setdefault(row.path, {})[box] = _answer(row)  # type: ignore[arg-type]
            yield row

    def draw(self, folder: Path) -> list[str]:
        """Draw the map of each image, and return the files. An image that cannot be read again is logged."""
        from vitrail.data.images.pixels import pixels_of
        from vitrail.data.images.tiles import open_image, reduced
        from vitrail.data.sources.files import find_images
        from vitrail.inspection.figures.page import Folder

        pixels, files, names = pixels_of(self._preprocess.bands), Folder(folder), set[str]()
        written: list[str] = []
        for path in find_images(self._images):
            found = self._found.get(str(path))
            if not found:
                continue
            name = path.stem if path.stem not in names else f"{path.stem}-{len(names) + 1}"
            names.add(name)
            try:
                image = open_image(path, pixels, self._tiling.height)
                picture = reduced(image, pixels)
            except DecodeError as error:
                log.warning("no map of %s: %s", path, error)
                continue
            for ending, figure in self._figures(path.name, picture, (image.height, image.width), found):
                written += map(str, files.figure(f"{name}.{ending}", figure))
        return written

    def _figures(
        self, name: str, picture: Any, size: tuple[int, int], found: dict[TileBox, Any]
    ) -> Iterator[tuple[str, Figure]]:
        from vitrail.inspection.figures.class_maps import draw_classes, draw_numbers

        tiling = self._tiling
        title = f"{name}: tiles of {tiling.width} x {tiling.height} pixels, overlap {tiling.overlap}"
        first = next(iter(found.values()))
        if not isinstance(first, dict):
            yield "map", draw_classes(title, picture, size, tiling, found)
            return
        for number, target in enumerate(first, start=1):
            values = {box: numbers[target] for box, numbers in found.items()}
            yield f"map-{number}", draw_numbers(title, picture, size, tiling, target, values)


def _answer(row: Prediction) -> str | dict[str, float] | None:
    """Return the class of a tile, None if it has none, or its numbers. Raises UsageError for several answers."""
    if row.answers is not None:
        raise UsageError("a folder as --out gets maps of one answer, and this network gives several: --out FILE.csv")
    if row.numbers is not None:
        return row.numbers
    if row.labels is not None:
        return row.labels[0][0] if row.labels else None
    return None if row.rejected else row.classes[0]
