"""Test-time augmentation: the mean of a network's probabilities over several views of an image."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.evaluation.classify import Predict

SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest probability: its logarithm is finite."""


def averaged(predict: Predict, count: int, temperature: float, *, several: bool = False) -> Predict:
    """Return images [batch, channels, count * height, width] -> logits of the mean probabilities of `count` views.

    The views of an image lie one below the other. predict: Images of one view -> logits, which are divided by
    `temperature` before they become probabilities; it gets the views of a batch one after another, so that it computes
    batches of the usual size. several: Probabilities are the sigmoid of each logit.
    """

    def mean(images: Tensor) -> Tensor:
        views = [predict(view).float() / temperature for view in images.chunk(count, dim=2)]
        if several:
            shares = torch.stack([view.sigmoid() for view in views]).mean(dim=0)
            return shares.clamp(SMALLEST, 1 - torch.finfo(torch.float32).eps).logit()
        return torch.stack([view.softmax(dim=1) for view in views]).mean(dim=0).clamp_min(SMALLEST).log()

    return mean
