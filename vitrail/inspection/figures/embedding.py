"""Figures of features: components of patch tokens, nearest neighbours, and a data set as a map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage

from vitrail.inspection.components import PatchComponents
from vitrail.inspection.embedding_map import EmbeddingMap
from vitrail.inspection.figures.page import (
    MARKERS,
    colour_scale,
    picture_panels,
    short_name,
    show,
    styled,
    with_title,
)
from vitrail.inspection.overlay import interpolate_grid
from vitrail.inspection.pictures import Picture
from vitrail.plots import COLOURS

NAMED = 25
"""Maximum number of classes that a map names."""
CELLS = 9
"""Maximum number of thumbnails along a side of a map."""
GREY = "#bbbbbb"
"""Colour of images without a known class."""
THUMBNAIL = 64
"""Longer side of a thumbnail in pixels."""


@styled
def draw_components(
    title: str, pictures: Sequence[Picture], maps: Sequence[np.ndarray], components: PatchComponents
) -> Figure:
    """Draw pictures as rows: the picture, each component as a map, and the first three as red, green and blue.

    `maps` are [components, rows, columns], one per picture. A component has one scale for all pictures, from its 2nd to
    its 98th percentile. The colour picture combines the first three maps.
    """
    count = len(components.directions)
    low, high = np.percentile(np.concatenate([one.reshape(count, -1) for one in maps], axis=1), [2, 98], axis=1)
    columns = 1 + count + (count >= 3)
    figure = Figure(figsize=(1.6 * columns + 0.4, 1.5 * len(pictures) + 0.9), layout="constrained")
    panels = picture_panels(figure, len(pictures), columns)
    for row, (picture, one) in enumerate(zip(pictures, maps, strict=True)):
        size = picture.shown.shape[:2]
        fine = [interpolate_grid(component, picture.box, *size) for component in one]
        show(panels[row, 0], picture.shown, short_name(picture.name))
        for number in range(count):
            panels[row, 1 + number].imshow(fine[number], vmin=low[number], vmax=high[number])
            if row == 0:
                share = components.explained[number]
                panels[0, 1 + number].set_title(f"component {number + 1}, {share:.0%} of variance", fontsize=6.5)
        if count >= 3:
            span = np.maximum(high - low, np.finfo(np.float64).tiny)
            colour = (np.stack(fine[:3], axis=2) - low[:3]) / span[:3]
            panels[row, -1].imshow(np.nan_to_num(np.clip(colour, 0, 1), nan=1.0))
            panels[0, -1].set_title("1, 2, 3 as red, green, blue", fontsize=6.5)
    label = "coordinate along a component, one scale for all pictures"
    colour_scale(figure, panels, ("2nd percentile", "98th"), label)
    return with_title(figure, title)


@styled
def draw_neighbours(title: str, rows: Sequence[tuple[Picture, Sequence[tuple[Picture, str]]]]) -> Figure:
    """Draw each picture to the left of its nearest neighbours, each of which has a note."""
    columns = 1 + max(len(near) for _, near in rows)
    figure = Figure(figsize=(1.35 * columns + 0.3, 1.6 * len(rows) + 0.5), layout="constrained")
    panels = picture_panels(figure, len(rows), columns)
    for row, (query, near) in enumerate(rows):
        show(panels[row, 0], query.shown, f"{short_name(query.name, 20)}\n", fontweight="bold")
        for column, (picture, note) in enumerate(near, start=1):
            show(panels[row, column], picture.shown, note)
    return with_title(figure, title)


@styled
def draw_matches(
    title: str, given: Sequence[Picture], matches: Sequence[tuple[Picture, str]], columns: int = 5
) -> Figure:
    """Draw the given pictures, and below them the pictures that were found, each with a note, the first at the left."""
    above, below = -(-len(given) // columns), -(-len(matches) // columns)
    figure = Figure(figsize=(1.35 * columns + 0.3, 1.6 * (above + below) + 0.5), layout="constrained")
    panels = picture_panels(figure, above + below, columns)
    for axes, picture in zip(panels[:above].flat, given, strict=False):
        show(axes, picture.shown, f"given: {short_name(picture.name, 20)}", fontweight="bold")
    for axes, (picture, note) in zip(panels[above:].flat, matches, strict=False):
        show(axes, picture.shown, f"{note}  {short_name(picture.name, 20)}")
    return with_title(figure, title)


@styled
def draw_map(
    title: str, plane: EmbeddingMap, labels: np.ndarray, class_names: Sequence[str], thumbnails: dict[int, np.ndarray]
) -> Figure:
    """Draw points coloured by class, and the same map as pictures to the right.

    labels [N] index `class_names`, -1 is unknown; `thumbnails` are the uint8 pictures of some of the points.
    """
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    present = [int(label) for label in np.unique(labels)]
    named = len([label for label in present if label >= 0]) <= NAMED
    colours = {label: COLOURS[number % len(COLOURS)] if label >= 0 else GREY for number, label in enumerate(present)}
    for number, label in enumerate(present):
        points = plane.points[labels == label]
        name = short_name(class_names[label]) if label >= 0 else "unknown class"
        look = dict(s=9, color=colours[label], marker=MARKERS[number // len(COLOURS) % len(MARKERS)])
        left.scatter(*points.T, **look, linewidths=0, alpha=0.8, label=name if named else None)
    classes = f"{len(present)} classes" if named else f"{len(present)} classes, too many to name"
    left.set_title(f"{len(labels)} images of {classes}")
    for number, thumbnail in thumbnails.items():
        frame = {"edgecolor": colours[int(labels[number])], "linewidth": 1.2, "boxstyle": "square,pad=0"}
        box = OffsetImage(thumbnail, zoom=20 / max(thumbnail.shape[:2]))
        right.add_artist(AnnotationBbox(box, tuple(plane.points[number]), pad=0, bboxprops=frame))
    right.set_title(f"the same places as pictures ({len(thumbnails)} of them)")
    right.plot(*plane.points.T, linestyle="none", marker=",", color=GREY)
    axis = "t-SNE" if plane.method == "tsne" else "principal component"
    for axes in (left, right):
        axes.set_xlabel(f"{axis} 1")
        axes.set_ylabel(f"{axis} 2")
        if plane.method == "tsne":  # the units of t-SNE mean nothing
            axes.set_xticks([])
            axes.set_yticks([])
    if named and len(present) > 1:
        longest = max(map(len, left.get_legend_handles_labels()[1]))
        across = min(6, int(9.4 / (0.065 * longest + 0.5)))  # inches
        figure.legend(loc="outside lower center", ncols=across, frameon=False, fontsize=7, markerscale=1.6)
    return with_title(figure, title)


def thumbnail_points(points: np.ndarray, cells: int = CELLS) -> list[int]:
    """Return the points to show as pictures: the most central one in each cell of a grid over the map."""
    span = np.maximum(np.ptp(points, axis=0), np.finfo(np.float64).tiny)
    places = (points - points.min(axis=0)) / span * cells
    chosen: dict[tuple[int, int], tuple[float, int]] = {}
    for number, place in enumerate(places):
        x, y = (min(int(value), cells - 1) for value in place)
        off = float(np.hypot(place[0] - x - 0.5, place[1] - y - 0.5))
        chosen[x, y] = min(chosen.get((x, y), (np.inf, -1)), (off, number))
    return sorted(number for _, number in chosen.values())
