"""Heads that tell the class of each patch: images -> logits [batch, classes, rows, columns].

A head is called with the network, whose tokens it asks for (`ViT.intermediate`), so that it may read several layers or
add tokens of its own in the last blocks. The caller enlarges the logits bilinearly to the pixels.

* linear: a linear layer on the last layer's tokens after the final norm (Strudel et al. 2021, "Segmenter", section 3.2,
  "linear"; DINOv2's has a BatchNorm in front of it).
* layers: the tokens of the last four layers, each after the final norm, next to each other (Oquab et al. 2023, DINOv2,
  section 7.4, "+ms"), then progressive upsampling by two 3 x 3 convolutions that double the sides (Zheng et al. 2021,
  SETR, section 3.2, "PUP", which doubles them four times and has BatchNorm where LayerNorm stands here, so that the
  network is the same for any number of processes).
* queries: `vitrail.model.queries`, whose loss is `vitrail.objective.queries`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model.layers import zero_linear
from vitrail.model.variants import ViTConfig

LAYERS = 4
"""Number of last layers whose tokens the head "layers" reads."""
WIDTH = 256
"""Largest number of channels of its convolutions."""
DOUBLED = 2
"""Number of times that it doubles the sides."""


class PixelHead(nn.Module, ABC):
    """A head for the classes of patches."""

    @abstractmethod
    def forward(self, network: Any, images: Tensor) -> Tensor:
        """Return the logits [batch, classes, rows, columns] of images [batch, channels, height, width].

        network: The `ViT` that the head belongs to.
        """


class MappedPixels(PixelHead):
    """A head that reads maps of the network's tokens, once."""

    @property
    @abstractmethod
    def first(self) -> nn.Linear | nn.Conv2d:
        """The layer that reads the maps."""

    def forward(self, network: Any, images: Tensor) -> Tensor:
        """See `PixelHead`."""
        return self.classify(self.maps(network, images))

    @abstractmethod
    def maps(self, network: Any, images: Tensor) -> Tensor:
        """Return the tokens that the head reads, [batch, width, rows, columns]."""

    @abstractmethod
    def classify(self, maps: Tensor) -> Tensor:
        """Return the logits of `maps`."""


class LinearPixels(MappedPixels):
    """See the module, "linear". It starts at zero, as classifiers do."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.linear = zero_linear(config.width, config.classes)

    @property
    def first(self) -> nn.Linear:
        """See `MappedPixels`."""
        return self.linear

    def maps(self, network: Any, images: Tensor) -> Tensor:
        """See `MappedPixels`."""
        (tokens,) = network.intermediate(images, norm=True)
        return tokens

    def classify(self, maps: Tensor) -> Tensor:
        """See `MappedPixels`."""
        return _classified(self.linear, maps)


class LayeredPixels(MappedPixels):
    """See the module, "layers". Its last layer starts at zero."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.layers = min(LAYERS, config.depth)
        width = min(WIDTH, config.width)
        self.reduce = nn.Conv2d(self.layers * config.width, width, 1)
        self.enlarge = nn.ModuleList(_Convolved(width) for _ in range(DOUBLED))
        self.linear = zero_linear(width, config.classes)

    @property
    def first(self) -> nn.Conv2d:
        """See `MappedPixels`."""
        return self.reduce

    def maps(self, network: Any, images: Tensor) -> Tensor:
        """See `MappedPixels`."""
        return torch.cat(network.intermediate(images, self.layers, norm=True), dim=1)

    def classify(self, maps: Tensor) -> Tensor:
        """See `MappedPixels`."""
        maps = self.reduce(maps)
        *first, last = self.enlarge
        for convolved in first:
            maps = _doubled(convolved(maps))
        # the classifier comes before the last doubling: they commute, and classes are fewer than channels
        return _doubled(_classified(self.linear, last(maps)))


def _classified(linear: nn.Linear, maps: Tensor) -> Tensor:
    """[batch, width, h, w] -> [batch, classes, h, w]"""
    logits: Tensor = linear(maps.permute(0, 2, 3, 1))
    return logits.permute(0, 3, 1, 2)


def _doubled(maps: Tensor) -> Tensor:
    """[batch, width, h, w] -> [batch, width, 2 h, 2 w]"""
    return nn.functional.interpolate(maps, scale_factor=2, mode="bilinear", align_corners=False)


class _Convolved(nn.Module):
    """3 x 3 convolution, norm and GELU: [batch, width, h, w] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(1, width)

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        return nn.functional.gelu(self.norm(self.conv(maps)))
