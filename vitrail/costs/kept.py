"""Counting what a forward pass keeps for the backward pass: which tensors, in how many bytes.

The bytes depend on how a device computes, in two ways:

* accelerators attend with a fused kernel, which keeps q, k, v, its output and one number per query instead of the
  maps; under autocast their norms work in float32, so what a norm reads and a product reads are two tensors;
* a CPU keeps the maps of up to `LONGEST_EXPLICIT` tokens (`vitrail.model.attention`), computes the GELU again in
  float32, and normalises in the type of the products (`vitrail.model.layers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "float32"]
INDEX = 8
"""Bytes of the place of a maximum."""
STATISTIC = 4
"""Bytes of a mean, of 1 / std, of the logarithm of a softmax's sum."""


@dataclass(frozen=True)
class Arithmetic:
    """How a device trains, as far as it decides what is kept. bf16 is autocast with float32 weights."""

    precision: Precision = "bf16"
    cpu: bool = False

    @property
    def product(self) -> int:
        """Bytes of a value that goes into or comes out of a matrix product."""
        return 2 if self.precision == "bf16" else 4

    @property
    def norm(self) -> int:
        """Bytes of a value that goes into a LayerNorm or a GroupNorm."""
        return self.product if self.cpu else 4

    @property
    def casts(self) -> bool:
        """Is what comes out of a norm cast for the product that follows?"""
        return self.norm != self.product


@dataclass
class Kept:
    """Adds up bytes, for one image, as the operations that keep them are named."""

    arithmetic: Arithmetic
    bytes: int = 0

    def product(self, values: int) -> None:
        """Values that go into or come out of matrix products and convolutions."""
        self.bytes += values * self.arithmetic.product

    def normal(self, values: int) -> None:
        """Values that go into a norm, or come out of one into an activation."""
        self.bytes += values * self.arithmetic.norm

    def statistics(self, count: int) -> None:
        """Mean and 1 / std of so many normalised vectors or groups."""
        self.bytes += 2 * STATISTIC * count

    def sums(self, count: int) -> None:
        """One number per query of fused attention."""
        self.bytes += STATISTIC * count

    def indices(self, count: int) -> None:
        """Where each maximum of a max pool was."""
        self.bytes += INDEX * count

    def mask(self, values: int, size: int) -> None:
        """Which of so many values of `size` bytes dropout keeps; a CPU holds the factors themselves."""
        self.bytes += values * (size if self.arithmetic.cpu else 1)

    def cast(self, values: int, times: int = 1) -> None:
        """Values that a norm left behind and `times` products read, each casting them for itself."""
        if self.arithmetic.casts:
            self.product(values * times)
