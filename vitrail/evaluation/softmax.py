"""Softmax regression with an L2 penalty, solved to its optimum for one strength of the penalty after the other.

The objective is scikit-learn's: the mean cross-entropy plus l2 / 2 times the squared weights of standardised features,
without a penalty on the bias (scikit-learn's C is 1 / (images * l2)).

L-BFGS needs few steps where the curvature is alike in all directions. The curvature of each class is about `spread`
times the covariance of the features, plus l2, where `spread` is the mean of p (1 - p) over images and classes. So
L-BFGS moves along the principal directions, each measured in units of 1 / sqrt(curvature). The largest strength is
solved first, and each other strength starts from the solution before it. Matrix products are float32, or float64 if
float32 cannot reach the tolerance; sums and steps are float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from vitrail.device import fast_float32

TOLERANCE = 1e-4
"""Largest entry of the gradient at which a solution has converged, as in scikit-learn."""
_EXCESS = 10.0
"""Times the tolerance: how far above its minimum the objective may be, by an estimate, as a share of it. Gradients are
small far from the minimum where classes are separable and the penalty is small."""
ITERATIONS = 1000
"""Maximum number of iterations of L-BFGS for one strength."""
_MEMORY = 10
"""Number of steps from which L-BFGS estimates the curvature, as in scikit-learn."""


@dataclass(frozen=True)
class Classifier:
    """A linear classifier of features."""

    weight: Tensor
    """float32 [K, D]"""
    bias: Tensor
    """float32 [K]: the logits of the mean"""
    mean: Tensor
    """float32 [D]"""

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [B, K] of features [B, D]."""
        return torch.addmm(self.bias, features.to(self.mean.device) - self.mean, self.weight.T)


@dataclass(frozen=True)
class Solution:
    """The classifier that minimises the objective for one strength of the penalty."""

    l2: float
    classifier: Classifier
    objective: float
    """Mean cross-entropy in nats, with the penalty."""
    iterations: int
    converged: bool
    """Whether the largest entry of the gradient is at most the tolerance, and the objective near its minimum."""


