"""Linear probe: softmax regression on frozen features, with many learning rates and weight decays in one pass.

All settings use the same minibatches. Their classifiers are one stack of weights [R, K, D], so that a step takes two
matrix products for all of them (as in DINOv2). The setting is chosen on held-out training images, and then trained
again on all training images (as the paper does with learning rates, appendix B.1.1); the test images are not used for
the choice. SGD with momentum starts from zero weights and follows a cosine to 0 (DINO). Features are standardised with
statistics of the training images, so that one grid fits every network (He et al. 2022 use a BatchNorm for this).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loading.order import stream
from vitrail.device import fast_float32
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import Features
from vitrail.training.optim.schedule import learning_rate

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
HOLDOUT = 0.1
MOMENTUM = 0.9
ORDER, HELD_OUT = 16, 17
"""Purposes of random streams (the others are in `vitrail.data`)."""
_ROWS = 4096


@dataclass(frozen=True)
class Setting:
    """The setting of one classifier, and its metrics on the held-out images."""

    lr: float
    weight_decay: float
    top1: float
    nll: float
    """Mean cross-entropy in nats; not finite if training diverged."""


@dataclass(frozen=True)
class LinearProbe:
    """The result of a linear probe."""

    settings: list[Setting]
    chosen: Setting
    top1: float
    """On the test images, trained with the chosen setting on all training images."""
    top5: float
    """Of fewer than five classes, all count."""
    nll: float
    train_images: int
    held_out_images: int
    test_images: int
    epochs: int
    minibatch: int


@dataclass(frozen=True)
class Stack:
    """R linear classifiers, and the statistics that standardise features for them."""

    weight: Tensor
    """float32 [R, K, D]"""
    bias: Tensor
    """float32 [R, K]"""
    mean: Tensor
    """float32 [D]"""
    deviation: Tensor
    """float32 [D]"""

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, R, K] of standardised features [B, D], in one matrix product."""
        settings, classes, width = self.weight.shape
        flat = torch.addmm(self.bias.flatten(), x, self.weight.view(-1, width).T)
        return flat.view(len(x), settings, classes)

    def standardised(self, features: np.ndarray) -> Tensor:
        """Return features [B, D] standardised, float32 [B, D] on the device."""
        x = torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32)).to(self.mean.device)
        return (x - self.mean) / self.deviation


