"""Principal components: of the first layer's filters (paper, Figure 7, left), and of the features of patch tokens.

A filter holds the weights of one feature over the pixels of a patch. Its principal components are the patterns that
make up most of the filters: "a low-dimensional representation of the fine structure within each patch".

The components of patch tokens are drawn as maps over the picture. One set of components is computed for all images
together, so a colour has the same meaning in all of them. If it marks heads in several images, the network has a
direction for heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UsageError, finite
from vitrail.inspection.maps import require_vit
from vitrail.model.build import eval_mode
from vitrail.model.stdconv import StdConv2d
from vitrail.model.stem import LinearStem
from vitrail.model.vit import ViT

FILTERS = 28
"""Number of components of filters in the paper's figure."""


@dataclass(frozen=True)
class Filters:
    """Principal components of a layer's filters, the largest share of the variance first."""

    layer: str
    """Name of the layer in the model."""
    components: np.ndarray
    """float32 [components, height, width, channels], over normalised pixels; length 1, largest value positive."""
    explained: np.ndarray
    """float64 [components]: share of the filters' variance."""
    filters: int
    """Number of filters of the layer."""

    @property
    def about(self) -> str:
        """The layer and its filters, for a title."""
        height, width, channels = self.components.shape[1:]
        what = "patch embedding" if self.layer == "stem" else f"first convolution ({self.layer})"
        return f"{what}, {self.filters} filters of {height}x{width}x{channels}"


def first_kernels(model: nn.Module) -> tuple[str, Tensor]:
    """Return name and kernels [filters, channels, height, width] of the first layer.

    It is the patch embedding of a plain ViT, and the first convolution of all other networks. Weight-standardised
    kernels are returned standardised. Raises UsageError for a model with neither.
    """
    for name, module in model.named_modules():
        if isinstance(module, StdConv2d):
            return name, module.standardised()
        if isinstance(module, LinearStem | nn.Conv2d):
            return name, module.weight
    raise UsageError(f"a {type(model).__name__} has no layer of filters over pixels")


@torch.no_grad()
def principal_filters(model: nn.Module, count: int = FILTERS) -> Filters:
    """Return the first `count` principal components of the first layer's filters, or as many as there are.

    The mean filter is subtracted first. Raises UsageError for a model without a layer of filters.
    """
    layer, kernels = first_kernels(model)
    filters = kernels.detach().cpu().double().permute(0, 2, 3, 1)
    rows = filters.flatten(1).numpy()
    rows = rows - rows.mean(axis=0)
    _, scale, directions = np.linalg.svd(rows, full_matrices=False)
    count = max(1, min(count, len(scale), len(rows) - 1))  # subtracting the mean removes one degree of freedom
    components = positive_largest(directions[:count]).reshape(count, *filters.shape[1:]).astype(np.float32)
    return Filters(layer, components, shares(scale**2)[:count], len(rows))


@dataclass(frozen=True)
class PatchComponents:
    """The directions in which patch tokens differ most."""

    layer: int | None
    """The layer whose output the tokens are; None: the input of the pool, after the last LayerNorm."""
    mean: np.ndarray
    """float64 [width]."""
    directions: np.ndarray
    """float64 [components, width], of length 1; the largest value of each is positive."""
    explained: np.ndarray
    """float64 [components]: share of the tokens' variance."""
    tokens: int
    """Number of tokens."""


def patch_tokens(model: ViT, images: Tensor, layer: int | None = None) -> Tensor:
    """Return the grid's tokens [batch, rows * columns, width]: the output of a layer, or the input of the pool.

    Raises WeightsError if a value is NaN or infinite.
    """
    with eval_mode(model), torch.no_grad():
        (tokens,) = model.intermediate(images, 1 if layer is None else [layer], norm=layer is None, reshape=False)
    return finite(tokens, "output for a patch")


def patch_components(
    model: ViT, batches: Iterable[Tensor], count: int = 3, layer: int | None = None
) -> PatchComponents:
    """Return the first principal components of the patch tokens of batches of images.

    Memory holds one covariance matrix [width, width]. Raises UsageError if there are no images, for a layer that does
    not exist, and for other networks.
    """
    require_vit(model, "a map of patch tokens")
    width = model.config.width
    total, products, number = np.zeros(width), np.zeros((width, width)), 0
    for images in batches:
        rows = patch_tokens(model, images, layer).flatten(0, 1).cpu().double().numpy()
        total += rows.sum(axis=0)
        products += rows.T @ rows
        number += len(rows)
    if not number:
        raise UsageError("components of patch tokens need images, and there are none")
    mean = total / number
    variance, directions = np.linalg.eigh(products / number - np.outer(mean, mean))  # ascending
    variance, directions = np.maximum(variance[::-1], 0.0), directions.T[::-1]
    return PatchComponents(layer, mean, positive_largest(directions[:count]), shares(variance)[:count], number)


def positive_largest(directions: np.ndarray) -> np.ndarray:
    """Return directions [count, width] with their signs chosen so that the largest value of each is positive.

    The sign of a principal component is arbitrary. This choice makes it the same on every machine.
    """
    largest = np.take_along_axis(directions, np.abs(directions).argmax(axis=1)[:, None], axis=1)
    return directions * np.where(largest < 0, -1.0, 1.0)


def shares(variance: np.ndarray) -> np.ndarray:
    """Return each component's share of the whole variance."""
    return variance / max(variance.sum(), np.finfo(np.float64).tiny)


def component_maps(model: ViT, images: Tensor, found: PatchComponents) -> np.ndarray:
    """Return the coordinate of each patch along each component, float32 [batch, components, rows, columns]."""
    tokens = patch_tokens(model, images, found.layer).cpu().double().numpy()
    along = (tokens - found.mean) @ found.directions.T
    return along.transpose(0, 2, 1).reshape(len(images), -1, *model.grid(images)).astype(np.float32)
