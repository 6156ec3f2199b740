"""`--shard`: weights, gradients and optimiser state sharded over the processes (FSDP2), and gathered for evaluation.

Every parameter is split along its first dimension. The parameters of a block are gathered before the block, and again
in the backward pass, where their gradients are reduced and split. The other parameters (stem, tokens, positions,
classifier, the objective's own) are gathered once per step.

Evaluation does not use the sharded network: processes may have different numbers of images to evaluate, and the main
process draws pictures and writes models alone. `GatheredCopy` is a second network that holds all weights meanwhile.
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

SUPPORTED = ("cpu", "cuda")
"""Types of device on which torch can shard."""


def sharded(run: Run) -> bool:
    """Return whether this run shards its weights; a single process never does."""
    return run.shard and world.size() > 1


def shard(objective: Objective) -> None:
    """Shard the parameters of `objective`, which is on its device, over the processes, in place.

    From now on all processes must call `objective(batch, step=step)` or `before_step` together, and no parts of it.
    Gradients are sums over the processes. Raises UsageError on a device that cannot shard.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    device = next(objective.parameters()).device
    if device.type not in SUPPORTED:
        raise UsageError(f"--shard works on {' and '.join(SUPPORTED)}, not on {device.type}. Remove --shard.")
    mesh = init_device_mesh(device.type, (world.size(),))
    parts = [block for blocks in _lists_of_blocks(objective) for block in blocks]
    for part in [*parts, objective]:
        module = fully_shard(part, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # sums; the step divides by the count of all examples
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(objective, "before_step")


def _lists_of_blocks(objective: Objective) -> Iterator[nn.ModuleList]:
    """Yield the blocks of the encoder, and those of a decoder."""
    for name, module in objective.named_modules():
        if name.rpartition(".")[2] == "blocks" and isinstance(module, nn.ModuleList):
            yield module


class GatheredCopy:
    """An unsharded copy of `objective`, whose weights are empty until they are gathered.

    Create it before `objective` is sharded or prepared. It shares the buffers (BatchNorm's statistics).
    """

    def __init__(self, objective: Objective) -> None:
        self._sharded = objective
        known: dict[int, object] = {id(buffer): buffer for buffer in objective.buffers()}
        for parameter in objective.parameters():
            known[id(parameter)] = nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
        self.objective = copy.deepcopy(objective, known)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the copy holds the present weights of the sharded objective; all processes must enter it."""
        whole = list(self.objective.parameters())
        with torch.no_grad():
            for mine, part in zip(whole, self._sharded.parameters(), strict=True):
                mine.data = part.full_tensor()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for mine in whole:
                mine.data = mine.data.new_empty(0)


class GatheredAverage:
    """Replaces `Averager` in the evaluation of a sharded network: `swapped` also gathers `whole`."""

    def __init__(self, average: Averager, whole: GatheredCopy) -> None:
        self._average = average
        self._whole = whole

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the whole network holds the average, or the weights if there is none, in all processes."""
        with self._average.swapped(), self._whole.gathered():
            yield
