"""What is done to the single-device model from outside, in this order:

0. the branches of parallel blocks computed as one, where the run says so;
1. activation checkpointing, on each block: what is recomputed must be inside what is compiled;
2. torch.compile, on each block: the blocks share one compiled graph, so the wait is that of a single block;
3. many processes: gradients are summed over them as they are computed; or, with `Run.shard`, FSDP2 on each block and on
   the objective (`vitrail.train.sharding`). What talks to other processes is outside of what is recomputed.

None of it changes the names in the model's state_dict: a checkpoint does not know how it was trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from vitrail.train.average import Averager, Swapped
from vitrail.train.run import Run
from vitrail.train.sharding import GatheredAverage, Whole, shard, sharded


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

    def at(self, moment: Moment) -> None:
        """Tell how far the run is."""
        self.objective.at(moment)

    def seen(self, average: Averager) -> tuple[Objective, Swapped]:
        """Return the objective to evaluate, and what puts the average into it, or back."""
        return self.objective, average

    @abstractmethod
    def last(self, last: bool) -> AbstractContextManager[None]:
        """Context of the forward and backward pass of a micro-batch: sums come with the `last` of a step."""

    def mean(self, count: int) -> None:
        """Turn the gradients, sums by now, into those of the mean over all `count` examples, in place."""
        _divide(self.objective.parameters(), count)


class Alone(Parallel):
    """One process, and nobody to talk to."""

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        return nullcontext()


class Replicated(Parallel):
    """All weights in every process: data-parallel as torch's DistributedDataParallel (DDP) is.

    Gradients are summed in buckets, the last layers' first, while the backward pass goes on to earlier ones. DDP takes
    the mean, and wants to be told beforehand whether everything is used. An objective need not ask everything of a
    network, such as its pool: a parameter that no process has used keeps no gradient, as in one process.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self._buckets = _buckets([p for p in objective.parameters() if p.requires_grad])
        self._bucket = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._next = len(self._buckets)
        """The first bucket that is not on its way; all are, except in the last backward pass of a step."""
        for parameter in self._bucket:
            parameter.register_post_accumulate_grad_hook(self._computed)

    @contextmanager
    def last(self, last: bool) -> Iterator[None]:
        """See `Parallel`."""
        if last:
            self._next = 0
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters)
        yield
        for bucket in self._buckets[self._next :]:  # not all of it was used
            bucket.send()
        self._next = len(self._buckets)
        if last:
            for bucket in self._buckets:
                bucket.receive()

    def _computed(self, parameter: nn.Parameter) -> None:
        """Send what has become complete. All processes send in the same order."""
        self._bucket[parameter].missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].send()
            self._next += 1


class _Bucket:
    """Parameters whose gradients are summed at once."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.missing = 0
        """Gradients that the backward pass has not reached yet."""
        self._sent: Tensor | None = None
        self._work: dist.Work | None = None

    def send(self) -> None:
        """Begin to sum: every process sends the same tensors, and behind them which of these it has."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        there = gradients[0].new_tensor([p.grad is not None for p in self.parameters])
        self._sent = torch.cat([*(gradient.flatten() for gradient in gradients), there])
        self._work = dist.all_reduce(self._sent, async_op=True)

    def receive(self) -> None:
        """Put the sums in the place of the gradients, where any process has one."""
        assert self._sent is not None and self._work is not None
        self._work.wait()
        *sums, there = self._sent.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for number, (parameter, found) in enumerate(zip(self.parameters, sums, strict=True)):
            if parameter.grad is not None or bool(there[number]):
                parameter.grad = found.reshape(parameter.shape)  # no copy
        self._sent = self._work = None


def _buckets(parameters: list[nn.Parameter], first: int = 2**20, others: int = 25 * 2**20) -> list[_Bucket]:
    """Put parameters of one type together, from the last to the first, up to so many bytes; the sizes are DDP's."""
    buckets: list[_Bucket] = []
    held = 0
    for parameter in reversed(parameters):
        if not buckets or held >= (first if len(buckets) == 1 else others) or _unlike(buckets[-1], parameter):
            buckets.append(_Bucket())
            held = 0
        buckets[-1].parameters.append(parameter)
        held += parameter.nbytes
    return buckets


def _unlike(bucket: _Bucket, parameter: nn.Parameter) -> bool:
    """Can they not be in one tensor?"""
    return (bucket.parameters[0].dtype, bucket.parameters[0].device) != (parameter.dtype, parameter.device)


class Sharded(Parallel):
    """Every process has its part of the weights (`vitrail.train.sharding`).

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


def _divide(parameters: Iterable[nn.Parameter], count: int) -> None:
    gradients = [world.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, count)
