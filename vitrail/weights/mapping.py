"""`Conversion`: how one tensor of a model is made from tensors of another library's file, and converted back.

A format is a list of conversions. Loading applies `read`, saving applies `write`. A name is written only once, and a
file that was read can be written back. Below are the sizes of a model that shapes in a file reveal.

| theirs | ours |
|---|---|
| flax `Dense`: kernel [in, out] | `Linear`: weight [out, in] |
| flax `Conv`: kernel [height, width, in, out] | `Conv2d`: weight [out, in, height, width] |
| separate query, key and value | one weight [3 * width, width], in this order |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.variants import SIZES
from vitrail.weights.archive import Archive


@dataclass(frozen=True)
class Conversion:
    """The conversion of one tensor of a model from another library's file, and back."""

    ours: str
    """Name in the model's `state_dict()`."""
    theirs: tuple[str, ...]
    """Names in the foreign file, in the order in which `read` takes the tensors."""
    read: Callable[..., Tensor]
    """Foreign tensors -> the model's tensor, as a view if possible; the loader copies it if necessary."""
    write: Callable[[Tensor], tuple[Tensor, ...]]
    """The model's tensor -> foreign tensors, the inverse of `read`; they do not share memory with each other."""
    reshape: bool = False
    """Whether `read` may return the values in another shape; the loader then reshapes them to the model's."""


def same(ours: str, theirs: str) -> Conversion:
    """Return the conversion of a tensor that only has another name in the file."""
    return Conversion(ours, (theirs,), _keep, _alone)


def same_pair(ours: str, theirs: str) -> list[Conversion]:
    """Return the conversions of `.weight` and `.bias` of a layer that only has another name in the file."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def turned(ours: str, theirs: str) -> Conversion:
    """Return the conversion of a transposed matrix: [in, out] in the file, [out, in] in the model."""
    return Conversion(ours, (theirs,), _turn, lambda tensor: (_turn(tensor),))


def dense(ours: str, theirs: str) -> list[Conversion]:
    """Return the conversions of a flax `Dense` {kernel [in, out], bias [out]} to a linear layer."""
    return [turned(f"{ours}.weight", f"{theirs}/kernel"), same(f"{ours}.bias", f"{theirs}/bias")]


def conv_kernel(ours: str, theirs: str) -> Conversion:
    """Return the conversion of a kernel [height, width, in, out] in the file to [out, in, height, width]."""
    return Conversion(ours, (theirs,), _to_oihw, lambda tensor: (tensor.permute(2, 3, 1, 0),))


def scale_bias(ours: str, theirs: str, names: tuple[str, str] = ("scale", "bias")) -> list[Conversion]:
    """Return the conversions of a norm's weight and bias, which flax names scale and bias (BiT: gamma and beta)."""
    return [same(f"{ours}.{part}", f"{theirs}/{name}") for part, name in zip(("weight", "bias"), names, strict=True)]


def reshaped(ours: str, theirs: str, shape_theirs: tuple[int, ...]) -> Conversion:
    """Return the conversion of a tensor that has the shape `shape_theirs` in the file and equal values, in order."""
    return Conversion(ours, (theirs,), _keep, lambda tensor: (tensor.reshape(shape_theirs),), reshape=True)


def joined(ours: str, theirs: tuple[str, ...], dim: int = 0) -> Conversion:
    """Return the conversion of tensors that are separate in the file and concatenated along `dim` in the model."""

    def read(*parts: Tensor) -> Tensor:
        return torch.cat(parts, dim)

    def write(tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in tensor.chunk(len(theirs), dim))

    return Conversion(ours, theirs, read, write)


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _alone(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _turn(tensor: Tensor) -> Tensor:
    return tensor.mT


def _to_oihw(kernel: Tensor) -> Tensor:
    return kernel.permute(3, 2, 0, 1)


def shape_of(archive: Archive, name: str, dimensions: int) -> tuple[int, ...]:
    """Return the shape of a required tensor. Raises WeightsError unless it has this number of dimensions."""
    shape = archive.shape(name)
    if len(shape) != dimensions or 0 in shape:
        raise WeightsError(f"{archive.path} has {name!r} in shape {shape}; it should have {dimensions} dimensions")
    return shape


def rows(archive: Archive, name: str) -> int:
    """Return the number of rows of a matrix, 0 if the archive lacks it."""
    return shape_of(archive, name, 2)[0] if name in archive else 0


def stem_sizes(archive: Archive, name: str) -> tuple[int, int, int]:
    """Return width, channels and patch of a linear stem. Raises WeightsError for patches that are not square."""
    width, channels, height, patch = shape_of(archive, name, 4)
    if height != patch:
        raise WeightsError(
            f"{archive.path} has patches of {height} x {patch} pixels ({name!r}); only square patches are supported"
        )
    return width, channels, patch


def square_side(archive: Archive, name: str, cells: int) -> int:
    """Return the side of the square grid of `cells` patches that the table `name` is for. Raises WeightsError."""
    side = math.isqrt(max(cells, 0))
    if cells < 1 or side * side != cells:
        raise WeightsError(
            f"{archive.path} has a table for {cells} patches ({name!r}), which is not a square grid, and does not say "
            "which grid it is"
        )
    return side


def usual_heads(archive: Archive, width: int) -> tuple[int, str]:
    """Return the number of heads of published models with this width, and a sentence for the load report.

    No tensor's shape depends on it. Raises WeightsError if the width is neither a published one nor a multiple of 64.
    """
    named = {size[0]: size[2] for size in SIZES.values()}
    if width in named:
        return named[width], f"{named[width]} heads, as published models of width {width} have"
    if width % 64:
        raise WeightsError(
            f"{archive.path} does not say how many heads its {width} features are split into, and {width} is not a "
            "multiple of the usual 64 features per head. Give a folder with the model's config.json."
        )
    return width // 64, f"{width // 64} heads of 64 features"
