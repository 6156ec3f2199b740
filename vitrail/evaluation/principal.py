"""Principal directions of the training images' standardised features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vitrail.device import fast_float32

VALUES = 1 << 24
"""Maximum number of features, and of logits, that are computed at a time."""
_ROWS = 4096
_RANK = 1e-12
"""Share of the largest variance below which a direction of few images is constant, up to rounding."""


@dataclass(frozen=True)
class Principal:
    """The statistics that standardise features [N, D], and their R = min(N, D) principal directions at most."""

    mean: Tensor
    """float32 [D]"""
    deviation: Tensor
    """float32 [D]: the population deviation; 1 for a constant feature"""
    variance: Tensor
    """float64 [R]: along each direction, at least 0"""
    axes: Tensor
    """float32 [D, R]: the directions as orthonormal columns"""

    @classmethod
    @fast_float32()
    def of(cls, features: Tensor, rows: Tensor, device: torch.device) -> Self:
        """Return the statistics of the images `rows` of features [N, D], computed on `device`.

        The eigenvalue problem has the size of the covariance, or of the images' inner products if that is smaller.
        """
        mean, deviation = (part.float() for part in _statistics(features, rows, device))
        if len(rows) >= features.shape[1]:
            covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=device)
            for part in parts(rows, features.shape[1]):
                x = (features[part].to(device) - mean) / deviation
                covariance += x.T @ x
            variance, axes = torch.linalg.eigh(covariance / len(rows))
        else:
            variance, axes = _dual(features, rows, mean, deviation)
        return cls(mean, deviation, variance.clamp_min(0.0), axes.float())


def parts(rows: Tensor, width: int) -> Iterator[Tensor]:
    """Yield `rows` in parts for which matrices of `width` columns stay small."""
    yield from rows.split(max(1, min(_ROWS, VALUES // width)))


def _statistics(features: Tensor, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and population deviation of each feature, float64 [D]; the deviation of a constant feature is 1."""
    mean = torch.zeros(features.shape[1], dtype=torch.float64, device=device)
    squares = torch.zeros_like(mean)
    for part in parts(rows, len(mean)):
        mean += features[part].to(device).sum(dim=0, dtype=torch.float64)
    mean /= len(rows)
    for part in parts(rows, len(mean)):
        squares += (features[part].to(device).double() - mean).square().sum(dim=0)
    deviation = (squares / len(rows)).sqrt()
    deviation[deviation < 1e-12 * mean.abs().clamp_min(1.0)] = 1.0
    return mean, deviation


def _dual(features: Tensor, rows: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances and axes from the inner products of the images, for fewer images than features.

    With X = U S V', the products are X X' = U S^2 U' and the axes V = X' U / S. Directions without variance are left
    out: no image has a part in them, so the optimal weights have none either.
    """
    columns = torch.arange(features.shape[1]).split(max(1, VALUES // features.shape[1]))

    def standardised(part: Tensor) -> Tensor:
        x = features[rows[:, None], part].to(mean.device)
        return ((x - mean[part]) / deviation[part]).double()

    products = sum(x @ x.T for x in map(standardised, columns))
    squares, left = torch.linalg.eigh(products)
    real = squares > _RANK * squares[-1].clamp_min(_RANK)
    squares, left = squares[real], left[:, real] / squares[real].sqrt()
    return squares / len(rows), torch.cat([standardised(part).T @ left for part in columns])
