"""Rotary positions (Su et al. 2021) of a grid: queries and keys are rotated, so that logits depend on offsets.

The angles and their order are those of EVA-02, RoPE-ViT, the Perception Encoder and DINOv3 in timm and transformers
(`vitrail.model.variants.Rotary`). Angles are computed in float32.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.variants import Rotary, ViTConfig
from vitrail.torch_private import is_observed

Grid = tuple[int, int]


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which the features of each token are rotated.

    cos, sin [tokens, heads or 1, features] or [batch, tokens, heads or 1, features], in float32.
    """

    cos: Tensor
    sin: Tensor
    halves: bool
    """Whether feature i and feature i + features / 2 are a pair; otherwise neighbours are."""

    def turn(self, x: Tensor) -> Tensor:
        """Rotate the features of the first n tokens: x [batch, n, ..., heads, features] -> the same shape."""
        cos, sin = (values[..., : x.shape[1], :, :] for values in (self.cos, self.sin))
        if x.dim() == 5:  # queries and keys together, [batch, n, 2, heads, features]
            cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        if self.halves:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        else:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return (x * cos + turned * sin).to(x.dtype)

    def extended(self, count: int) -> Rotation:
        """Return the rotation for `count` more tokens at the end, which are rotated by 0."""
        padding = (0, 0, 0, 0, 0, count)
        return Rotation(F.pad(self.cos, padding, value=1.0), F.pad(self.sin, padding), self.halves)

    def for_branches(self, branches: int) -> Rotation:
        """Return the rotation of the heads of all branches of a parallel block."""
        if self.cos.shape[-2] == 1:
            return self
        cos, sin = (torch.cat([values] * branches, dim=-2) for values in (self.cos, self.sin))
        return Rotation(cos, sin, self.halves)


class RotaryPositions(nn.Module):
    """The rotation of every layer's queries and keys. Axial frequencies are fixed, mixed ones are learned."""

    def __init__(self, config: ViTConfig, settings: Rotary) -> None:
        super().__init__()
        self.settings, self.prefix = settings, config.prefix
        self.features = config.width // config.heads
        self.frequencies = None
        if settings.frequencies == "mixed":
            self.frequencies = nn.Parameter(torch.empty(config.depth, 2, config.heads, self.features // 2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial mixed frequencies as RoPE-ViT does: axial ones, with axes rotated at random in each head."""
        if self.frequencies is None:
            return
        table = self.frequencies
        angle = torch.rand(*table[:, 0, :, :1].shape, device=table.device) * 2 * math.pi
        angles = torch.cat([angle, angle + math.pi / 2], dim=-1).repeat_interleave(self.features // 4, dim=-1)
        sizes = _bands(self.settings.base, self.features, table.device).repeat(2)
        table.copy_(torch.stack([angles.cos(), angles.sin()], dim=1) * sizes)

    def forward(self, layer: int, places: Tensor, grid: Grid) -> Rotation:
        """Return the rotation of all tokens. places [(batch,) tokens - prefix] are raster indices in `grid`."""
        halves = self.settings.pairs == "halves"
        if self.frequencies is not None:
            numbers = (places // grid[1]).float(), (places % grid[1]).float()
            first, second = numbers if self.settings.first == "row" else numbers[::-1]
            along = self.frequencies[layer].float()  # [2, heads, features / 2]
            angles = first[..., None, None] * along[0] + second[..., None, None] * along[1]
            cos, sin = (_paired(values, halves) for values in (angles.cos(), angles.sin()))
        else:
            keeps = all(type(side) is int for side in grid) and not torch.compiler.is_compiling() and not is_observed()
            tables = _kept_tables if keeps else _tables
            cos, sin = (table[places] for table in tables(self.settings, grid, self.features, places.device))
        if self.prefix:  # tokens in front are rotated by 0
            front = (*cos.shape[:-3], self.prefix, *cos.shape[-2:])
            cos = torch.cat([cos.new_ones(front), cos], dim=-3)
            sin = torch.cat([sin.new_zeros(front), sin], dim=-3)
        return Rotation(cos, sin, halves)


def _bands(base: float, features: int, device: torch.device) -> Tensor:
    """Return the frequencies base^(-4 i / features) of one coordinate, [features / 4]."""
    exponents = torch.arange(features // 4, dtype=torch.float32, device=device) / (features // 4)
    return 1.0 / base**exponents


def _paired(values: Tensor, halves: bool) -> Tensor:
    """Give both features of a pair its value: [..., features / 2] -> [..., features]."""
    return torch.cat([values, values], dim=-1) if halves else torch.stack([values, values], dim=-1).flatten(-2)


def _along(settings: Rotary, side: int, reference: int | None, device: torch.device) -> Tensor:
    """Return the coordinates of the rows or the columns of a grid with `side` of them."""
    numbers = torch.arange(side, device=device).float()
    if settings.coordinates == "centred":
        return ((numbers + 0.5 + settings.offset) / side * 2 - 1) * (2 * math.pi)
    numbers = numbers + settings.offset
    return numbers if reference is None else numbers / side * reference


def _tables(settings: Rotary, grid: Grid, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the axial angles of all places, [rows * columns, 1, features] each."""
    references = settings.reference or (None, None)
    lines = [_along(settings, side, of, device) for side, of in zip(grid, references, strict=True)]
    row, column = torch.meshgrid(*lines, indexing="ij")
    both = (row, column) if settings.first == "row" else (column, row)
    bands = _bands(settings.base, features, device)
    angles = torch.cat([axis.reshape(-1, 1, 1) * bands for axis in both], dim=-1)
    halves = settings.pairs == "halves"
    return _paired(angles.cos(), halves), _paired(angles.sin(), halves)


@lru_cache(maxsize=8)
def _kept_tables(settings: Rotary, grid: Grid, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # training may use tables that evaluation made
        return _tables(settings, grid, features, device)
