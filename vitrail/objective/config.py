"""What is learned, as values. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Supervised:
    """Learning from labels (`vitrail.objective.supervised`)."""

    loss: Literal["softmax", "sigmoid", "bce"] = "softmax"
    """softmax: cross-entropy; sigmoid: cross-entropy per class, summed over classes (paper, pre-training);
    bce: the same, averaged over classes (A2, DeiT-III)."""
    smoothing: float = 0.0
    """Label smoothing."""
    bce_threshold: float | None = None
    """bce: targets above this become 1, after mixing (A2 uses 0.0: every mixed class counts fully)."""
    head_bias: float = 0.0
    """Initial bias of the classifier (-10 for sigmoid on ImageNet-21k)."""
