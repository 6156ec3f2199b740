"""Three ways to learn more in the same time that vitrail has no setting for, as objectives of one's own.

    vitrail train cifar100/ --recipe scratch-small --objective benchmarks.leads:PatchDropout
    vitrail train cifar100/ --recipe scratch-small --objective benchmarks.leads:AlternatingFlips --augment.no-flip
    vitrail train cifar100/ --recipe scratch-small --objective benchmarks.leads:GrowingBatch

benchmarks.ablation measures whether they pay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vitrail import Supervised
from vitrail.data.loading.order import MIX, stream
from vitrail.objective.base import Prepared
from vitrail.objective.supervised import SupervisedObjective
from vitrail.ranges import Part


@dataclass(frozen=True)
class PatchDropout(Supervised):
    """Patch dropout (Liu et al. 2022): training steps compute only a part of the patches, another one each time."""

    made_by: ClassVar[str] = "benchmarks.leads:DropPatches"
    kept: Part = 0.75
    """Share of the patches that are kept."""


@dataclass(frozen=True)
class AlternatingFlips(Supervised):
    """Mirroring in turns (Jordan 2024): an image never looks the same in two epochs that follow each other."""

    made_by: ClassVar[str] = "benchmarks.leads:FlipInTurns"


@dataclass(frozen=True)
class GrowingBatch(Supervised):
    """A batch that grows (Smith et al. 2018) over the run, from a part of `batch_size` to all of it.

    It grows by eighths, because the first step with another number of images prepares its matrix products anew.
    """

    made_by: ClassVar[str] = "benchmarks.leads:GrowBatch"
    start: Part = 0.5
    """Share of the batch in the first step."""


class DropPatches(SupervisedObjective):
    """Learn the labels from a part of the patches of each image."""

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Choose the patches of each image: a function of seed, step and place in the batch."""
        rows, columns = self.model.grid(prepared.images)
        order = stream(self.mix.seed, 0, step, MIX).random((len(prepared), rows * columns)).argsort(1)
        keep = np.sort(order[:, : max(1, round(self.config.kept * rows * columns))])
        return replace(super().draw(prepared, step), precomputed=torch.from_numpy(keep).to(prepared.images.device))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        model, images = self.model, prepared.images
        tokens = model.encode(model.embed(images), model.grid(images), prepared.precomputed)
        logits = model.classify(model.summary(tokens))
        return self.of_labels(logits, prepared).sum(), len(prepared), {"top1": self.right(logits, prepared)}


class FlipInTurns(SupervisedObjective):
    """Learn the labels; images with an even index are mirrored in even epochs, the others in odd ones."""

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Mirror the images whose turn it is."""
        turn = (prepared.index + step // self.moment.per_epoch) % 2 == 0
        here = turn.to(prepared.images.device)[:, None, None, None]
        return super().draw(replace(prepared, images=torch.where(here, prepared.images.flip(3), prepared.images)), step)


class GrowBatch(SupervisedObjective):
    """Learn the labels of the first images of each batch; the others are left out of the step."""

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Keep the share of the batch that the progress of the run allows."""
        share = self.config.start + (1 - self.config.start) * self.moment.done
        count = max(1, round(round(8 * share) / 8 * len(prepared)))
        return super().draw(prepared.first(count), step)
