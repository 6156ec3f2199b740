"""What the network learned inside: attention distance by layer, and similarity of positions (paper, Figure 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from vitrail.costs.count import macs
from vitrail.data.images.ops import shown_transform
from vitrail.data.item import IndexedSource, Subset, evenly_spaced
from vitrail.inspection.distance import Distances, attention_distance
from vitrail.inspection.figures.attention import draw_distances
from vitrail.inspection.figures.page import STYLE
from vitrail.inspection.figures.weights import draw_positions
from vitrail.inspection.pictures import Pictures
from vitrail.inspection.positions import position_tiles
from vitrail.model.own_part import own_parts
from vitrail.model.record import has_maps
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.reports.figures import svg

IMAGES = 32
"""Maximum number of images that attention distance is averaged over."""
FEWEST = 8
WORK = 3e11
"""FLOPs to spend on them, unless `FEWEST` need more: a report is written in seconds, even on a CPU."""
ENLARGED = 1.35
"""Figures of `vitrail.inspection` have small type. This scales it to the type of the page's other figures."""
_BATCH = 4


@dataclass(frozen=True)
class DistanceFigure:
    """How far each head attends, by layer."""

    svg: Markup
    images: int
    """Number of validation images that the distances are averaged over."""
    config: ViTConfig


@dataclass(frozen=True)
class PositionFigure:
    """How similar the network's positions are to each other."""

    kind: str
    """`ViTConfig.positions`, or "rotary" for rotary positions alone."""
    svg: Markup | None
    """None for a network without position embeddings."""
    every_layer: bool = False
    """Whether every layer has its own position embeddings."""


def distance_figure(model: Any, source: IndexedSource) -> DistanceFigure | None:
    """Measure and draw how far each head attends, over evenly spaced validation images.

    `model` is a network with its card. Returns None for a network without a grid of patches. Raises DataError if no
    image can be read.
    """
    if not _has_grid(model) or not has_maps(model):
        return None
    rows = evenly_spaced(len(source), images_for(model, len(source)))
    pictures = Pictures(Subset(source, rows), shown_transform(model.card.preprocess), _BATCH)
    distances = attention_distance(model, pictures.tensors(next(model.parameters()).device))
    figure = draw_distances({"best model": distances})
    figure.axes[0].set_title("")  # there is only one model, and the text gives the number of images
    return DistanceFigure(page_svg(figure, _description(distances)), distances.images, model.config)


def _has_grid(model: Any) -> bool:
    return isinstance(model, ViT) and model.config.grid != (1, 1)


def images_for(model: ViT, available: int) -> int:
    """Return the number of images to average distances over: fewer for a large network."""
    affordable = int(WORK / (2 * macs(model.config)))
    return min(available, IMAGES, max(affordable, FEWEST))


def position_figure(model: Any) -> PositionFigure | None:
    """Draw how similar the positions are to each other. Returns None for a network without a grid of patches."""
    if not _has_grid(model):
        return None
    kind = model.config.positions
    kind = "rotary" if kind == "none" and model.config.origin.rotary else kind
    if kind == "none":
        return PositionFigure(kind, None)
    if "positions" in own_parts(model.config):  # not necessarily a table
        return None
    tiles = position_tiles(model)
    rows, columns = tiles.values.shape[:2]
    describe = (
        f"{tiles.about}: {rows} by {columns} positions of patches, each compared with all others by "
        f"{tiles.quantity}. The lowest value is {tiles.values.min():.2f}."
    )
    return PositionFigure(kind, page_svg(draw_positions({"": tiles}), describe), "layer" in tiles.about)


def page_svg(figure: Figure, describe: str) -> Markup:
    """Return a figure of `vitrail.inspection` as SVG without its title; its black becomes the page's text colour."""
    figure.suptitle("")
    with matplotlib.rc_context(STYLE):
        text = str(svg(figure, describe, enlarged=ENLARGED))
    # matplotlib writes no fill where it is black, which is the default; an ancestor's is inherited
    return Markup(text.replace("<svg ", '<svg fill="currentColor" ', 1).replace("#000000", "currentColor"))


def _description(distances: Distances) -> str:
    depth = 1 + max(layer for layer, _, _ in distances.places)
    layers = f"{depth} layers" if depth > 1 else "one layer"
    ends = []
    for name, wanted in (("first", 0), ("last", depth - 1)):
        mean = distances.mean[[row for row, place in enumerate(distances.places) if place[0] == wanted]]
        ends.append(f"in the {name} layer from {mean.min():.1f} to {mean.max():.1f}")
    return (
        f"Mean attention distance in pixels of every head in {layers} over {distances.images} images: "
        f"{', '.join(ends)}; with equal attention to all patches it would be {distances.uniform.max():.1f}."
    )
