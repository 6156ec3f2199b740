"""Figure of a segmentation: images, their masks and the predicted classes of the pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitrail.data.masks import IGNORED
from vitrail.inspection.figures.page import COLOURS, picture_panels, short, show, styled, wrapped

NAMED = 24
"""Maximum number of classes in the legend."""
_ABREAST = 2
"""Number of images in a row."""
_TITLES = ("image", "mask", "prediction")


def class_colours(count: int) -> np.ndarray:
    """Return a colour for each class, and white for pixels that do not count, uint8 [256, 3].

    Up to seven classes have colours that everybody can tell apart. More have those of Pascal VOC: the bits of the
    class's number in turn are bits of red, green and blue.
    """
    table = np.full((256, 3), 255, dtype=np.uint8)
    if count <= len(COLOURS):
        table[:count] = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in COLOURS[:count]]
        return table
    numbers = np.arange(count)[:, None]
    bits = [(numbers >> 3 * level + np.arange(3) & 1) << 7 - level for level in range(3)]
    table[:count] = np.bitwise_or.reduce(bits)
    return table


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
            show(axes, picture, short(name) if note == "image" else note)
    present = {int(value) for _, _, *maps in examples for one in maps for value in np.unique(one)} - {IGNORED}
    if len(present) <= NAMED:
        marks = [Patch(color=colours[label] / 255, label=short(class_names[label])) for label in sorted(present)]
        figure.legend(handles=marks, loc="outside lower center", ncols=6, frameon=False, fontsize=7)
    figure.suptitle(wrapped(title, figure.get_figwidth()))
    return figure
