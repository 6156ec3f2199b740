"""`Conversion`: one of our tensors and what it is made of in another library's file, in both directions.

A format is a list of conversions. Loading applies `read`, saving applies `write`, and as both stand next to each
other they cannot drift apart: a name is written once, and a file that was read can be written back.

| theirs | ours |
|---|---|
| flax `Dense`: kernel [in, out] | `Linear`: weight [out, in] |
| flax `Conv`: kernel [height, width, in, out] | `Conv2d`: weight [out, in, height, width] |
| query, key and value of their own | one weight [3 * width, width], in this order |
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
    """Where one tensor of a model comes from, and how it goes back."""

    ours: str
    """Name in the model's `state_dict()`."""
    theirs: tuple[str, ...]
    """Names in the foreign file, in the order in which `read` takes the tensors."""
    read: Callable[..., Tensor]
    """Foreign tensors -> ours. A view where that is possible: the loader makes it the model's own."""
    write: Callable[[Tensor], tuple[Tensor, ...]]
    """Ours -> foreign tensors, the inverse of `read`; they do not share memory with each other."""
    reshape: bool = False
    """May `read` return the model's values in another shape? The loader then gives them the model's."""


def same(ours: str, theirs: str) -> Conversion:
    """The same tensor under another name."""
    return Conversion(ours, (theirs,), _keep, _alone)


def same_pair(ours: str, theirs: str) -> list[Conversion]:
    """`.weight` and `.bias` of the same layer."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")]


def turned(ours: str, theirs: str) -> Conversion:
    """A matrix stored the other way round: [in, out] in the file, [out, in] here."""
    return Conversion(ours, (theirs,), _turn, lambda tensor: (_turn(tensor),))


def dense(ours: str, theirs: str) -> list[Conversion]:
    """A flax `Dense` {kernel [in, out], bias [out]} and a linear layer {weight [out, in], bias [out]}."""
    return [turned(f"{ours}.weight", f"{theirs}/kernel"), same(f"{ours}.bias", f"{theirs}/bias")]


def conv_kernel(ours: str, theirs: str) -> Conversion:
    """A convolution's kernel: [height, width, in, out] in the file, [out, in, height, width] here."""
    return Conversion(ours, (theirs,), _to_oihw, lambda tensor: (tensor.permute(2, 3, 1, 0),))


def scale_bias(ours: str, theirs: str, names: tuple[str, str] = ("scale", "bias")) -> list[Conversion]:
    """A normalisation's weight and bias, which flax names scale and bias (BiT: gamma and beta)."""
    return [same(f"{ours}.{part}", f"{theirs}/{name}") for part, name in zip(("weight", "bias"), names, strict=True)]


def reshaped(ours: str, theirs: str, shape_theirs: tuple[int, ...]) -> Conversion:
    """The same values in the same order; `shape_theirs` in the file, the model's own shape here."""
    return Conversion(ours, (theirs,), _keep, lambda tensor: (tensor.reshape(shape_theirs),), reshape=True)


def joined(ours: str, theirs: tuple[str, ...], dim: int = 0) -> Conversion:
    """Tensors of one shape that are separate in the file and stand behind each other along `dim` here."""

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
    """The shape of a tensor that must be there. Raises WeightsError naming it."""
    shape = archive.shape(name)
    if len(shape) != dimensions or 0 in shape:
        raise WeightsError(f"{archive.path} has {name!r} in shape {shape}; it should have {dimensions} dimensions")
    return shape


def rows(archive: Archive, name: str) -> int:
    """Rows of a matrix, 0 where the archive does not have it."""
    return shape_of(archive, name, 2)[0] if name in archive else 0


def stem_sizes(archive: Archive, name: str) -> tuple[int, int, int]:
    """Width, channels and patch of a linear stem's kernel. Raises WeightsError for patches that are not square."""
    width, channels, height, patch = shape_of(archive, name, 4)
    if height != patch:
        raise WeightsError(f"{archive.path} has patches of {height} x {patch} pixels ({name!r}); here they are square")
    return width, channels, patch


def square_side(archive: Archive, name: str, cells: int) -> int:
    """Side of a square grid of so many cells, which `name` has. Raises WeightsError where there is none."""
    side = math.isqrt(max(cells, 0))
    if cells < 1 or side * side != cells:
        raise WeightsError(
            f"{archive.path} has a table for {cells} patches ({name!r}), which is no square grid, and says nowhere "
            "which other grid it is"
        )
    return side


def usual_heads(archive: Archive, width: int) -> tuple[int, str]:
    """The number of heads that published models of a width have, and the sentence that says so.

    No tensor's shape depends on it. Raises WeightsError for a width that no such number fits.
    """
    named = {size[0]: size[2] for size in SIZES.values()}
    if width in named:
        return named[width], f"{named[width]} heads, as published models of width {width} have"
    if width % 64:
        raise WeightsError(
            f"{archive.path} does not say how many heads its {width} features are split into, and 64 features a "
            "head, the usual number, do not fit: give a folder with the model's config.json"
        )
    return width // 64, f"{width // 64} heads of 64 features"
