"""How far attention reaches: mean attention distance by head and layer (paper, Figures 7 and 11, section D.7).

It is the analogue of a convolution's receptive field: for each query patch, the distances between its centre
and those of all others, weighted by the attention paid to them, then averaged over queries and images. As in
the authors' code, attention to the class token and its like counts as distance 0: their rows and columns are
dropped and the rest is not normalised again.

Distances are in pixels of the network's input. A token of a hybrid stands for a cell of its feature map, whose
centres lie as far apart as the whole stem shrinks the image.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.reading import need_vit
from vitrail.model.posemb import Grid
from vitrail.model.taps import AttentionMap, attentions, tap_attention
from vitrail.model.vit import ViT

Place = tuple[int, int, str | None]
"""Layer, branch, and axis of an attention."""


@dataclass(frozen=True)
class Distances:
    """Mean attention distance of every head over a number of images, in pixels."""

    places: list[Place]
    """Each attention in the order it runs: several of a layer in parallel and axial blocks."""
    mean: np.ndarray
    """float64 [attentions, heads]."""
    spread: np.ndarray
    """float64 [attentions, heads]: standard deviation over images (population)."""
    images: int
    uniform: np.ndarray
    """float64 [attentions]: over the same images, if each token attended to all it can, alike."""


def attention_distance(model: ViT, batches: Iterable[Tensor]) -> Distances:
    """Return the mean attention distances of a model over batches of images as it takes them, of any size.

    Memory holds one layer's maps of one batch, whatever the number of images. Raises UsageError where there are
    no images, and for a network that is no ViT.
    """
    need_vit(model, "attention distance")
    places = [place[:3] for place in attentions(model)]
    total = _Total(places, model.config.heads, model.config.prefix)
    training = model.training
    model.eval()
    try:
        for images in batches:
            grid = model.grid(images)
            total.begin(grid, model.config.patch, len(images))
            with torch.inference_mode(), tap_attention(model, total.receive):
                model.features(images)
    finally:
        model.train(training)
    return total.result()


def grid_distances(grid: Grid, patch: int, prefix: int = 0) -> Tensor:
    """Return the distances between tokens in pixels, float32 [tokens, tokens]; to and from the prefix they are 0."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centres = torch.stack([y.flatten(), x.flatten()], dim=1).double() * patch
    distances = torch.zeros(prefix + len(centres), prefix + len(centres))
    # not by way of products: rounding there would put a patch at some distance from itself
    distances[prefix:, prefix:] = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()
    return distances


class _Total:
    """Adds up what single images gave: mean and spread without keeping any map."""

    def __init__(self, places: list[Place], heads: int, prefix: int) -> None:
        self.places, self.prefix = places, prefix
        self.sum = np.zeros((len(places), heads))
        self.squares = np.zeros((len(places), heads))
        self.images, self.uniform = 0, np.zeros(len(places))

    def begin(self, grid: Grid, patch: int, images: int) -> None:
        """A batch of images with this grid follows."""
        self.grid, self.batch = grid, images
        whole = grid_distances(grid, patch, self.prefix)
        row, column = (grid_distances(line, patch) for line in ((1, grid[1]), (grid[0], 1)))
        self.distances = {None: whole, "row": row, "column": column}
        self.images += images
        alike = {axis: one.sum().item() / (self._queries(axis) * len(one)) for axis, one in self.distances.items()}
        self.uniform += [images * alike[axis] for _, _, axis in self.places]

    def receive(self, found: AttentionMap) -> None:
        """Reduce one attention's maps to a number for each image and head."""
        distances = self.distances[found.axis].to(found.maps.device)
        # the prefix has distance 0, so its rows and columns need not be cut out, which would copy the maps
        each = (found.maps.flatten(2) @ distances.flatten()).cpu().double().numpy() / self._queries(found.axis)
        each = each.reshape(self.batch, -1, each.shape[1]).mean(axis=1)  # the lines of an axial block
        place = self.places.index((found.layer, found.branch, found.axis))
        self.sum[place] += each.sum(axis=0)
        self.squares[place] += (each**2).sum(axis=0)

    def _queries(self, axis: str | None) -> int:
        return len(self.distances[axis]) - (self.prefix if axis is None else 0)

    def result(self) -> Distances:
        """Mean and spread over all images."""
        if not self.images:
            raise UsageError("attention distance is an average over images, and there are none")
        mean = self.sum / self.images
        variance = np.maximum(self.squares / self.images - mean**2, 0.0)
        return Distances(self.places, mean, np.sqrt(variance), self.images, self.uniform / self.images)
