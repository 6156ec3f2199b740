"""Predicting numbers: squared error or Huber loss of standardised targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.images.mix import Mix
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Augment
from vitrail.objective.base import ImageBatch, Objective, Prepared, Task
from vitrail.objective.settings import Regression


class RegressionObjective(Objective):
    """Predict the targets of an image as multiples of their deviation from their mean, which `scale` holds.

    The loss of an image is the mean over targets, so that none dominates by its unit. Mixup and CutMix blend targets as
    they blend images. Metrics: "error", the mean absolute error in deviations.
    """

    pure = True

    def __init__(self, model: nn.Module, config: Regression, augment: Augment, scale: TargetScale, seed: int) -> None:
        super().__init__(model)
        self.config, self.scale = config, scale
        self.mix = Mix(augment, len(scale.mean), seed)

    @classmethod
    def of(cls, model: nn.Module, settings: Regression, task: Task) -> Self:
        """See `Objective`."""
        assert task.scale is not None
        return cls(model, settings, task.augment, task.scale, task.seed)

    def prepare(self, batch: ImageBatch, *, step: int) -> Prepared:
        """See `Objective`. Targets are standardised in float64, because their mean may be far larger than they vary."""
        labels = self.scale.standardised(batch.labels.double()).float()
        return super().prepare(Prepared(batch.images, labels, batch.index, labels), step=step)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Mix images and targets (mixup, CutMix)."""
        images, targets = self.mix(prepared.images, prepared.labels, step)
        return replace(prepared, images=images, targets=targets)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        outputs = self.model(prepared.images)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        error = (outputs.detach() - prepared.targets).abs().mean(dim=1).sum()
        return self._losses(outputs, prepared.targets).mean(dim=1).sum(), len(prepared), {"error": error}

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.config.loss == "huber":
            return F.huber_loss(outputs, targets, reduction="none", delta=self.config.huber_delta)
        return F.mse_loss(outputs, targets, reduction="none")
