"""Figures: nothing is cut off, nothing is drawn out of sight, and the same numbers give the same file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from tiny_models import tiny

from vitrail.inspection.components import PatchComponents, principal_filters
from vitrail.inspection.distance import Distances
from vitrail.inspection.embedding_map import EmbeddingMap
from vitrail.inspection.figures.attention import draw_distances, draw_heads, draw_overlays
from vitrail.inspection.figures.embedding import draw_components, draw_map, draw_neighbours
from vitrail.inspection.figures.page import Folder, mosaic, short_name
from vitrail.inspection.figures.weights import draw_filters, draw_positions
from vitrail.inspection.maps import HeadMaps
from vitrail.inspection.overlay import Box
from vitrail.inspection.pictures import Picture
from vitrail.inspection.positions import position_tiles
from vitrail.plots import COLOURS

LONG = "a-network-with-a-rather-long-name"


def picture(height: int = 30, width: int = 50) -> Picture:
    shown = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    box = Box(0, 10, 30, 30)
    return Picture("photos/a $x$ name.jpg", 0, shown, box, (0, 10, 30, 30), shown[:30, 10:40])


def distances(scale: float, heads: int = 3, axis: bool = False) -> Distances:
    places: Any = [(k, 0, a) for k in range(2) for a in (("row", "column") if axis else (None,))]
    mean = np.random.default_rng(1).random((len(places), heads)) * scale
    return Distances(places, mean, mean / 5, 4, np.full(len(places), 0.6 * scale))


def one_head() -> Figure:
    maps = [HeadMaps(3, 0, axis, torch.rand(1, 1, 3, 3)) for axis in ("row", "column")]
    stacked = np.stack([one.shares[0].numpy() for one in maps])
    return draw_heads(f"{LONG}: attention of layer 3 from what the classifier reads", [picture()], [stacked], maps, [3])


def components() -> Figure:
    found = PatchComponents(None, np.zeros(4), np.eye(4)[:3], np.array([0.5, 0.3, 0.1]), 9)
    return draw_components(f"{LONG}: components", [picture(), picture(50, 30)], list(np.random.rand(2, 3, 4, 4)), found)


def data_map() -> Figure:
    points = np.random.default_rng(0).normal(size=(60, 2))
    names = [f"class number {k} of many" for k in range(12)]
    thumbnail = {3: np.zeros((8, 8, 3), np.uint8)}
    return draw_map(LONG, EmbeddingMap(points, "tsne"), np.arange(60) % 13 - 1, names, thumbnail)


@pytest.mark.parametrize(("box", "faded"), [(Box(0, 10, 30, 30), True), (Box(0, 0, 30, 50), False)])
def test_the_scale_says_faded_only_where_something_is(box: Box, faded: bool) -> None:
    one = replace(picture(), box=box)
    figure = draw_overlays("title", "relevance", [one], [np.eye(3)], ["note"])
    texts = [text.get_text().replace("\n", " ") for text in figure.findobj(Text)]
    assert any("faded: not seen" in text for text in texts) == faded
    assert any("every map has its own scale" in text for text in texts)


FIGURES = {
    "filters": lambda: draw_filters({LONG: principal_filters(tiny()), "b": principal_filters(tiny(stem="hmlp"))}),
    "positions": lambda: draw_positions(
        {LONG: position_tiles(tiny(positions="relative_bias")), "b": position_tiles(tiny(image_size=(4, 80)))}
    ),
    "distance": lambda: draw_distances({LONG: distances(10), "b": distances(9, heads=1), "c": distances(8, axis=True)}),
    "one picture": lambda: draw_overlays(
        f"{LONG}: what speaks for a class", "relevance", [picture()], [np.eye(3)], ["x" * 99]
    ),
    "one head": one_head,
    "components": components,
    "neighbours": lambda: draw_neighbours(LONG, [(picture(), [(picture(), "a long class name\ncosine 0.93")])]),
    "map": data_map,
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_reaches_over_the_edge(name: str) -> None:
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    inside, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert inside is not None
    assert inside.x0 >= -0.02 and inside.y0 >= -0.02
    assert inside.x1 <= width + 0.02 and inside.y1 <= height + 0.02


@pytest.mark.parametrize("scales", [(10.0, 9.0), (8.0, 116.0), (116.0, 8.0)])
def test_every_head_is_within_its_panel(scales: tuple[float, float]) -> None:
    found = {str(scale): distances(scale) for scale in scales}
    panels = draw_distances(found).axes
    for axes, one in zip(panels, found.values(), strict=True):
        low, high = axes.get_ylim()
        assert low == 0 and (one.mean + one.spread).max() < high and one.uniform.max() < high
        assert high < 2.5 * (one.mean + one.spread).max() + one.uniform.max()  # and the panel is used
    assert (panels[0].get_ylim() == panels[1].get_ylim()) == (max(scales) <= 2 * min(scales))


def test_tiles_stand_where_their_position_is() -> None:
    tiles = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
    canvas = mosaic(tiles, gap=1)
    assert canvas.shape == (5, 8)
    assert (canvas[3:5, 6:8] == tiles[1, 2]).all() and np.isnan(canvas[2]).all() and np.isnan(canvas[:, 5]).all()


def test_panels_of_one_quantity_share_their_colours() -> None:
    figure = draw_positions({"a": position_tiles(tiny()), "b": position_tiles(tiny(positions="sincos"))})
    limits = {axes.images[0].get_clim() for axes in figure.axes if axes.images}
    assert len(limits) == 1


def test_colours_keep_apart_without_colour() -> None:
    """The map rises in brightness; what is told apart by colour alone is not needed for reading it."""
    import matplotlib

    from vitrail.inspection.overlay import TINT

    colours = matplotlib.colormaps[TINT](np.linspace(0, 1, 64))[:, :3]
    brightness = colours @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(brightness) > 0).all() and np.ptp(brightness) > 0.6
    assert len(set(COLOURS)) == 7


@pytest.mark.full_size
@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
def test_the_same_numbers_give_the_same_file(format: Any, tmp_path: Path) -> None:
    written = []
    for folder in ("a", "b"):
        (path,) = Folder(tmp_path / folder, [format]).figure("x", draw_distances({"a": distances(10)}))
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_names_are_shortened_in_the_middle() -> None:
    assert short_name("photos/cats/a.jpg") == "a.jpg"
    assert short_name("x" * 20 + "the-end.jpg", 20) == "x" * 9 + "…" + "xxthe-end.jpg"[-10:]
