"""Principal components of the first layer's filters (paper, Figure 7, left).

A filter holds the weights of one feature over the pixels of a patch. The principal components are the patterns that
make up most of the filters: "a low-dimensional representation of the fine structure within each patch".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.inspection.patches import positive_largest, shares
from vitrail.model.stdconv import StdConv2d
from vitrail.model.stem import LinearStem

COUNT = 28
"""Number of components in the paper's figure."""


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
def principal_filters(model: nn.Module, count: int = COUNT) -> Filters:
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
