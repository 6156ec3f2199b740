"""Progressive resizing: training starts with small images, which grow; the network's positions are resampled.

A ViT's cost falls with the number of tokens. Early in training the network learns little from detail, and with small
images several times as many steps fit into the same time (Howard's fast.ai course; EfficientNetV2; FixRes is the
reverse).
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from vitrail.data.loading.loader import Batch
from vitrail.model.variants import NetworkConfig, ViTConfig
from vitrail.training.run import Progressive


class Sizes:
    """Resizes batches: `sizes(batch, growth)`, with growth from 0 (first images) to 1 (full size)."""

    def __init__(self, progressive: Progressive, config: NetworkConfig) -> None:
        self.start = progressive.start
        self.full = config.image_size
        self.step = config.patch if isinstance(config, ViTConfig) else 32

    def size(self, growth: float, full: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return height and width in pixels, in whole patches, at least one; `full` defaults to the network's input."""
        share = self.start + (1 - self.start) * growth
        return tuple(max(int(side * share + 1e-6) // self.step, 1) * self.step for side in full or self.full)  # type: ignore[return-value]

    def __call__(self, batch: Batch, growth: float) -> Batch:
        """Return the batch with its uint8 images resized, antialiased; at full size it is the batch itself."""
        full = (batch.images.shape[-2], batch.images.shape[-1])  # may be larger than the network's input
        size = self.size(growth, full)
        if growth >= 1 or self.start == 1 or size == full:
            return batch
        return replace(batch, images=F.interpolate(batch.images, size=size, mode="bilinear", antialias=True))