def linear_probe(
    train: Features,
    test: Features,
    *,
    lr: Sequence[float] = LEARNING_RATES,
    weight_decay: Sequence[float] = (0.0,),
    epochs: int = 100,
    minibatch: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearProbe:
    """Train a linear classifier on `train` for every pair of `lr` and `weight_decay`, and measure the best on `test`.

    The best has the highest top-1, then the lowest loss, on a held-out tenth of each class. The order of the images and
    the held-out images are functions of `seed`. Images without a known class are ignored. Raises UsageError for invalid
    settings or if training diverges, DataError for features that are not finite or do not match.
    """
    if train.width != test.width:
        raise DataError(f"training images have {train.width} features and test images {test.width}")
    rates, decays = list(lr), list(weight_decay)
    if not rates or not decays or min(rates) <= 0 or min(decays) < 0 or epochs < 1 or minibatch < 1:
        raise UsageError(
            f"Invalid: lr {rates}, weight decay {decays}, {epochs} epochs, minibatch {minibatch}. Valid: learning "
            "rates are above 0, weight decays at least 0, epochs and minibatch at least 1."
        )
    features, labels = train.labelled("training")
    asked, truth = test.labelled("test")
    classes = len(train.class_names)
    pairs = [(rate, decay) for decay in decays for rate in rates]
    others, held = held_out(labels, seed)
    how: dict[str, Any] = dict(classes=classes, epochs=epochs, minibatch=minibatch, seed=seed, device=device)
    trial = train_stack(features, labels, others, pairs, **how)
    settings = [
        Setting(*pair, top1, nll)
        for pair, (top1, _, nll) in zip(pairs, measure(trial, features, labels, held), strict=True)
    ]
    chosen = max(settings, key=_goodness)
    if not math.isfinite(chosen.nll):
        raise UsageError(
            f"training diverged at every learning rate, from {min(rates):g} on. Try smaller ones with --lr."
        )
    every = np.arange(len(labels))
    final = train_stack(features, labels, every, [(chosen.lr, chosen.weight_decay)], **how)
    ((top1, top5, nll),) = measure(final, asked, truth, np.arange(len(truth)))
    sizes = (len(labels), len(held), len(truth))
    return LinearProbe(settings, chosen, top1, top5, nll, *sizes, epochs, minibatch)


def _goodness(setting: Setting) -> tuple[bool, float, float]:
    return (math.isfinite(setting.nll), setting.top1, -setting.nll if math.isfinite(setting.nll) else 0.0)


def held_out(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows to train on, held-out rows), both ascending; held out is a random tenth of each class.

    Of a class with two or more images at least one is held out and at least one is not. Raises DataError if no image
    can be held out.
    """
    out = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = min(max(round(HOLDOUT * len(rows)), 1), len(rows) - 1)
        out.append(stream(seed, 0, int(label), HELD_OUT).permutation(rows)[:count])
    held = np.sort(np.concatenate(out))
    if not len(held):
        raise DataError("no class has two training images, so none can be held out to choose the learning rate by")
    return np.setdiff1d(np.arange(len(labels)), held, assume_unique=True), held


@torch.no_grad()
@fast_float32()
def train_stack(
    features: np.ndarray,
    labels: np.ndarray,
    rows: np.ndarray,
    pairs: Sequence[tuple[float, float]],
    *,
    classes: int,
    epochs: int,
    minibatch: int,
    seed: int,
    device: torch.device | str,
) -> Stack:
    """Train one classifier for each (learning rate, weight decay) of `pairs` on the images `rows`.

    Each classifier is the same as if it were trained alone, up to rounding. The step is torch's SGD: decay is added to
    the gradient of the weights (not of the bias), then momentum and learning rate are applied.
    """
    settings, width = len(pairs), features.shape[1]
    mean, deviation = _statistics(features, rows)
    stack = Stack(
        torch.zeros(settings, classes, width, device=device),
        torch.zeros(settings, classes, device=device),
        torch.from_numpy(mean).to(device),
        torch.from_numpy(deviation).to(device),
    )
    velocity, bias_velocity = torch.zeros_like(stack.weight), torch.zeros_like(stack.bias)
    rate = torch.tensor([rate for rate, _ in pairs], device=device)[:, None]
    decay = torch.tensor([decay for _, decay in pairs], device=device)[:, None, None]
    total = epochs * -(-len(rows) // minibatch)
    for step, batch in enumerate(_minibatches(rows, epochs, minibatch, seed)):
        x = stack.standardised(features[batch])
        label = torch.from_numpy(labels[batch]).to(device)
        # the gradient of the mean cross-entropy in the logits: softmax minus one-hot, over the batch size
        slope = stack.logits(x).softmax(dim=-1)
        slope[torch.arange(len(batch), device=device), :, label] -= 1
        slope /= len(batch)
        gradient = (slope.flatten(1).T @ x).view_as(stack.weight)
        velocity.mul_(MOMENTUM).add_(gradient).addcmul_(stack.weight, decay)
        bias_velocity.mul_(MOMENTUM).add_(slope.sum(dim=0))
        now = rate * learning_rate(step, total, 1.0)
        stack.weight.addcmul_(velocity, now[:, :, None], value=-1)
        stack.bias.addcmul_(bias_velocity, now, value=-1)
    return stack


def _minibatches(rows: np.ndarray, epochs: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of each step; the order is a function of (seed, epoch). The last of an epoch may be smaller."""
    for epoch in range(epochs):
        order = stream(seed, epoch, 0, ORDER).permutation(rows)
        for begin in range(0, len(order), size):
            yield order[begin : begin + size]


def _statistics(features: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population deviation of each feature, float32 [D]; the deviation of a constant feature is 1."""
    parts = [rows[begin : begin + _ROWS] for begin in range(0, len(rows), _ROWS)]
    mean = np.sum([features[part].sum(axis=0, dtype=np.float64) for part in parts], axis=0) / len(rows)
    squares = np.sum([((features[part] - mean) ** 2).sum(axis=0) for part in parts], axis=0)
    deviation = np.sqrt(squares / len(rows))
    deviation[deviation < 1e-12 * np.maximum(np.abs(mean), 1)] = 1.0
    return mean.astype(np.float32), deviation.astype(np.float32)


@torch.no_grad()
@fast_float32()
def measure(
    stack: Stack, features: np.ndarray, labels: np.ndarray, rows: np.ndarray
) -> list[tuple[float, float, float]]:
    """Return top-1, top-5 and mean cross-entropy of every classifier on the images `rows`.

    A prediction that is not finite counts as wrong.
    """
    device = stack.weight.device
    settings, classes, _ = stack.weight.shape
    sums = torch.zeros(3, settings, dtype=torch.float64)
    size = max(1, (1 << 24) // (settings * classes))  # 64 MiB of logits
    for begin in range(0, len(rows), size):
        batch = rows[begin : begin + size]
        label = torch.from_numpy(labels[batch]).to(device)[:, None, None].expand(-1, settings, 1)
        logits = stack.logits(stack.standardised(features[batch]))
        finite = logits.isfinite().all(dim=2)
        right = (logits.topk(min(5, classes), dim=2).indices == label) & finite[:, :, None]
        loss = -logits.log_softmax(dim=2).gather(2, label)[:, :, 0]
        sums += torch.stack([right[:, :, 0].sum(0), right.any(2).sum(0), loss.sum(0)]).double().cpu()
    top1, top5, nll = (sums / len(rows)).tolist()
    return list(zip(top1, top5, nll, strict=True))
