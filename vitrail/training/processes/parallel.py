"""An objective as the processes of a run compute it: gradients are sums over the examples of all of them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.objective.base import Moment, Objective, Prepared
from vitrail.training.optim.average import Averager, Swapped
from vitrail.training.processes.sharding import GatheredAverage, GatheredCopy, shard

Computed = tuple[Tensor, int, dict[str, Tensor]]
"""Loss, number of examples and metrics of a micro-batch, as an objective returns them."""


class Parallel(ABC):
    """An objective computed by all processes of a run: gradients are sums over the examples of all processes."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, part: Prepared, *, step: int) -> Computed:
        """Return loss, count and metrics of the objective for this process's part of the batch."""
        return self.objective(part, step=step)  # type: ignore[no-any-return]

    @property
    def loss(self) -> Callable[[Prepared], Computed]:
        """Return the function that a step calls for each micro-batch; a prepared batch needs no step number."""
        return partial(self, step=0)

    def at(self, moment: Moment) -> None:
        """Pass on how far the run is."""
        self.objective.at(moment)

    def for_evaluation(self, average: Averager) -> tuple[Objective, Swapped]:
        """Return the objective to evaluate, and the object whose `swapped` puts the average into it."""
        return self.objective, average

    @abstractmethod
    def last(self, last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward pass; with the `last` of a step gradients are summed."""

    def mean(self, count: float | Tensor) -> None:
        """Divide the gradients, which are sums, by the number of examples `count`, in place."""
        gradients = [world.local(each.grad) for each in self.objective.parameters() if each.grad is not None]
        if gradients:
            torch_private.foreach_div_(gradients, count)


class SingleProcess(Parallel):
    """A single process."""

    @property
    def loss(self) -> Callable[[Prepared], Computed]:
        """Return the objective's loss itself: nothing stands between it and the step."""
        return self.objective.loss

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        return nullcontext()


class Replicated(Parallel):
    """All weights in every process: torch's DistributedDataParallel (DDP).

    It sums gradients bucket by bucket, those of the last layers first, while the backward pass computes earlier ones.
    A parameter that no process uses, such as a pool that the objective does not need, has no gradient, as with one
    process. Every process has its own buffers.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # older torch lacks its successor
            self._network = nn.parallel.DistributedDataParallel(
                objective, broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
            )
        self._network.register_comm_hook(None, _summed)

    def __call__(self, part: Prepared, *, step: int) -> Computed:
        """See `Parallel`."""
        return self._network(part, step=step)  # type: ignore[no-any-return]

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        return nullcontext() if last else self._network.no_sync()


def _summed(_, bucket):  # type: ignore[no-untyped-def]  # torch rejects annotations that are strings
    """Sum a bucket over the processes; DDP would take the mean, and the step divides by the count of all examples."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Sharded(Parallel):
    """A part of every weight in each process (`vitrail.training.processes.sharding`).

    The gradients of several micro-batches are accumulated unsharded and reduced with the last one: a single reduction
    per step, for the memory of all gradients.
    """

    def __init__(self, objective: Objective, whole: GatheredCopy) -> None:
        super().__init__(objective)
        shard(objective)
        self._cut: Any = objective
        self._whole = whole

    def at(self, moment: Moment) -> None:
        """See `Parallel`."""
        super().at(moment)
        self._whole.objective.at(moment)

    def for_evaluation(self, average: Averager) -> tuple[Objective, Swapped]:
        """See `Parallel`."""
        return self._whole.objective, GatheredAverage(average, self._whole)

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        self._cut.set_requires_gradient_sync(last)
        self._cut.set_is_last_backward(last)
        return nullcontext()
