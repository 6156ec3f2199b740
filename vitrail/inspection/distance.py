"""How far attention reaches: mean attention distance by head and layer (paper, Figures 7 and 11, section D.7).

It corresponds to the receptive field of a convolution. For each query patch, the distances between its centre and the
centres of all patches are weighted by attention, then averaged over queries and images. As in the authors' code,
attention to the class token and other prefix tokens counts as distance 0: their rows and columns are dropped and the
rest is not normalised again.

Distances are in pixels of the network's input. A token of a hybrid stands for a cell of its feature map; the distance
between the centres of two neighbouring cells is the factor by which the stem reduces the image.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.inspection.network import eval_mode, require_vit
from vitrail.model.posemb import Grid
from vitrail.model.record import AttentionMap, attentions, tap_attention
from vitrail.model.vit import ViT

Place = tuple[int, int, str | None]
"""Layer, branch, and axis of an attention."""


@dataclass(frozen=True)
class Distances:
    """Mean attention distance of every head over a number of images, in pixels."""

    places: list[Place]
    """Every attention in the order of computation. Parallel and axial blocks have several per layer."""
    mean: np.ndarray
    """float64 [attentions, heads]."""
    spread: np.ndarray
    """float64 [attentions, heads]: standard deviation over images (population)."""
    images: int
    uniform: np.ndarray
    """float64 [attentions]: the same, if each token attended equally to all tokens that it can attend to."""


def attention_distance(model: ViT, batches: Iterable[Tensor]) -> Distances:
    """Return the mean attention distances of a model over batches of its input images, of any size.

    Memory holds one layer's maps of one batch. Raises UsageError if there are no images, and for other networks.
    """
    require_vit(model, "attention distance")
    places = [place[:3] for place in attentions(model)]
    total = _Total(places, model.config.heads, model.config.prefix)
    with eval_mode(model):
        for images in batches:
            grid = model.grid(images)
            total.begin(grid, model.config.patch, len(images))
            with torch.inference_mode(), tap_attention(model, total.receive):
                model.features(images)
    return total.result()


def grid_distances(grid: Grid, patch: int, prefix: int = 0) -> Tensor:
    """Return the distances between tokens in pixels, float32 [tokens, tokens]; 0 to and from the prefix."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centres = torch.stack([y.flatten(), x.flatten()], dim=1).double() * patch
    distances = torch.zeros(prefix + len(centres), prefix + len(centres))
    # not computed with matrix products, whose rounding would give a patch a distance from itself
    distances[prefix:, prefix:] = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()
    return distances


class _Total:
    """Running sums over images, for mean and spread without storing maps."""

    def __init__(self, places: list[Place], heads: int, prefix: int) -> None:
        self.places, self.prefix = places, prefix
        self.sum = np.zeros((len(places), heads))
        self.squares = np.zeros((len(places), heads))
        self.images, self.uniform = 0, np.zeros(len(places))

    def begin(self, grid: Grid, patch: int, images: int) -> None:
        """Prepare for a batch of images with this grid."""
        self.grid, self.batch = grid, images
        whole = grid_distances(grid, patch, self.prefix)
        row, column = (grid_distances(line, patch) for line in ((1, grid[1]), (grid[0], 1)))
        self.distances = {None: whole, "row": row, "column": column}
        self.images += images
        alike = {axis: one.sum().item() / (self._queries(axis) * len(one)) for axis, one in self.distances.items()}
        self.uniform += [images * alike[axis] for _, _, axis in self.places]

    def receive(self, found: AttentionMap) -> None:
        """Reduce the maps of one attention to one number per image and head, and add them."""
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
        """Return mean and spread over all images."""
        if not self.images:
            raise UsageError("attention distance needs images, and there are none")
        mean = self.sum / self.images
        variance = np.maximum(self.squares / self.images - mean**2, 0.0)
        return Distances(self.places, mean, np.sqrt(variance), self.images, self.uniform / self.images)
