"""The network as it is handed to another runtime: for one image size, with all that does not depend on the image done.

uint8 images go in; the normalisation is part of the first layer or in front of it, kernels are standardised, norms and
LayerScale folded into the layers beside them (`vitrail.model.frozen`), and positions are looked up for this size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.exports.kinds import Output
from vitrail.model.frozen import freeze
from vitrail.model.posemb import Grid, Positions
from vitrail.model.resnet.network import ResNet
from vitrail.model.stems.patch import LinearStem
from vitrail.model.vit import ViT


class Exportable(nn.Module):
    """uint8 images [batch, channels, *size] -> `output`, float32 [batch, classes or features].

    Raises UsageError for a size in pixels (height, width) that does not fit the model.
    """

    def __init__(self, model: ViT | ResNet, size: tuple[int, int], output: Output, dtype: torch.dtype) -> None:
        super().__init__()
        self.output = output
        self.network = freeze(model, dtype, portable=True)
        if isinstance(model, ViT) and isinstance(self.network, ViT):
            if isinstance(model.stem, LinearStem):  # folded in the type it is in, then rounded
                self.network.stem = PatchConvolution(model.stem).to(dtype)
            grid = model.grid(torch.empty(model.config.channels, *size, device="meta"))
            fixed = FixedPositions(self.network.positions, grid)
            self.network.positions = fixed  # type: ignore[assignment]
        elif isinstance(self.network, ResNet):
            self.network.root_pool = BorderedPool()

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        if self.output == "features":
            return self.network.features(images).float()  # type: ignore[operator]
        logits = self.network(images).float()
        return logits.softmax(dim=1) if self.output == "probabilities" else logits


class PatchConvolution(nn.Module):
    """A `LinearStem` as the one convolution that it is, with the normalisation of uint8 images folded into it."""

    folds_pixels = True

    def __init__(self, stem: LinearStem) -> None:
        super().__init__()
        weight, bias = stem.weight.detach(), stem.bias.detach()
        self.weight = nn.Parameter(weight * stem.scale, requires_grad=False)
        self.bias = nn.Parameter(bias + (weight * stem.shift).sum((1, 2, 3)), requires_grad=False)
        self.patch = stem.patch

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [batch, channels, H, W] -> [batch, width, H/patch, W/patch]"""
        return F.conv2d(images.to(self.weight.dtype) - 128, self.weight, self.bias, stride=self.patch)


class BorderedPool(nn.Module):
    """`RootPool`, its zeros as a part of the map.

    Zeros that are padded in front of a maximum ONNX Runtime (1.31) takes for the maximum's own padding, which is -inf.
    """

    def forward(self, maps: Tensor) -> Tensor:
        """See `RootPool`."""
        row = torch.zeros_like(maps[:, :, :1])
        maps = torch.cat([row, maps, row], dim=2)
        column = torch.zeros_like(maps[:, :, :, :1])
        return F.max_pool2d(torch.cat([column, maps, column], dim=3), kernel_size=3, stride=2)


class FixedPositions(nn.Module):
    """What `Positions` add to the tokens of one grid, computed beforehand."""

    def __init__(self, positions: Positions, grid: Grid) -> None:
        super().__init__()
        self.at_input, self.copies = positions.at_input, positions.copies
        if positions.config.positions in ("relative", "relative_bias"):
            self.positions = positions  # the blocks ask it for biases; here its tables are found
        with torch.no_grad():
            for layer in (None,) if self.at_input else range(self.copies):
                tokens = positions.tokens(layer, grid)
                self.register_buffer(f"tokens_{layer or 0}", None if tokens is None else tokens.clone())

    def tokens(self, layer: int | None, grid: Grid) -> Tensor | None:
        """See `Positions.tokens`."""
        if (layer is None) != self.at_input:
            return None
        return getattr(self, f"tokens_{(layer or 0) % self.copies}")
