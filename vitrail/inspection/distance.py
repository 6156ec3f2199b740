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
from vitrail.inspection.maps import require_vit
from vitrail.model.build import eval_mode
from vitrail.model.posemb import Grid
from vitrail.model.record import AttentionMap, attentions, tap_attention
from vitrail.model.vit import ViT

AttentionPlace = tuple[int, int, str | None]
"""Layer, branch, and axis of an attention."""


@dataclass(frozen=True)
class Distances:
    """Mean attention distance of every head over a number of images, in pixels."""

    places: list[AttentionPlace]
    """Every attention in the order of computation. Parallel and axial blocks have several per layer."""
    mean: np.ndarray
    """float64 [attentions, heads]."""
    spread: np.ndarray
    """float64 [attentions, heads]: standard deviation over images (population)."""
    images: int
    uniform: np.ndarray
    """float64 [attentions]: the distance if each token attended equally to all tokens that it can attend to."""


def attention_distance(model: ViT, batches: Iterable[Tensor]) -> Distances:
    """Return the mean attention distances of a model over batches of its input images, of any size.

    Memory holds one layer's maps of one batch, and one number for each image and head. Raises UsageError if there are
    no images, and for other networks.
    """
    require_vit(model, "attention distance")
    each: dict[AttentionPlace, list[np.ndarray]] = {place[:3]: [] for place in attentions(model)}
    uniform: dict[AttentionPlace, list[float]] = {place: [] for place in each}
    for images in batches:
        (rows, columns), patch, prefix = model.grid(images), model.config.patch, model.config.prefix
        lines: dict[str | None, _Line] = {
            None: _Line(grid_distances((rows, columns), patch, prefix), rows * columns),
            "row": _Line(grid_distances((1, columns), patch), columns),
            "column": _Line(grid_distances((rows, 1), patch), rows),
        }

        def receive(attention: AttentionMap, lines: dict[str | None, _Line] = lines, images: int = len(images)) -> None:
            line, place = lines[attention.axis], (attention.layer, attention.branch, attention.axis)
            each[place].append(line.mean(attention.maps).reshape(images, -1, attention.maps.shape[1]).mean(axis=1))
            uniform[place] += [line.uniform] * images

        with eval_mode(model), torch.inference_mode(), tap_attention(model, receive):
            model.features(images)
    if not all(each.values()):
        raise UsageError("Attention distance is a mean over images, but there are none. Give at least one image.")
    values = np.stack([np.concatenate(parts) for parts in each.values()])  # [attentions, images, heads]
    alike = np.array([np.mean(parts) for parts in uniform.values()])
    return Distances(list(each), values.mean(axis=1), values.std(axis=1), values.shape[1], alike)


@dataclass(frozen=True)
class _Line:
    """The tokens that attend to each other: the whole grid, or a row or column of it."""

    distances: Tensor
    """float32 [tokens, tokens], in pixels."""
    queries: int
    """Number of tokens without the prefix."""

    @property
    def uniform(self) -> float:
        return self.distances.sum().item() / (self.queries * len(self.distances))

    def mean(self, maps: Tensor) -> np.ndarray:
        """Return the mean distance of attention maps [batch, heads, tokens, tokens]: float64 [batch, heads]."""
        # the prefix has distance 0, so its rows and columns need not be cut out, which would copy the maps
        total = maps.flatten(2) @ self.distances.to(maps.device).flatten()
        return total.cpu().double().numpy() / self.queries


def grid_distances(grid: Grid, patch: int, prefix: int = 0) -> Tensor:
    """Return the distances between tokens in pixels, float32 [tokens, tokens]; 0 to and from the prefix."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centres = torch.stack([y.flatten(), x.flatten()], dim=1).double() * patch
    distances = torch.zeros(prefix + len(centres), prefix + len(centres))
    # not computed with matrix products, whose rounding would give a patch a distance from itself
    distances[prefix:, prefix:] = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()
    return distances
