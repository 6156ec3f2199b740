"""Figures of attention: distance by layer (Figures 7, right, and 11), and maps over pictures (Figures 6 and 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitrail.inspection.distance import Distances
from vitrail.inspection.figures.page import (
    MARKERS,
    colour_scale,
    picture_panels,
    short_name,
    show,
    styled,
    with_title,
)
from vitrail.inspection.maps import HeadMaps
from vitrail.inspection.overlay import TINT, under_attention
from vitrail.inspection.pictures import Picture
from vitrail.plots import COLOURS

PICTURES_PER_ROW = 3
"""Pictures per row. Each takes two panels: the picture, and the picture under its map."""
HEADS_PER_ROW = 8
"""Maps of heads per row."""


@styled
def draw_distances(distances: Mapping[str, Distances]) -> Figure:
    """Draw every head's mean attention distance over depth, one panel for each network.

    A bar is one standard deviation over images to each side. Panels share an axis unless the distances of one network
    are more than twice those of another.
    """
    figure = Figure(figsize=(3.4 * len(distances) + 0.6, 3.2), layout="constrained")
    reach = [one.uniform.max() for one in distances.values()]
    shared = max(reach) <= 2 * min(reach)
    panels = figure.subplots(1, len(distances), squeeze=False, sharey=shared)[0]
    for axes, (label, one) in zip(panels, distances.items(), strict=True):
        _distances(axes, one)
        axes.set_title(f"{label}, {one.images} image{'s' if one.images > 1 else ''}")
        axes.set_xlabel("layer")
        axes.set_ylabel("mean attention distance (pixels)" if axes is panels[0] else "")
    tops = [1.08 * max((one.mean + one.spread).max(), one.uniform.max()) for one in distances.values()]
    for axes, top in zip(panels, tops, strict=True):
        axes.set_ylim(0, max(tops) if shared else top)
    return with_title(figure, "How far each head looks: mean attention distance by layer")


def _distances(axes: Axes, one: Distances) -> None:
    kinds = list(dict.fromkeys((branch, axis) for _, branch, axis in one.places))
    for kind, (branch, axis) in enumerate(kinds):
        rows = [row for row, place in enumerate(one.places) if place[1:] == (branch, axis)]
        heads = one.mean.shape[1]
        shift = (kind - (len(kinds) - 1) / 2) * 0.3
        # heads are sorted by distance and spread over the width of a layer, so that their bars do not overlap
        offsets = np.linspace(-0.5, 0.5, heads) * 0.5 / len(kinds) if heads > 1 else np.zeros(1)
        order = np.argsort(one.mean[rows], axis=1, kind="stable")
        mean, spread = (np.take_along_axis(values[rows], order, axis=1) for values in (one.mean, one.spread))
        layers = np.array([one.places[row][0] for row in rows])
        label = f"{axis}s" if axis else f"branch {branch}"
        colour = COLOURS[kind % len(COLOURS)]
        axes.errorbar(
            (layers[:, None] + shift + offsets).ravel(), mean.ravel(), spread.ravel(),
            label=label if len(kinds) > 1 else "a head", fmt=MARKERS[kind % len(MARKERS)], markersize=2.4,
            color=colour, ecolor=to_rgba(colour, 0.45), elinewidth=0.7,
        )  # fmt: skip
    for number, alike in enumerate(sorted(set(one.uniform.round(6).tolist()))):
        label = "" if number else "equal attention to all" + (" in a line" if one.places[0][2] else "")
        axes.axhline(alike, color="black", linewidth=0.8, linestyle="--", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.grid(axis="y", alpha=0.2)
    axes.legend(frameon=False, fontsize=7, loc="lower right")


@styled
def draw_overlays(
    title: str, quantity: str, pictures: Sequence[Picture], maps: Sequence[np.ndarray], notes: Sequence[str]
) -> Figure:
    """Draw each picture, and again under its map [rows, columns] with a note such as the class."""
    rows = -(-len(pictures) // PICTURES_PER_ROW)
    columns = min(PICTURES_PER_ROW, len(pictures))
    figure = Figure(figsize=(2.9 * columns, 1.75 * rows + 0.8), layout="constrained")
    panels = picture_panels(figure, rows, 2 * columns)
    for number, (picture, shares, note) in enumerate(zip(pictures, maps, notes, strict=True)):
        left, right = panels[number // columns, 2 * (number % columns) :][:2]
        show(left, picture.shown, short_name(picture.name))
        show(right, under_attention(picture.shown, shares, picture.box), short_name(note))
    _scale(figure, panels, quantity, pictures)
    return with_title(figure, title)


@styled
def draw_heads(
    title: str,
    pictures: Sequence[Picture],
    maps: Sequence[np.ndarray],
    attentions: Sequence[HeadMaps],
    heads: Sequence[int],
) -> Figure:
    """Draw each picture, and again under the map of every head of a layer.

    `maps` are [attentions, heads, rows, columns], one per picture; of `attentions` the branch and axis are named.
    """
    each = [(of, place, head) for of in range(len(attentions)) for place, head in enumerate(heads)]
    across, lines = min(len(each), HEADS_PER_ROW), -(-len(each) // HEADS_PER_ROW)
    rows = len(pictures) * lines
    figure = Figure(figsize=(1.15 * (1 + across) + 0.3, 1.3 * rows + 0.9), layout="constrained")
    panels = picture_panels(figure, rows, 1 + across)
    for number, (picture, shares) in enumerate(zip(pictures, maps, strict=True)):
        show(panels[number * lines, 0], picture.shown, short_name(picture.name, 18))
        for at, (of, place, head) in enumerate(each):
            one = attentions[of]
            axes = panels[number * lines + at // across, 1 + at % across]
            tinted = under_attention(picture.shown, shares[of, place], picture.box)
            where = f", along {one.axis}s" if one.axis else f", branch {one.branch}" if len(attentions) > 1 else ""
            show(axes, tinted, f"head {head}{where}")
    _scale(figure, panels, "attention", pictures)
    return with_title(figure, title)


def _scale(figure: Figure, panels: np.ndarray, quantity: str, pictures: Sequence[Picture]) -> None:
    """Draw the colour scale of overlays, which differs between maps."""
    faded = any(not picture.box.covers(*picture.shown.shape[:2]) for picture in pictures)
    label = f"{quantity}; every map has its own scale{'; faded: not seen by the network' if faded else ''}"
    colour_scale(figure, panels, ("lowest", "highest"), label, TINT)
