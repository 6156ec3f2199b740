"""What is learned, as values: from labels, or without any. Torch-free.

Each has a `kind`, by which a configuration chooses among them (`objective: {kind: masked-patch, corrupt: 0.15}`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Supervised:
    """Learning from labels (`vitrail.objective.supervised`)."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["softmax", "sigmoid", "bce"] = "softmax"
    """softmax: cross-entropy; sigmoid: cross-entropy per class, summed over classes (paper, pre-training);
    bce: the same, averaged over classes (A2, DeiT-III)."""
    smoothing: float = 0.0
    """Label smoothing."""
    bce_threshold: float | None = None
    """bce: targets above this become 1, after mixing (A2 uses 0.0: every mixed class counts fully)."""
    head_bias: float = 0.0
    """Initial bias of the classifier (-10 for sigmoid on ImageNet-21k)."""


@dataclass(frozen=True)
class MaskedPatch:
    """Masked patch prediction (`vitrail.objective.masked_patch`; paper, 4.6 and B.1.2)."""

    kind: Literal["masked-patch"] = "masked-patch"
    corrupt: float = 0.5
    """Share of the patch embeddings that are corrupted (the paper also tried 0.15, BERT's)."""
    mask: float = 0.8
    """Of those, the share that becomes the learned [mask] embedding."""
    other: float = 0.1
    """Of those, the share that becomes the embedding of another patch of the image; what is left stays as it is."""
    target: Literal["colour", "small", "pixels"] = "colour"
    """colour: the patch's mean colour in 3 bits a channel, one of 512; small: the same of each cell of the patch
    cut 4 x 4, 16 predictions; pixels: every pixel, by regression (L2)."""
    mask_after_stem: bool = False
    """Allow stems in which patches mix before they are corrupted."""
