"""Figures of weights: filters (Figure 7, left) and position similarity (Figures 7, centre, and 10)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from vitrail.data.item import evenly_spaced
from vitrail.inspection.components import Filters
from vitrail.inspection.figures.page import mosaic, styled, with_title, wrap_text
from vitrail.inspection.positions import COSINE, PositionTiles

FILTERS_PER_ROW = 7
"""Filters per row. The paper's 28 filters are four rows."""
MOST_TILES = 14
"""Maximum number of tiles along a side. If there are more positions, an evenly spaced selection is shown."""


@styled
def draw_filters(filters: Mapping[str, Filters]) -> Figure:
    """Draw the principal components of filters, one panel for each network label.

    Each component has its own scale; grey is 0. Three channels are shown as colours, other numbers as their mean.
    """
    figure = Figure(figsize=(4.2 * len(filters), 3.4), layout="constrained")
    panels = figure.subplots(1, len(filters), squeeze=False)[0]
    for axes, (label, one) in zip(panels, filters.items(), strict=True):
        axes.imshow(_pictures(one.components), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        share = one.explained.sum()
        axes.set_title(wrap_text(f"{label}\n{one.about}", 4.0))
        axes.set_xlabel(f"{len(one.components)} components, {share:.0%} of the variance, in order of their share")
    return with_title(figure, "Principal components of the first layer's filters")


def _pictures(components: np.ndarray) -> np.ndarray:
    """[n, height, width, channels] -> one picture with FILTERS_PER_ROW in a row, values from 0 to 1."""
    count, height, width, channels = components.shape
    if channels != 3:
        components = components.mean(axis=3, keepdims=True)
    largest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    scaled = 0.5 + 0.5 * components / np.maximum(largest, np.finfo(np.float32).tiny)
    rows = -(-count // FILTERS_PER_ROW)
    tiles = np.ones((rows * FILTERS_PER_ROW, *scaled.shape[1:]), dtype=np.float32)
    tiles[:count] = scaled
    enlarged = tiles.repeat(-(-16 // height), axis=1).repeat(-(-16 // width), axis=2)
    canvas = mosaic(enlarged.reshape(rows, FILTERS_PER_ROW, *enlarged.shape[1:]), gap=2, fill=1.0)
    return canvas if channels == 3 else canvas[:, :, 0]


@styled
def draw_positions(results: Mapping[str, PositionTiles]) -> Figure:
    """Draw the tiles of one or more networks, one panel for each label (Figure 10).

    Panels of the same quantity share their colours, so they can be compared.
    """
    columns = min(len(results), 3)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(3.3 * columns + 0.9, 3.3 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    limits = {
        one.quantity: _limits([p for p in results.values() if p.quantity == one.quantity]) for one in results.values()
    }
    for axes, (label, one) in zip(panels, results.items(), strict=False):
        low, high = limits[one.quantity]
        down, across = (evenly_spaced(side, MOST_TILES) for side in one.values.shape[:2])
        tiles = one.values[np.ix_(down, across)]
        gap = max(1, tiles.shape[2] // 7)
        whole = mosaic(tiles, gap)
        image = axes.imshow(whole, vmin=low, vmax=high, interpolation="nearest")
        for axis, places, side in zip((axes.yaxis, axes.xaxis), (down, across), tiles.shape[2:], strict=True):
            centres = np.arange(len(places)) * (side + gap) + (side - 1) / 2
            axis.set_ticks(centres, [str(place + 1) for place in places])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("column of the patch")
        axes.set_ylabel("row of the patch")
        axes.set_title(wrap_text(f"{label}\n{one.about}", 3.0))
        figure.colorbar(
            image,
            ax=axes,
            shrink=0.8 * min(1.0, whole.shape[0] / whole.shape[1]),
            label=one.quantity,
            extend="max" if one.quantity == COSINE else None,
        )
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    return with_title(figure, "Each tile: one position compared with all positions")


def _limits(panels: list[PositionTiles]) -> tuple[float, float]:
    """Return the lowest and highest value. Cosines of positions with themselves, which are 1, do not count."""
    values = [one.values.reshape(one.values.shape[0] * one.values.shape[1], -1) for one in panels]
    low = min(float(one.min()) for one in values)
    if panels[0].quantity == COSINE:
        values = [one[~np.eye(len(one), dtype=bool)] for one in values if len(one) > 1]
    high = max((float(one.max()) for one in values), default=1.0)
    return (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)
