"""From logits to answers: the best classes of an image, and with several labels those above their thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Ranked(NamedTuple):
    """The answers for a batch of images, best first. They are on the CPU."""

    classes: np.ndarray
    """int64 [B, k]: the best classes."""
    probabilities: np.ndarray
    """float32 [B, k]: softmax over the classes; for a network that predicts several labels, sigmoid of each."""
    predicted: np.ndarray | None
    """bool [B, k]: which of these classes reach their threshold; None for a network that predicts one class."""


@torch.no_grad()
def ranked(logits: Tensor, top: int, thresholds: Sequence[float] = ()) -> Ranked:
    """Return the `top` best classes of each image; logits: [B, classes]. `thresholds` are those of the card.

    With thresholds there are at least as many classes as are predicted, so k may be larger than `top`.
    """
    logits = logits.float().cpu()
    if not len(thresholds):
        values, classes = logits.softmax(dim=1).topk(min(top, logits.shape[1]), dim=1)
        return Ranked(classes.numpy(), values.numpy(), None)
    values, classes = logits.sigmoid().sort(dim=1, descending=True, stable=True)
    reached = values.double() >= torch.tensor(list(thresholds), dtype=torch.float64)[classes]
    return Ranked(classes.numpy(), values.numpy(), reached.numpy())
