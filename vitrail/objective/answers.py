"""Questions of which an image asks many, each with one right answer of a few hundred: colours, visual tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def judged(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of each image's answers, and the share of them that is right, both [batch].

    logits: float32 [batch, ..., answers]; right: int64 [batch, ...]. Answers stay in the last dimension: where PyTorch
    wants them, in the second, it copies all logits and all their gradients, which took half of the time of this.
    """
    losses = F.cross_entropy(logits.flatten(0, -2), right.flatten(), reduction="none")
    hits = (logits.detach().argmax(-1) == right).float()
    return losses.view(len(right), -1).mean(1), hits.view(len(right), -1).mean(1)
