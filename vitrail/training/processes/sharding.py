"""`--shard`: weights, gradients and optimiser state cut over the processes (FSDP2), and the whole put together to look.

Every parameter is cut along its first dimension. A block's are gathered in front of the block, and again in the
backward pass, where their gradients are summed and cut. What is not in a block (stem, tokens, positions, classifier,
what an objective owns besides) is gathered once in a step.

Evaluation does not go through that: processes need not have equally many images to evaluate, and the main one draws
pictures and writes models alone. It gets a network of its own, `Whole`, which holds all weights while it is looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vitrail import world
from vitrail.errors import UsageError
from vitrail.objective.base import Objective
from vitrail.training.optim.average import Averager
from vitrail.training.run import Run

CAN = ("cpu", "cuda")
"""Devices over which torch can shard."""


def sharded(run: Run) -> bool:
    """Does this run share its weights out? One process alone cannot, and need not."""
    return run.shard and world.size() > 1


def shard(objective: Objective) -> None:
    """Cut the parameters of `objective`, already on its device, over the processes, in place.

    It must be called as a whole from now on, `objective(batch, step=step)` or its `before_step`, by all processes
    alike. Gradients are sums over the processes. Raises UsageError on a device that cannot.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    device = next(objective.parameters()).device
    if device.type not in CAN:
        raise UsageError(f"shard works on {' and '.join(CAN)}, not on {device.type}: leave --shard out")
    mesh = init_device_mesh(device.type, (world.size(),))
    parts = [block for blocks in _lists_of_blocks(objective) for block in blocks]
    for part in [*parts, objective]:
        cut = fully_shard(part, mesh=mesh)
        cut.set_gradient_divide_factor(1.0)  # sums: the loop divides by the count of all
        cut.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(objective, "before_step")


def _lists_of_blocks(objective: Objective) -> Iterator[nn.ModuleList]:
    """The encoder's blocks, and those of a decoder."""
    for name, module in objective.named_modules():
        if name.rpartition(".")[2] == "blocks" and isinstance(module, nn.ModuleList):
            yield module


class Whole:
    """An objective like `objective` that no process shares, without weights until they are gathered.

    Make it before `objective` is sharded or prepared in any other way. Buffers (BatchNorm's statistics) are its own.
    """

    def __init__(self, objective: Objective) -> None:
        self._live = objective
        known: dict[int, object] = {id(buffer): buffer for buffer in objective.buffers()}
        for parameter in objective.parameters():
            known[id(parameter)] = nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
        self.objective = copy.deepcopy(objective, known)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which it has the weights that the sharded objective has now; all processes must enter it."""
        whole = list(self.objective.parameters())
        with torch.no_grad():
            for mine, cut in zip(whole, self._live.parameters(), strict=True):
                mine.data = cut.full_tensor()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for mine in whole:
                mine.data = mine.data.new_empty(0)


class GatheredAverage:
    """What `Averager` is to the one who evaluates, for a sharded network: `swapped` puts `whole` together."""

    def __init__(self, average: Averager, whole: Whole) -> None:
        self._average = average
        self._whole = whole

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the `with` block the whole network holds the average, or else the weights; for all processes."""
        with self._average.swapped(), self._whole.gathered():
            yield
