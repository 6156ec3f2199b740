"""An `Objective` computes the loss of a batch. It owns the model and everything else that is trained.

The training loop knows only this interface. An objective returns *sums* over examples and the number of examples. The
loop divides by the number of all processes and micro-batches together, so that one process, several processes and
gradient accumulation give the same gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Augment, Preprocess
from vitrail.device import to_device
from vitrail.durations import Duration


class ImageBatch(Protocol):
    """The part of a batch that an objective reads (see `vitrail.data.loading.loader.Batch`)."""

    @property
    def images(self) -> Tensor:
        """uint8 [batch, channels, height, width]."""

    @property
    def labels(self) -> Tensor:
        """int64 [batch]; with several labels int8 [batch, classes], 1 for each label; of numbers [batch, targets]; of
        several answers their rows [batch, width] (`vitrail.data.labels.sets.Answers`)."""

    @property
    def index(self) -> Tensor:
        """int64 [batch]: the index of each image in its source."""


@dataclass(frozen=True)
class Prepared:
    """A batch on the model's device with the random numbers of its step. It can be cut into micro-batches."""

    images: Tensor
    labels: Tensor
    """int64 [batch]: the class of each image before any mixing; with several labels int8 [batch, classes]; numbers
    float [batch, targets]."""
    index: Tensor
    targets: Tensor
    """The targets of the prediction; for `Supervised`, int64 [batch] or float [batch, classes]."""
    precomputed: Tensor | None = None
    """[batch, ...]: values that `Objective.before_step` computed for each image."""
    numbers: tuple[int, ...] = ()
    """Integers drawn for the whole batch. They stay on the CPU."""

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, parts: int) -> list[Prepared]:
        """Return at most `parts` micro-batches of nearly equal size, none of them empty."""
        parts = min(parts, len(self))
        cut = [tensor.tensor_split(parts) for tensor in self.columns()]
        return [self._of(column) for column in zip(*cut, strict=True)]

    def first(self, count: int) -> Prepared:
        """Return the first `count` images and what belongs to them; all if there are fewer."""
        return self._of([column[:count] for column in self.columns()])

    def on(self, device: torch.device) -> Prepared:
        """Return the batch with all tensors but `index` on `device`, copied as `to_device` does."""
        images, labels, index, *drawn = self.columns()
        moved = [to_device(column, device) for column in (images, labels, *drawn)]
        return self._of([*moved[:2], index, *moved[2:]])

    def columns(self) -> list[Tensor]:
        """Return the tensors, each with a row for each image."""
        columns = [self.images, self.labels, self.index, self.targets]
        return columns if self.precomputed is None else [*columns, self.precomputed]

    def _of(self, columns: Sequence[Tensor]) -> Prepared:
        images, labels, index, targets, *rest = columns
        return Prepared(images, labels, index, targets, rest[0] if rest else None, self.numbers)


@dataclass(frozen=True)
class Moment:
    """The progress of a run, for settings that change during training; by default its start."""

    done: float = 0.0
    """0 to 1: the share of the time limit if there is one, otherwise the share of the planned steps."""
    total: int = 1
    """Number of planned optimiser steps."""
    per_epoch: int = 1
    """Number of optimiser steps in an epoch."""
    batch_size: int = 1
    step: float = 0.0
    """Number of optimiser steps done; with a time limit, `done` times `total`."""

    def steps(self, duration: Duration) -> int:
        """Return a duration in optimiser steps of this run."""
        return duration.steps(per_epoch=self.per_epoch, batch_size=self.batch_size, total=self.total)

    def past(self, duration: Duration) -> float:
        """Return which share of the first `duration` of the run is over, 0 to 1; 1 for an empty duration."""
        steps = self.steps(duration)
        return min(self.done * self.total / steps, 1.0) if steps else 1.0


class Head(NamedTuple):
    """One of several answers that a network learns: a part of its outputs."""

    name: str
    kind: Literal["classes", "labels", "numbers"]
    outputs: int
    share: float
    """Share of the training images whose answer is known, above 0."""
    scale: TargetScale | None = None
    """Mean and deviation of a number."""

    @property
    def width(self) -> int:
        """Number of values in the rows of labels."""
        return 1 if self.kind == "classes" else self.outputs


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that the settings of an objective need to build it."""

    seed: int = 0
    classes: int = 0
    """Number of classes of the data."""
    augment: Augment = field(default_factory=Augment)
    preprocess: Preprocess = field(default_factory=Preprocess)
    class_counts: Sequence[float] = ()
    """Mean number of images of each class that an epoch shows; empty if it is not known."""
    scale: TargetScale | None = None
    """Mean and deviation of the targets, if the labels are numbers."""
    heads: Sequence[Head] = ()
    """The answers, if there are several for an image."""


class Objective(nn.Module, ABC):
    """A loss over a model. `objective(batch, step=step) -> (loss_sum, count, metrics)`.

    loss_sum: scalar Tensor, the sum over examples; count: the number of examples; metrics: name -> scalar Tensor, sums
    over the same examples.
    """

    moment = Moment()
    """The current progress; set by `at`."""
    label_width: int | None = None
    """Length of the label of an image where it is a row of several answers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def of(cls, model: nn.Module, settings: Any, task: RunFacts) -> Self:
        """Return the objective with `settings` that trains `model`."""
        return cls(model)

    def forward(self, batch: ImageBatch | Prepared, *, step: int) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See the class. `step` is the optimiser step; all random numbers are a function of it."""
        prepared = batch if isinstance(batch, Prepared) else self.prepare(batch, step=step)
        return self.loss(prepared)

    def prepare(self, batch: ImageBatch, *, step: int) -> Prepared:
        """Move a batch to the device and draw its random numbers, for the whole batch at once.

        They are a function of (seed, step, place in the batch) and drawn before the batch is cut, so that they do not
        depend on the number of micro-batches. On a CUDA device the loop calls this in a thread, one step ahead
        (`vitrail.training.feed`), so it must not change the objective.
        """
        device = next(self.parameters()).device
        images, labels = to_device(batch.images, device), to_device(batch.labels, device)
        with torch.no_grad():
            return self.draw(Prepared(images, labels, batch.index, labels), step).on(device)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Return the batch with the random changes of this step applied. By default nothing is random.

        Images and labels are on the device already. Tensors that are drawn on the CPU are copied there afterwards.
        """
        return prepared

    @property
    def precomputed_bytes(self) -> int:
        """Bytes of `Prepared.precomputed` per image, for all images of a batch at once. 0 by default."""
        return 0

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated and saved; by default the one that is trained."""
        return self.model

    def at(self, moment: Moment) -> None:
        """Set the progress of the run. Called before every step and before every evaluation."""
        self.moment = moment

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Return the batch with `precomputed` set to values that depend on all images of a training step.

        By default nothing changes. Called in every process, without gradients and in the precision of the loss; not
        called in an evaluation. `parts` is the number of micro-batches into which the batch will be cut. Compute in as
        many parts to need no more memory. A step that runs out of memory calls it again when it starts over.
        """
        return prepared

    def after_step(self, finite: Tensor) -> None:
        """Update what follows the weights after an optimiser step. Default: nothing.

        Called in every process. `finite` is a bool scalar on the device. If it is false, the step was skipped because
        its loss or gradient was not finite, and nothing may change. Do not read it, because reading waits for the
        device: choose by `torch.where`.
        """

    def identity(self) -> dict[str, str]:
        """Return values that must be equal in a resumed run, besides its settings. Default: none."""
        return {}

    @abstractmethod
    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return (loss_sum, count, metrics) of a prepared batch or a part of one."""