@torch.no_grad()
def solve(
    features: np.ndarray,
    labels: np.ndarray,
    rows: np.ndarray,
    strengths: Sequence[float],
    *,
    classes: int,
    device: torch.device | str = "cpu",
    start: Classifier | None = None,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> Iterator[Solution]:
    """Yield the solution for each of `strengths` (above 0), from the largest to the smallest.

    It is trained on the images `rows` of features float32 [N, D] with labels int64 [N]. The features are not copied,
    unless the images are fewer than D: then the images are written in their principal directions. `start` is a
    classifier near the first solution.
    """
    images = Images.of(features, labels, rows, classes, torch.device(device))
    point = images.prior() if start is None else images.coefficients(start)
    spread = images.loss(point, torch.float32)[2]
    for l2 in sorted(strengths, reverse=True):
        descent = Descent(images, l2, spread, tolerance)
        objective, point, taken = descent.minimise(point, iterations)
        spread = descent.spread
        yield Solution(l2, images.classifier(point), objective, taken, descent.converged)


@dataclass(frozen=True)
class Images:
    """Training images, and the cross-entropy of classifiers with coefficients [K, R + 1].

    The coefficients belong to the principal directions of the standardised features; the last one is the bias.
    """

    principal: Principal
    features: Tensor
    """float32 [N, D] as they came, or [N, R] along the principal directions"""
    mean: Tensor
    """float32: of `features`"""
    basis: Tensor | None
    """float32 [D, R]: standardises centred features and turns them to the principal directions, if they need it"""
    labels: Tensor
    """int64 [N]"""
    rows: Tensor
    """int64: those of `features` and `labels` to train on"""
    classes: int

    @classmethod
    @fast_float32()
    def of(cls, features: np.ndarray, labels: np.ndarray, rows: np.ndarray, classes: int, device: torch.device) -> Self:
        """Return the images `rows`, to be classified on `device`."""
        x, y, chosen = (torch.from_numpy(array) for array in (features, labels, rows))
        exact = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
        principal = Principal.of(x, chosen, exact)
        mean, basis = principal.mean.to(device), (principal.axes / principal.deviation[:, None]).to(device)
        if len(rows) >= x.shape[1]:
            return cls(principal, x, mean, basis, y, chosen, classes)
        turned = torch.cat([(x[part].to(device) - mean) @ basis for part in row_blocks(chosen, x.shape[1])])
        none = turned.new_zeros(turned.shape[1])
        return cls(principal, turned, none, None, y[chosen], torch.arange(len(chosen)), classes)

    def prior(self) -> np.ndarray:
        """Return coefficients that predict the share of each class, counting half an image more of each."""
        counts = torch.bincount(self.labels[self.rows], minlength=self.classes).double() + 0.5
        point = np.zeros((self.classes, len(self.principal.variance) + 1))
        point[:, -1] = (counts / counts.sum()).log()
        return point

    def coefficients(self, classifier: Classifier) -> np.ndarray:
        """Return the coefficients of a classifier, less its part without influence on the images."""
        place = self.principal
        weight, bias = classifier.weight.to(place.mean.device), classifier.bias.to(place.mean.device)
        bias = bias + weight @ (place.mean - classifier.mean.to(place.mean.device))
        weight = (weight * place.deviation) @ place.axes
        return torch.cat([weight, bias[:, None]], dim=1).cpu().double().numpy()

    def classifier(self, point: np.ndarray) -> Classifier:
        """Return the classifier with these coefficients."""
        place, device = self.principal, self.mean.device
        coefficients = torch.from_numpy(point).to(place.variance.device)
        weight = coefficients[:, :-1].float() @ place.axes.T / place.deviation
        return Classifier(weight.to(device), coefficients[:, -1].float().to(device), place.mean.to(device))

    def loss(self, point: np.ndarray, dtype: torch.dtype) -> tuple[float, np.ndarray, float]:
        """Return the mean cross-entropy, its gradient [K, R + 1], and the mean of p (1 - p)."""
        device = self.mean.device
        sums = torch.float32 if device.type == "mps" else torch.float64
        basis = None if self.basis is None else self.basis.to(dtype)
        coefficients = torch.from_numpy(point).to(dtype).to(device)  # mps takes no float64
        weight, bias = coefficients[:, :-1], coefficients[:, -1].contiguous()
        weight = weight.contiguous() if basis is None else weight @ basis.T
        slope, bias_slope = torch.zeros_like(weight, dtype=sums), torch.zeros_like(bias, dtype=sums)
        total = torch.zeros(2, dtype=sums, device=device)
        for part in row_blocks(self.rows, max(self.classes, weight.shape[1])):
            x = self.features[part].to(device, dtype).sub_(self.mean)
            label = self.labels[part].to(device)[:, None]
            p = torch.addmm(bias, x, weight.T).log_softmax(dim=1)
            loss = -p.gather(1, label).sum(dtype=sums)
            p = p.exp_()
            total += torch.stack([loss, p.flatten().dot(p.flatten()).to(sums)])
            p.scatter_add_(1, label, -torch.ones_like(label, dtype=dtype))
            slope += p.T @ x
            bias_slope += p.sum(dim=0)
        slope = slope.to(dtype) if basis is None else slope.to(dtype) @ basis
        gradient = torch.cat([slope, bias_slope[:, None].to(dtype)], dim=1).cpu().double().numpy()
        loss, squares = (total.cpu().double() / len(self.rows)).tolist()
        return loss, gradient / len(self.rows), max(1 - squares, 0.0) / self.classes


class Descent:
    """L-BFGS for one strength of the penalty, in units of 1 / sqrt(curvature) of each direction."""

    def __init__(self, images: Images, l2: float, spread: float, tolerance: float) -> None:
        variance = np.append(images.principal.variance.cpu().numpy(), 1.0)
        self._images, self._l2, self._tolerance = images, l2, tolerance
        self._unit = 1 / np.sqrt(spread * variance + l2)
        self._axes, self._dtype = images.principal.axes, torch.float32
        self._gradient, self._value = np.empty(0), np.inf
        self.spread = spread
        """Mean of p (1 - p) at the point that was computed last."""

    def minimise(self, point: np.ndarray, iterations: int) -> tuple[float, np.ndarray, int]:
        """Return (objective, coefficients, iterations taken), starting at the coefficients `point`.

        L-BFGS ends early where the rounding of float32 hides any progress; float64 goes on from there.
        """
        taken = 0
        while True:
            optimum: Any = minimize(
                self._objective,
                (point / self._unit).ravel(),
                jac=True,
                method="L-BFGS-B",
                callback=self._stop,
                options={"maxcor": _MEMORY, "maxiter": iterations - taken, "gtol": 0.0, "ftol": 0.0},
            )
            taken, point = taken + optimum.nit, optimum.x.reshape(point.shape) * self._unit
            self._gradient, self._value = optimum.jac.reshape(point.shape) / self._unit, optimum.fun
            exact = self._dtype == torch.float64 or self._images.mean.device.type == "mps"
            if self.converged or exact or taken >= iterations:
                return float(self._value), point, taken
            self._dtype = torch.float64

    @fast_float32()
    def _objective(self, steps: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the objective and its gradient at coefficients in units of `_unit`."""
        point = steps.reshape(self._images.classes, -1) * self._unit
        loss, gradient, self.spread = self._images.loss(point, self._dtype)
        weight = point[:, :-1]
        gradient[:, :-1] += self._l2 * weight
        objective = loss + self._l2 / 2 * float(np.vdot(weight, weight))
        self._gradient, self._value = gradient, objective
        return objective, (gradient * self._unit).ravel()

    def _stop(self, intermediate_result: Any) -> None:
        """Stop at the tolerance. The point that was computed last is the one that the iteration took."""
        if self.converged:
            raise StopIteration

    @property
    def converged(self) -> bool:
        """Return whether the gradient at the point that was computed last is within the tolerance."""
        weight, bias = self._gradient[:, :-1], self._gradient[:, -1]
        mean_squares = np.einsum("kr,kr->k", weight, weight) / len(self._axes)  # at most the largest square
        excess = np.square(self._gradient * self._unit).sum() / 2
        if max(mean_squares.max() ** 0.5, np.abs(bias).max()) > self._tolerance:
            return False
        if excess > _EXCESS * self._tolerance * self._value:
            return False
        slope = torch.from_numpy(weight).to(self._axes) @ self._axes.T
        return not slope.numel() or float(slope.abs().max()) <= self._tolerance


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
            for part in row_blocks(rows, features.shape[1]):
                x = (features[part].to(device) - mean) / deviation
                covariance += x.T @ x
            variance, axes = torch.linalg.eigh(covariance / len(rows))
        else:
            variance, axes = _dual(features, rows, mean, deviation)
        return cls(mean, deviation, variance.clamp_min(0.0), axes.float())


def row_blocks(rows: Tensor, width: int) -> Iterator[Tensor]:
    """Yield `rows` in parts for which matrices of `width` columns stay small."""
    yield from rows.split(max(1, min(_ROWS, VALUES // width)))


def _statistics(features: Tensor, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and population deviation of each feature, float64 [D]; the deviation of a constant feature is 1."""
    mean = torch.zeros(features.shape[1], dtype=torch.float64, device=device)
    squares = torch.zeros_like(mean)
    for part in row_blocks(rows, len(mean)):
        mean += features[part].to(device).sum(dim=0, dtype=torch.float64)
    mean /= len(rows)
    for part in row_blocks(rows, len(mean)):
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
