"""Learning several answers for an image at once, each a part of the network's outputs with a loss of its own.

The loss of an image is the sum over its known answers of weight / share * loss, where the share is the part of the
training images whose answer is known. So the mean over images of an epoch is the sum of weight * the mean loss of each
answer over the images that have it, and yet an image's loss depends on no other image: sums over processes and
micro-batches, each with another number of known answers, give the same gradient as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError, did_you_mean
from vitrail.objective.base import Head, ImageBatch, Objective, Prepared, RunFacts
from vitrail.objective.settings import SeveralAnswers, Supervised
from vitrail.objective.supervised import number_losses, supervised_loss
from vitrail.words import listing, shown


def weights_of(settings: SeveralAnswers, names: Sequence[str]) -> dict[str, float]:
    """Return the weight of each answer; 1 without one in the settings. Raises UsageError for a wrong one."""
    found = dict.fromkeys(names, 1.0)
    for text in settings.answer_weights:
        name, _, value = text.rpartition("=")
        if name not in found:
            raise UsageError(
                f"objective.answer_weights: {shown(text)} is not the weight of an answer.{did_you_mean(name, names)} "
                f"Write NAME=WEIGHT with one of {listing(list(names))}"
            )
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < float("inf"):
            raise UsageError(f"objective.answer_weights: {shown(text)}; a weight must be a finite number above 0")
    return found


class SeveralAnswersObjective(Objective):
    """See the module. Labels are the rows of `vitrail.data.labels.sets.Answers`, [batch, width].

    Metrics: "NAME.loss" of each answer, whose mean over an epoch is the mean over the images that have the answer.
    """

    def __init__(self, model: nn.Module, config: SeveralAnswers, heads: Sequence[Head]) -> None:
        super().__init__(model)
        self.config, self.heads = config, list(heads)
        self.weights = weights_of(config, [head.name for head in heads])
        self.label_width = sum(head.width for head in heads)

    @classmethod
    def of(cls, model: nn.Module, settings: SeveralAnswers, task: RunFacts) -> Self:
        """See `Objective`."""
        return cls(model, settings, task.heads)

    def prepare(self, batch: ImageBatch, *, step: int) -> Prepared:
        """See `Objective`. Numbers are standardised in float64, because their mean may be far larger than they vary."""
        labels = batch.labels.double()
        columns = labels.split([head.width for head in self.heads], dim=1)
        standardised = [
            column if head.scale is None else head.scale.standardised(column)
            for head, column in zip(self.heads, columns, strict=True)
        ]
        labels = torch.cat(standardised, dim=1).float()
        return super().prepare(Prepared(batch.images, labels, batch.index, labels), step=step)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        outputs = self.model(prepared.images)
        each = outputs.split([head.outputs for head in self.heads], dim=1)
        labels = prepared.labels.split([head.width for head in self.heads], dim=1)
        total, metrics = outputs.new_zeros((), dtype=torch.promote_types(outputs.dtype, torch.float32)), {}
        for head, own, target in zip(self.heads, each, labels, strict=True):
            known = target[:, 0] >= 0 if head.scale is None else target[:, 0].isfinite()
            losses = self._of_one(head, own, torch.where(known[:, None], target, 0))
            loss = torch.where(known, losses, 0).sum() / head.share
            total = total + self.weights[head.name] * loss
            metrics[f"{head.name}.loss"] = loss.detach()
        return total, len(prepared), metrics

    def _of_one(self, head: Head, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each image [batch]; target [batch, width] of an image without this answer is any."""
        if head.kind == "numbers":
            return number_losses(outputs, target, self.config.number_loss)
        settings = Supervised(loss="sigmoid" if head.kind == "labels" else "softmax", smoothing=self.config.smoothing)
        return supervised_loss(outputs, target[:, 0].long() if head.kind == "classes" else target, settings)
