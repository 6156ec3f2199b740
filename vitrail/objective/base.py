"""What is learned: an `Objective` turns a batch into a loss, and owns the model and whatever else it trains.

The training loop knows this and nothing more. An objective returns *sums*, with the count they are of: the loop
divides by the count of all processes and micro-batches together, so that one process, many, and accumulation
give the same gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vitrail.config import Duration


class Batch(Protocol):
    """What an objective reads of a batch (`vitrail.data.loading.loader.Batch` is one)."""

    @property
    def images(self) -> Tensor:
        """uint8 [batch, channels, height, width]."""

    @property
    def labels(self) -> Tensor:
        """int64 [batch]."""

    @property
    def index(self) -> Tensor:
        """int64 [batch]: which images of the source these are."""


@dataclass(frozen=True)
class Prepared:
    """A batch on the model's device with the randomness of its step drawn, ready to be cut into micro-batches."""

    images: Tensor
    labels: Tensor
    """int64 [batch]: the class of each image before any mixing."""
    index: Tensor
    targets: Tensor
    """What is to be predicted: for `Supervised`, int64 [batch] or float [batch, classes]."""
    known: Tensor | None = None
    """[batch, ...], what `Objective.before_step` found for each image, where it found anything."""

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, parts: int) -> list[Prepared]:
        """Cut into at most `parts` micro-batches of nearly equal size, none of them empty."""
        parts = min(parts, len(self))
        columns = [self.images, self.labels, self.index, self.targets, *([] if self.known is None else [self.known])]
        cut = [tensor.tensor_split(parts) for tensor in columns]
        return [Prepared(*column) for column in zip(*cut, strict=True)]


@dataclass(frozen=True)
class Moment:
    """How far a run is, for what changes on the way; by default at its beginning."""

    done: float = 0.0
    """0 to 1; with a time limit by the clock, else steps done over steps planned."""
    total: int = 1
    """Optimiser steps planned."""
    per_epoch: int = 1
    """Optimiser steps in a pass over the images."""
    batch_size: int = 1

    def past(self, duration: Duration) -> float:
        """Return the share of the first `duration` of the run that is over, 0 to 1; of none at all, 1."""
        steps = duration.steps(per_epoch=self.per_epoch, batch_size=self.batch_size, total=self.total)
        return min(self.done * self.total / steps, 1.0) if steps else 1.0


class Objective(nn.Module, ABC):
    """A loss over a model. `objective(batch, step=step) -> (loss_sum, count, metrics)`.

    loss_sum: scalar Tensor, the sum over examples; count: the number of examples it is a sum over; metrics:
    name -> scalar Tensor, sums over the same examples.
    """

    moment = Moment()
    """Now; see `at`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch | Prepared, *, step: int) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See the class; `step` is the optimiser step, of which all randomness here is a function."""
        prepared = batch if isinstance(batch, Prepared) else self.prepare(batch, step=step)
        return self.loss(prepared)

    def prepare(self, batch: Batch, *, step: int) -> Prepared:
        """Move a batch to the device and draw its randomness, for the whole batch at once.

        Noise is a function of (seed, step, place in the batch) and drawn before the batch is cut, so that it
        does not depend on how many micro-batches there are.
        """
        device = next(self.parameters()).device
        images = batch.images.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        prepared = Prepared(images, labels, batch.index, labels)
        with torch.no_grad():
            return self.draw(prepared, step)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Return the batch with the noise of this step applied; nothing is random by default."""
        return prepared

    @property
    def known_bytes(self) -> int:
        """Bytes of `Prepared.known` of an image, which memory holds for the whole batch; none by default."""
        return 0

    @property
    def kept(self) -> nn.Module:
        """The network that is evaluated and saved; the one that learns by default."""
        return self.model

    def at(self, moment: Moment) -> None:
        """Be told how far the run is: before every step, and before an evaluation."""
        self.moment = moment

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Return the batch with what depends on all images of a training step as `known`; nothing by default.

        In every process alike, without gradients, and in the precision of the loss; `parts` is the number of
        micro-batches that the batch will be cut into, so as not to take more memory than they do. A batch that is
        evaluated does not come here.
        """
        return prepared

    def after_step(self) -> None:
        """Be told that the optimiser has moved the weights; nothing by default.

        In every process alike, and not after a step that was skipped because its loss was not finite.
        """

    def identity(self) -> dict[str, str]:
        """What a resumed run must share with this one beyond its settings; nothing by default."""
        return {}

    @abstractmethod
    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return (loss_sum, count, metrics) of a prepared batch or a part of one."""
