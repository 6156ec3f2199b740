"""Progressive resizing: the network sees small images first, and grows with them (its positions are resampled).

A ViT's cost falls with the number of tokens, so early in training, when little is learned from detail, the same
time holds several times the steps (Howard's fast.ai course; EfficientNetV2; FixRes turns the same idea around).
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from vitrail.data.loading.loader import Batch
from vitrail.errors import UsageError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.run import Progressive


class Sizes:
    """Batches at the size of their moment: `sizes(batch, growth)`, growth from 0 (first images) to 1 (full size)."""

    def __init__(self, progressive: Progressive, config: ViTConfig | ResNetConfig) -> None:
        if not 0 < progressive.start <= 1:
            raise UsageError(
                f"progressive.start is {progressive.start}; it is a share of the full side: above 0, up to 1"
            )
        self.start = progressive.start
        self.full = config.image_size
        self.step = config.patch if isinstance(config, ViTConfig) else 32

    def size(self, growth: float, full: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return height and width in pixels, whole patches, at least one; `full` is that of the network's input."""
        share = self.start + (1 - self.start) * growth
        return tuple(max(int(side * share + 1e-6) // self.step, 1) * self.step for side in full or self.full)  # type: ignore[return-value]

    def __call__(self, batch: Batch, growth: float) -> Batch:
        """Return the batch with its uint8 images resized, antialiased; at full size it is the batch itself."""
        full = (batch.images.shape[-2], batch.images.shape[-1])  # which may be larger than the network's input
        size = self.size(growth, full)
        if growth >= 1 or self.start == 1 or size == full:
            return batch
        return replace(batch, images=F.interpolate(batch.images, size=size, mode="bilinear", antialias=True))
