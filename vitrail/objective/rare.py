"""Rare classes: weights of the classes in the loss, and logit adjustment.

`class_weights` are factors on the loss of an image, by its class. "effective" is from "Class-Balanced Loss Based on
Effective Number of Samples" (Cui et al. 2019): n images of a class count as (1 - beta^n) / (1 - beta). `log_prior` is
for "Long-Tail Learning via Logit Adjustment" (Menon et al. 2021, equation 10): it is added to the logits in training
only, so that the logits without it rank the classes as if all were equally frequent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.objective.settings import Supervised


def class_weights(counts: Sequence[float], settings: Supervised) -> np.ndarray:
    """Return the weight of each class, float64 [classes]; their mean over the training images is 1.

    counts: Number of training images of each class. A class without images gets the weight of a class with one. (Cui et
    al. scale the weights to a sum of `classes`; this differs by one factor on the whole loss.)
    """
    number = np.maximum(np.asarray(counts, dtype=np.float64), 1.0)
    if settings.class_weights == "effective":
        beta = settings.class_weights_beta
        raw = (1 - beta) / -np.expm1(number * np.log(beta)) if beta else np.ones_like(number)
    else:
        raw = 1 / number
    images = np.asarray(counts, dtype=np.float64)
    scaled: np.ndarray = raw * images.sum() / (raw * images).sum()
    return scaled


def log_prior(counts: Sequence[float]) -> np.ndarray:
    """Return the logarithm of each class's share of the images, float64 [classes]; a class without images has one."""
    number = np.maximum(np.asarray(counts, dtype=np.float64), 1.0)
    shares: np.ndarray = np.log(number / number.sum())
    return shares


class Balance(nn.Module):
    """The changes that `settings` make to logits, targets and losses for rare classes; none by default.

    Raises UsageError if `counts`, the number of training images of each class, are needed and not known, and for logit
    adjustment of a loss that is not softmax.
    """

    weights: Tensor | None
    """float32 [classes]."""
    shift: Tensor | None
    """float32 [classes], added to the logits in training."""

    def __init__(self, settings: Supervised, counts: Sequence[float]) -> None:
        super().__init__()
        weighted, adjusted = settings.class_weights != "none", settings.logit_adjustment > 0
        if adjusted and settings.loss != "softmax":
            raise UsageError(
                f"objective.logit_adjustment needs objective.loss softmax, not {settings.loss}. With {settings.loss}, "
                "use objective.class_weights"
            )
        if (weighted or adjusted) and not len(counts):
            raise UsageError("class weights and logit adjustment need the number of training images of each class")
        weights = torch.from_numpy(class_weights(counts, settings)).float() if weighted else None
        shift = torch.from_numpy(settings.logit_adjustment * log_prior(counts)).float() if adjusted else None
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits [batch, classes] that the loss sees."""
        return logits if self.shift is None else logits + self.shift

    def targets(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets that the loss sees, and the factor on the loss of each image [batch] (None: 1).

        targets: int64 [batch], or float [batch, classes] whose rows sum to 1. A mixed image with the shares t counts as
        its parts do: the loss of class k with the factor t_k w_k. A loss is linear in the targets, so that is one loss
        of targets in proportion to t_k w_k, times the sum of t_k w_k.
        """
        if self.weights is None:
            return targets, None
        if targets.ndim == 1:
            return targets, self.weights[targets]
        parts = targets * self.weights
        whole = parts.sum(-1)
        return parts / whole[:, None], whole
