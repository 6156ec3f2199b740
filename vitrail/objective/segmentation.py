"""Learning the class of each pixel: cross-entropy of the enlarged logits, over the pixels that count.

The loss of a step is the mean over all pixels that count, of all processes and micro-batches together, as torch's
cross-entropy with `ignore_index` of the whole batch: each image has a weight that is a function of the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail import world
from vitrail.data.settings import IGNORED
from vitrail.objective.base import Objective, Prepared


class SegmentationObjective(Objective):
    """Predict the class of each pixel. Metrics: "pixel_accuracy", the share of the pixels whose class is right.

    The logits of the network are enlarged bilinearly to the size of the masks.
    """

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Give each image its weight, by which the sum of the losses of its pixels is multiplied: see the module."""
        return replace(prepared, precomputed=_weights(world.sum_(_counts(prepared)), len(prepared)))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        weights = prepared.precomputed
        if weights is None:
            weights = _weights(_counts(prepared), len(prepared))
        masks = prepared.targets
        logits = enlarged(self.model(prepared.images), masks)
        right = ((logits.detach().argmax(dim=1) == masks) * weights[:, None, None]).sum()
        return (pixel_losses(logits, masks) * weights).sum(), len(prepared), {"pixel_accuracy": right}


def _counts(prepared: Prepared) -> Tensor:
    """Return the number of pixels that count, and of images, int64 [2]."""
    counted = (prepared.targets != IGNORED).sum()
    return torch.stack([counted, torch.full_like(counted, len(prepared))])


def _weights(counts: Tensor, images: int) -> Tensor:
    """Return the weight of each of some images, of a batch with these `_counts`, float32 [images]."""
    pixels, batch = counts.float().clamp(min=1)
    return (batch / pixels).expand(images).contiguous()


def enlarged(logits: Tensor, masks: Tensor) -> Tensor:
    """Return logits [batch, classes, rows, columns] at the size of masks [batch, height, width], at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.interpolate(logits, masks.shape[1:], mode="bilinear", align_corners=False)


def pixel_losses(logits: Tensor, masks: Tensor) -> Tensor:
    """Return the sum of the cross-entropy of the pixels of each image [batch], without those that are `IGNORED`.

    logits [batch, classes, height, width]; masks uint8 [batch, height, width].
    """
    return F.cross_entropy(logits, masks.long(), ignore_index=IGNORED, reduction="none").sum(dim=(1, 2))
