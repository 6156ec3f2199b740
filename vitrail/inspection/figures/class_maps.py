"""Figures of what each tile of a large image got, a class or a number, and of the classes of pixels (segmentation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from PIL import Image

from vitrail.data.images.tiles import TileBox, Tiling, starts
from vitrail.data.labels.masks import class_colours
from vitrail.data.settings import IGNORED
from vitrail.inspection.figures.page import picture_panels, short_name, show, styled, with_title
from vitrail.plots import COLOURS

NAMED = 6
"""Maximum number of classes with a colour of their own."""
OTHER = "#bbbbbb"
"""Colour of all further classes."""
UNREAD = 0
"""Grey level of a tile that could not be read."""
TINT = 0.55
"""Weight of a class's colour against the grey picture."""


@styled
def draw_classes(
    title: str, picture: np.ndarray, size: tuple[int, int], tiling: Tiling, tiles: dict[TileBox, str | None]
) -> Figure:
    """Draw a picture of an image, and beside it a map: each tile has the colour of its class.

    picture: uint8 [h, w, 3], the image of `size` (height, width) at any scale. tiles: tile -> class; None for a tile
    without a class, which gets no colour. A tile that is missing could not be read. Where tiles overlap, a pixel has
    the colour of the tile with the nearest centre.
    """
    counts = Counter(name for name in tiles.values() if name is not None)
    named = [name for name, _ in counts.most_common(NAMED)]
    colour = {name: to_rgb(COLOURS[number]) for number, name in enumerate(named)}
    grey = np.asarray(Image.fromarray(picture).convert("L"), np.float32)[:, :, None].repeat(3, 2)
    shown = 0.5 * grey + 127
    cells = _cells(tiling, size, picture.shape[:2])
    for box, cell in cells.items():
        name = tiles.get(box)
        if box not in tiles:
            shown[cell] = UNREAD
        elif name is not None:
            shown[cell] = (1 - TINT) * grey[cell] + TINT * 255 * np.array(colour.get(name, to_rgb(OTHER)), np.float32)
    figure, axes = _panels(picture, size)
    _show(axes[1], shown.astype(np.uint8), size, "class of each tile")
    further = sum(count for name, count in counts.items() if name not in colour)
    rows: list[tuple[Any, str, int]] = [(colour[name], short_name(name, 40), counts[name]) for name in named]
    rows += [(OTHER, f"{len(counts) - len(named)} further classes", further)]
    rows += [
        ("white", "no class", len(tiles) - counts.total()),
        ("black", "could not be read", len(cells) - len(tiles)),
    ]
    legend = []
    for look, name, count in (row for row in rows if row[2]):
        label = f"{name} ({count:,} tile{'s' * (count != 1)}, {count / len(cells):.0%})"
        legend.append(Patch(facecolor=look, edgecolor="#888888", linewidth=0.5, label=label))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(3, len(legend)), frameon=False, fontsize=7)
    return with_title(figure, title)


@styled
def draw_numbers(
    title: str, picture: np.ndarray, size: tuple[int, int], tiling: Tiling, name: str, tiles: dict[TileBox, float]
) -> Figure:
    """Draw a picture of an image, and beside it a map of the number `name` of each tile, as `draw_classes` does."""
    values = np.full(picture.shape[:2], np.nan)
    for box, cell in _cells(tiling, size, picture.shape[:2]).items():
        values[cell] = tiles.get(box, np.nan)
    figure, axes = _panels(picture, size)
    drawn = _show(axes[1], values, size, f"{short_name(name, 40)} of each tile")
    figure.colorbar(drawn, ax=list(axes), orientation="horizontal", shrink=0.4, aspect=40, label=short_name(name, 40))
    return with_title(figure, title)


def _panels(picture: np.ndarray, size: tuple[int, int]) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with two panels, of which the first shows the picture: side by side, or if wide, stacked."""
    wide = size[1] > 1.6 * size[0]
    across, shape = (7.6, size[0] / size[1]) if wide else (3.8, min(size[0] / size[1], 2.5))
    figure = Figure(
        figsize=(8.8, max(2 * across * shape, 1.6) + 1.6) if wide else (8.8, across * shape + 1.3), layout="constrained"
    )
    axes = figure.subplots(2, 1) if wide else figure.subplots(1, 2)
    _show(axes[0], picture, size, f"{size[1]:,} x {size[0]:,} pixels")
    return figure, axes


def _show(axes: Axes, picture: np.ndarray, size: tuple[int, int], title: str) -> AxesImage:
    """Draw a picture with the pixels of the image along its sides, as they stand in the table."""
    drawn = axes.imshow(picture, extent=(0, size[1], size[0], 0))
    axes.set_title(title)
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.locator_params(nbins=5)
    for spine in axes.spines.values():
        spine.set_visible(True)
    return drawn


def _cells(tiling: Tiling, size: tuple[int, int], shown: tuple[int, ...]) -> dict[TileBox, tuple[slice, slice]]:
    """Return the rows and the columns of the picture that each tile fills."""
    rows = _slices(size[0], tiling.height, tiling.overlap, shown[0])
    columns = _slices(size[1], tiling.width, tiling.overlap, shown[1])
    return {box: (rows[box.y], columns[box.x]) for box in tiling.boxes(*size)}


def _slices(length: int, tile: int, overlap: int, shown: int) -> dict[int, slice]:
    """Return first pixel -> what the tile fills along a side: up to the middle of its overlap with each neighbour."""
    firsts = starts(length, tile, overlap)
    middles = [(first + tile + following) / 2 for first, following in pairwise(firsts)]
    ends = [0, *(round(middle * shown / length) for middle in middles), shown]
    return {first: slice(*pair) for first, pair in zip(firsts, pairwise(ends), strict=True)}


IN_LEGEND = 24
"""Maximum number of classes in the legend."""
_ABREAST = 2
"""Number of images in a row."""
_TITLES = ("image", "mask", "prediction")


@styled
def draw_segmentation(
    title: str, class_names: Sequence[str], examples: Sequence[tuple[str, np.ndarray, np.ndarray, np.ndarray]]
) -> Figure:
    """Draw (name, image uint8 [H, W, 3], mask and prediction uint8 [h, w]) of each example beside each other.

    Pixels that do not count are white in the mask.
    """
    colours = class_colours(len(class_names))
    rows = -(-len(examples) // _ABREAST)
    figure = Figure(figsize=(1.5 * 3 * _ABREAST, 1.55 * rows + 1.0), layout="constrained")
    panels = picture_panels(figure, rows, 3 * _ABREAST)
    for number, (name, image, truth, predicted) in enumerate(examples):
        cells = panels[number // _ABREAST, number % _ABREAST * 3 :][:3]
        for axes, picture, note in zip(cells, (image, colours[truth], colours[predicted]), _TITLES, strict=True):
            show(axes, picture, short_name(name) if note == "image" else note)
    present = {int(value) for _, _, *maps in examples for one in maps for value in np.unique(one)} - {IGNORED}
    if len(present) <= IN_LEGEND:
        marks = [Patch(color=colours[label] / 255, label=short_name(class_names[label])) for label in sorted(present)]
        figure.legend(handles=marks, loc="outside lower center", ncols=6, frameon=False, fontsize=7)
    return with_title(figure, title)
