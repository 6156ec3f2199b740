"""The network as it is exported: a graph for one image size or for any, with all constants computed in advance.

The input is uint8 images, or normalised bands (`Card.input_type`). The normalisation of uint8 images is part of the
first layer or precedes it. Kernels are standardised, norms and LayerScale are folded into adjacent layers
(`vitrail.model.fast.frozen`). Positions are computed for the one size, or resampled inside the graph.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from vitrail.errors import ExportError
from vitrail.exports.kinds import INPUT, OutputName, reason
from vitrail.model.build import freeze
from vitrail.model.compute import attention_path
from vitrail.model.posemb import Grid, Positions
from vitrail.model.resnet import ResNet
from vitrail.model.stem import LinearStem
from vitrail.model.vit import ViT
from vitrail.ranges import LARGEST_SIDE
from vitrail.tasks.catalog import task_of
from vitrail.weights.card import Card

EXAMPLES = 2
"""Number of images to trace with. With a single image torch would fix the batch size to 1."""


def trace(
    model: ViT | ResNet,
    size: tuple[int, int],
    output: OutputName,
    dtype: torch.dtype,
    *,
    any_size: bool = False,
    single: bool = False,
    attention: Literal["fused", "explicit"] = "fused",
) -> ExportedProgram:
    """Return the program images [batch, channels, *size] -> `output` of a model, for any batch size, or for one image.

    Images are uint8, or float32 where the card says so (`Card.input_type`).
    `size` is in pixels; with `any_size`, height and width may be any multiples of `step_of_size`. `attention` is the
    path by which attention is computed, for every machine the same. Raises UsageError for a size that does not fit the
    model, and ExportError, with torch's reason, if torch cannot write the network as a graph.
    """
    network = Exportable(model, size, output, dtype, any_size=any_size)
    place = next(model.parameters()).device
    shape = (1 if single else EXAMPLES, model.config.channels, *size)
    example = torch.zeros(shape, dtype=_input_type(model.card), device=place)
    shapes: dict[int, Any] = {0: Dim("batch", min=1)}
    if any_size:
        step = step_of_size(model)
        # one patch, or what leaves a ResNet two positions to compute on
        smallest = step if isinstance(model, ViT) else 4 * 2 ** (len(model.config.units) - 1) + 1
        sides = (Dim(name, min=smallest // step, max=LARGEST_SIDE // step) for name in ("rows", "columns"))
        shapes |= {place: step * side for place, side in enumerate(sides, start=2)}
    try:
        with torch.no_grad(), attention_path(attention):
            return export(network, (example,), dynamic_shapes=None if single else {INPUT: shapes}, strict=False)
    except Exception as error:  # traced code may raise anything: torch has no common class for it
        raise ExportError(f"torch.export cannot trace this network: {reason(error)}") from error


def _input_type(card: Card | None) -> torch.dtype:
    return torch.uint8 if card is None or card.input_type == "uint8" else torch.float32


def step_of_size(model: ViT | ResNet) -> int:
    """Return the number of pixels that must divide height and width in a program for any size."""
    return model.config.patch if isinstance(model, ViT) else 1


def outputs_per_image(traced: ExportedProgram) -> int:
    """Return the number of outputs that a traced program computes for each image."""
    (result,) = traced.graph.output_node().args[0]  # type: ignore[misc]
    return int(result.meta["val"].shape[1])


def compute(network: ViT | ResNet, images: Tensor, output: OutputName, card: Card | None) -> Tensor:
    """Return `output` of a network, float32 [batch, classes or features], for its images.

    The "probabilities" of a network that predicts numbers are these, in the units of its data.

    card: That of the network, with the temperature of its probabilities.
    """
    if output == "features":
        return network.features(images).float()
    logits = network(images).float()
    if output == "logits":
        return logits
    if card is None:
        return logits.softmax(dim=1)
    return task_of(card).activated(logits, card)


class Exportable(nn.Module):
    """images [batch, channels, *size] -> `output`, float32 [batch, classes or features].

    With `any_size`, positions are resampled for the size of the images. Raises UsageError for a size in pixels (height,
    width) that does not fit the model.
    """

    def __init__(
        self, model: ViT | ResNet, size: tuple[int, int], output: OutputName, dtype: torch.dtype, *, any_size: bool
    ) -> None:
        super().__init__()
        self.output, self.card = output, model.card
        self.network = freeze(model, dtype, portable=True)
        if isinstance(model, ViT) and isinstance(self.network, ViT):
            if isinstance(model.stem, LinearStem):  # folded in its own type, then rounded to dtype
                self.network.stem = PatchConvolution(model.stem, _input_type(self.card)).to(dtype)
            example = torch.empty(1, model.config.channels, *size, device="meta")
            if not any_size and not model.are_strips(example):
                fixed = FixedPositions(self.network.positions, model.grid(example))
                self.network.positions = fixed  # type: ignore[assignment]
        elif isinstance(self.network, ResNet):
            self.network.root_pool = BorderedPool()

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return compute(self.network, images, self.output, self.card)  # type: ignore[arg-type]


class PatchConvolution(nn.Module):
    """A `LinearStem` as one convolution, with the normalisation of uint8 images folded into its weight and bias."""

    folds_normalisation = True

    def __init__(self, stem: LinearStem, input_type: torch.dtype) -> None:
        super().__init__()
        weight, bias = stem.weights_for(input_type)
        self.middle = 128 if input_type == torch.uint8 else 0
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.patch = stem.patch

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, H, W] -> [batch, width, H/patch, W/patch]"""
        return F.conv2d(images.to(self.weight.dtype) - self.middle, self.weight, self.bias, stride=self.patch)


class BorderedPool(nn.Module):
    """`RootPool` with its border of zeros concatenated to the maps.

    ONNX Runtime (1.31) mistakes zeros that are padded before a maximum for the maximum's own padding, which is -inf.
    """

    def forward(self, maps: Tensor) -> Tensor:
        """See `RootPool`."""
        row = torch.zeros_like(maps[:, :, :1])
        maps = torch.cat([row, maps, row], dim=2)
        column = torch.zeros_like(maps[:, :, :, :1])
        return F.max_pool2d(torch.cat([column, maps, column], dim=3), kernel_size=3, stride=2)


class FixedPositions(nn.Module):
    """The position embeddings that `Positions` adds to the tokens of one grid, computed in advance."""

    def __init__(self, positions: Positions, grid: Grid) -> None:
        super().__init__()
        self.at_input, self.copies, self.needs_grid = positions.at_input, positions.copies, positions.needs_grid
        if self.needs_grid:
            self.positions = positions  # the blocks compute with it; as a submodule it is traced
        with torch.no_grad():
            for layer in (None,) if self.at_input else range(self.copies):
                tokens = positions.tokens(layer, grid)
                self.register_buffer(f"tokens_{layer or 0}", None if tokens is None else tokens.clone())

    def added(self, layer: int | None, grid: Grid) -> Tensor | None:
        """See `Positions.added`."""
        if (layer is None) != self.at_input:
            return None
        return getattr(self, f"tokens_{(layer or 0) % self.copies}")
