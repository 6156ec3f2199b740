"""What is done to the single-device model from outside, in this order:

0. the branches of parallel blocks computed as one, where the run says so;
1. activation checkpointing, on each block: what is recomputed must be inside what is compiled;
2. torch.compile, on each block: the blocks share one compiled graph, so the wait is that of a single block;
3. many processes: gradients are summed over them as they are computed; or, with `Run.shard`, FSDP2 on each block and on
   the objective (`training.processes.sharding`). What talks to other processes is outside of what is recomputed.

None of it changes the names in the model's state_dict: a checkpoint does not know how it was trained.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail import world
from vitrail.model.vit import ViT
from vitrail.model.wide import compute_together
from vitrail.objective.base import Moment, Objective, Prepared
from vitrail.training.optim.average import Averager, Swapped
from vitrail.training.processes.sharding import GatheredAverage, Whole, shard, sharded
from vitrail.training.run import Run


def prepare(model: nn.Module, run: Run) -> None:
    """Apply wide branches, activation checkpointing and compilation to `model`, in place, as `run` says.

    A network without encoder blocks (a ResNet) is treated as one block.
    """
    if run.wide_branches:
        compute_together(model)
    blocks = checkpointed_parts(model)
    if run.activation_checkpointing:
        for block in blocks:
            block.forward = partial(_checkpointed, block.forward)  # type: ignore[method-assign]
    if run.compile:
        for block in blocks:
            block.compile()


def checkpointed_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts that are wrapped one by one: the encoder blocks of a ViT, else the network as a whole."""
    return list(model.blocks) if isinstance(model, ViT) else [model]


def _checkpointed(forward, *inputs, **options):  # type: ignore[no-untyped-def]
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


class Parallel(ABC):
    """An objective as the processes of a run compute it together: gradients are sums over all of their examples."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, part: Prepared, *, step: int) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return what the objective does, for this process's part."""
        return self.objective(part, step=step)  # type: ignore[no-any-return]

    @property
    def loss(self) -> Callable[[Prepared], tuple[Tensor, int, dict[str, Tensor]]]:
        """Return the function that a step calls for each micro-batch; a prepared batch needs no step number."""
        return partial(self, step=0)

    def at(self, moment: Moment) -> None:
        """Tell how far the run is."""
        self.objective.at(moment)

    def seen(self, average: Averager) -> tuple[Objective, Swapped]:
        """Return the objective to evaluate, and what puts the average into it, or back."""
        return self.objective, average

    @abstractmethod
    def last(self, last: bool) -> AbstractContextManager[None]:
        """Context of the forward and backward pass of a micro-batch: sums come with the `last` of a step."""

    def mean(self, count: int | Tensor) -> None:
        """Divide the gradients, which are sums, by the number of examples `count`, in place."""
        _divide(self.objective.parameters(), count)


class Alone(Parallel):
    """One process, and nobody to talk to."""

    @property
    def loss(self) -> Callable[[Prepared], tuple[Tensor, int, dict[str, Tensor]]]:
        """Return the objective's loss itself: nothing stands between it and the step."""
        return self.objective.loss

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        return nullcontext()


class Replicated(Parallel):
    """All weights in every process: torch's DistributedDataParallel (DDP).

    It sums gradients bucket by bucket, the last layers' first, while the backward pass goes on to earlier ones. An
    objective need not ask everything of a network, such as its pool: a parameter that no process has used keeps no
    gradient, as in one process. Buffers stay each process's own.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # not every torch has its successor
            self._network = nn.parallel.DistributedDataParallel(
                objective, broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
            )
        self._network.register_comm_hook(None, _summed)

    def __call__(self, part: Prepared, *, step: int) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Parallel`."""
        return self._network(part, step=step)  # type: ignore[no-any-return]

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        return nullcontext() if last else self._network.no_sync()


def _summed(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """Sum a bucket over the processes, where DDP would take the mean: the loop divides by the count of all."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Sharded(Parallel):
    """Every process has its part of the weights (`vitrail.training.processes.sharding`).

    Where a step has several micro-batches, their gradients are added up whole, and cut with the last: one sum a step
    costs the memory of all gradients.
    """

    def __init__(self, objective: Objective, whole: Whole) -> None:
        super().__init__(objective)
        shard(objective)
        self._cut: Any = objective
        self._whole = whole

    def at(self, moment: Moment) -> None:
        """See `Parallel`."""
        super().at(moment)
        self._whole.objective.at(moment)

    def seen(self, average: Averager) -> tuple[Objective, Swapped]:
        """See `Parallel`."""
        return self._whole.objective, GatheredAverage(average, self._whole)

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        self._cut.set_requires_gradient_sync(last)
        self._cut.set_is_last_backward(last)
        return nullcontext()


def distribute(objective: Objective, run: Run) -> Parallel:
    """Return `objective`, on its device, as the processes of the run compute it: prepared, and shared out."""
    if not sharded(run):
        prepare(objective.model, run)
        return Alone(objective) if world.size() == 1 else Replicated(objective)
    whole = Whole(objective)
    prepare(objective.model, run)
    return Sharded(objective, whole)


def _divide(parameters: Iterable[nn.Parameter], count: int | Tensor) -> None:
    gradients = [world.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, count)
