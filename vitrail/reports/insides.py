"""What the network has become inside: attention distance by layer, and how alike positions are (paper, Figure 7)."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vitrail.costs.flops import macs
from vitrail.data.images.ops import eval_transform
from vitrail.data.item import Listed, View
from vitrail.inspection.distance import Distances, attention_distance
from vitrail.inspection.figures.attention import draw_distances
from vitrail.inspection.figures.page import STYLE
from vitrail.inspection.figures.weights import draw_positions
from vitrail.inspection.pictures import Pictures
from vitrail.inspection.positions import position_tiles
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.reports.figures import svg

IMAGES = 32
"""Images that attention distance is averaged over, at most."""
FEWEST = 8
WORK = 3e11
"""FLOPs spent on them, unless `FEWEST` need more: a report is written in seconds, on a CPU, too."""
ENLARGED = 1.35
"""Figures of `vitrail.inspection` have small type: this brings it to that of the page's other figures."""
_BATCH = 4

LEARNED = "Learned positions start at random; where neighbours, rows and columns stand out, the network has found out "
LEARNED += "how the image is laid out."
POSITIONS = {
    "1d": LEARNED,
    "2d": "Each position is put together from one half for its row and one for its column, so these stand out from the "
    "start; what was learned is which rows, and which columns, are alike.",
    "sincos": "These positions are fixed sines and cosines of row and column: nothing in them was learned.",
    "relative": "What counts is how far a patch lies behind another in reading order. " + LEARNED,
    "relative_bias": "Shown is what is added to the attention logit from the tile's position to every other; it is 0 "
    "at the start, so whatever stands out was learned.",
}
"""What to see in the figure, by kind of positions."""


def attended(model: Any, source: Listed) -> str:
    """How far each head looks, by layer, over validation images spread evenly; "" for a network without a grid.

    `model` is a network with its card. Raises DataError where no image can be read.
    """
    if not _has_grid(model):
        return ""
    rows = np.unique(np.linspace(0, len(source) - 1, images_for(model, len(source))).round().astype(np.int64))
    pictures = Pictures(View(source, rows), eval_transform(model.card.preprocess), _BATCH)
    found = attention_distance(model, pictures.tensors(next(model.parameters()).device))
    figure = draw_distances({"best model": found})
    figure.axes[0].set_title("")  # there is no other, and the text tells how many images
    text = (
        "For every head, the distance in pixels between a patch and those it attends to, weighted by the attention and "
        f"averaged over {found.images} validation images; the bar is one standard deviation over images. It is the "
        "counterpart of a convolution's receptive field. In a network that has seen much, low layers mix heads that "
        "look near with heads that look far, and high layers look far; heads that all lie on the dashed line attend "
        f"to everything alike, as they do before training.{_particular(model.config)}"
    )
    return _section("How far attention reaches", inked(figure, _described(found)), text)


def _has_grid(model: Any) -> bool:
    return isinstance(model, ViT) and model.config.grid != (1, 1)


def _particular(config: ViTConfig) -> str:
    """What one has to know of this network to read its distances."""
    notes = ""
    if config.stem == "resnet":
        notes += (
            " A patch is a cell of the convolutions' output here; it has seen more of the image than its own pixels."
        )
    if config.block == "axial":
        notes += " Attention runs along rows and along columns in turn, and each is measured along its line."
    if config.prefix:
        notes += " Attention to the class token and its like counts as distance 0."
    return notes


def images_for(model: ViT, available: int) -> int:
    """Return over how many of the available images distances are averaged: fewer for a large network."""
    affordable = int(WORK / (2 * macs(model.config)))
    return min(available, IMAGES, max(affordable, FEWEST))


def positioned(model: Any) -> str:
    """How alike the positions are to the network; "" for one without a grid."""
    if not _has_grid(model):
        return ""
    title, kind = "What it knows of positions", model.config.positions
    if kind == "none":
        return (
            f'<h2>{title}</h2><p class="why">Nothing: this network has no position embeddings, so to it an image is a '
            "bag of patches.</p>"
        )
    found = position_tiles(model)
    rows, columns = found.values.shape[:2]
    about = (
        f"{found.about}: {rows} by {columns} positions of patches, each compared with all others by "
        f"{found.quantity}. Lowest {found.values.min():.2f}."
    )
    text = f"Each tile is one position of the grid, compared with all of them. {POSITIONS[kind]}"
    if "layer" in found.about:
        text += " Every layer has its own; these are those of the first."
    return _section(title, inked(draw_positions({"": found}), about), text)


def inked(figure: Figure, describe: str) -> str:
    """Return a figure of `vitrail.inspection` as SVG without its title, whose black is the page's own ink."""
    figure.suptitle("")
    with matplotlib.rc_context(STYLE):
        text = svg(figure, describe, enlarged=ENLARGED)
    # matplotlib writes no fill where it is black, which is the default; an ancestor's is inherited
    return text.replace("<svg ", '<svg fill="currentColor" ', 1).replace("#000000", "currentColor")


def _section(title: str, drawn: str, text: str) -> str:
    return f'<h2>{title}</h2><p class="why">{text}</p><div class="scroll"><figure>{drawn}</figure></div>'


def _described(found: Distances) -> str:
    depth = 1 + max(layer for layer, _, _ in found.places)
    layers = f"{depth} layers" if depth > 1 else "one layer"
    ends = []
    for name, wanted in (("first", 0), ("last", depth - 1)):
        mean = found.mean[[row for row, place in enumerate(found.places) if place[0] == wanted]]
        ends.append(f"in the {name} layer from {mean.min():.1f} to {mean.max():.1f}")
    return (
        f"Mean attention distance in pixels of every head in {layers} over {found.images} images: "
        f"{', '.join(ends)}; with equal attention to all it would be {found.uniform.max():.1f}."
    )
