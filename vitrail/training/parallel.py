"""What is applied to the single-device model from outside (`distribute`), in this order:

1. activation checkpointing, on each block: what is recomputed must be inside what is compiled;
2. torch.compile, on each block: all blocks share the compiled graphs, for each size of images and any size of batches;
3. several processes, whose gradients are summed while they are computed (DDP); or, with `Run.shard`, FSDP2 on each
   block and on the objective. Communication stays outside of what is recomputed.

The names in the model's state_dict stay the same: a checkpoint does not depend on how it was trained. Gradients are
sums over the examples of all processes.

`--shard` splits every parameter along its first dimension. The parameters of a block are gathered before the block, and
again in the backward pass, where their gradients are reduced and split. The other parameters (stem, tokens, positions,
classifier, the objective's own) are gathered once per step. `--shard N` splits them over groups of N processes, and
every group has all of them: what is gathered stays inside a group, such as the GPUs of one machine. Evaluation does not
use the sharded network: processes may have different numbers of images to evaluate, and the main process draws pictures
and writes models alone. A second network (`empty_copy`) holds all weights meanwhile.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.device import autocast_dtype, first_line, out_of_memory
from vitrail.errors import UsageError
from vitrail.model.block import compile_blocks
from vitrail.model.vit import ViT
from vitrail.objective.base import Moment, Objective, Prepared
from vitrail.training.optim.average import Averager, Swapped
from vitrail.training.run import Run
from vitrail.words import listing

Computed = tuple[Tensor, int, dict[str, Tensor]]
"""Loss, number of examples and metrics of a micro-batch, as an objective returns them."""
SHARDING = ("cpu", "cuda")
"""Types of device on which torch can shard."""
STATIC = ("vitrail", "torch")
"""Packages whose modules use the same parameters in every process, whatever the images are."""


class Repeat(Exception):
    """All processes must compute the gradient of this step again, from the start."""


class MemoryRanOut(Repeat, MemoryError):
    """Memory ran out in some process, and all processes know it."""


def distribute(objective: Objective, run: Run) -> Parallel:
    """Return `objective`, which is on its device, prepared and distributed over the processes of the run."""
    prepare_model(objective, run)
    whole = empty_copy(objective) if sharded(run) else None
    if whole is not None:
        return Sharded(objective, whole, run)
    return Replicated(objective) if world.size() > 1 else Parallel(objective)


def sharded(run: Run) -> bool:
    """Return whether this run shards its weights; a single process never does."""
    return bool(run.shard) and world.size() > 1


def shards(run: Run) -> int:
    """Return the number of processes over which a sharded run splits each parameter; raise UsageError if impossible."""
    size = world.size()
    count = size if run.shard is True else min(int(run.shard), size)
    if size % count:
        fitting = [number for number in range(2, size + 1) if size % number == 0]
        raise UsageError(
            f"--shard is {count}, but {size} processes cannot be divided into groups of {count}. Use --shard "
            f"{listing(list(map(str, fitting)), quoted=False)}, or another number of processes"
        )
    return count


def prepare_model(module: Any, run: Run) -> None:
    """Apply activation checkpointing and compilation to a network or an objective, in place, as `run` asks for.

    Compiled are the blocks of encoder, decoder and a teacher that follows the weights. A network without encoder blocks
    (a ResNet) is treated as one block.
    """
    model = getattr(module, "model", module)
    if run.activation_checkpointing:
        for part in checkpointed_parts(model):
            part.recompute = True
    if not run.compile:
        return
    if not compile_blocks(module):
        model.compile()


def checkpointed_parts(model: Any) -> list[Any]:
    """Return the modules that are prepared one by one: the encoder blocks of a ViT, or else the whole network."""
    return list(model.blocks) if isinstance(model, ViT) else [model]


class Parallel:
    """An objective as the processes of a run compute it; this class is for a single process."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    @property
    def loss(self) -> Callable[[Prepared], Computed]:
        """Return the function that a step calls for each micro-batch: of a single process, the objective's loss."""
        return self.objective.loss

    def last(self, last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward pass; with the `last` of a step gradients are summed."""
        return nullcontext()

    def summed(self, *, afterwards: bool) -> AbstractContextManager[None]:
        """Context of all forward and backward passes of a step, after which gradients are sums over the processes.

        afterwards: Sum them after the passes, and not meanwhile, where that is possible. Then no process waits for
        another one during the passes, so that memory that runs out in one process can become an exception in all.

        Raises Repeat in all processes if they must compute the step again; MemoryRanOut if memory is the reason.
        """
        return nullcontext()

    def mean(self, count: float | Tensor) -> None:
        """Divide the gradients, which are sums, by the number of examples `count`, in place."""
        gradients = [world.local_part(each.grad) for each in self.objective.parameters() if each.grad is not None]
        if gradients:  # torch's fast kernel takes only a divisor of the same type
            divisor = count.to(gradients[0].dtype) if isinstance(count, Tensor) else count
            torch_private.foreach_div_(gradients, divisor)

    def at(self, moment: Moment) -> None:
        """Pass on how far the run is."""
        self.objective.at(moment)

    def for_evaluation(self, average: Averager) -> tuple[Objective, Swapped]:
        """Return the objective to evaluate, and the object whose `swapped` puts the average into it."""
        return self.objective, average


class Replicated(Parallel):
    """All weights in every process: torch's DistributedDataParallel (DDP).

    It sums gradients bucket by bucket, those of the last layers first, while the backward pass computes earlier ones.
    A parameter that no process uses, such as a pool that the objective does not need, has no gradient, as with one
    process. Every process has its own buffers.

    DDP begins when steps no longer sum their gradients afterwards. By then it is known which parameters are used, so
    DDP need not search for the others in every step. If that changes, as when DINO's last layer begins to learn, the
    step is repeated. Modules that are not ours may use other parameters in each process: there DDP searches.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        for parameter in objective.parameters():
            world.from_main_(parameter.detach())
        self._learning = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        self._static = all(type(part).__module__.split(".")[0] in STATIC for part in objective.modules())
        self._used: list[bool] = []
        """For each parameter that learns, whether the newest step used it in any process."""
        self._afterwards = False
        self._ddp: nn.parallel.DistributedDataParallel | None = None

    @property
    def loss(self) -> Callable[[Prepared], Computed]:
        """See `Parallel`. A prepared batch needs no step number."""
        return partial(self.objective if self._afterwards else self._network, step=0)

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        return nullcontext() if last or self._afterwards else self._network.no_sync()

    @contextmanager
    def summed(self, *, afterwards: bool) -> Iterator[None]:
        """See `Parallel`."""
        self._afterwards = afterwards or not self._used
        failed = ""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self._afterwards or not out_of_memory(error):
                raise
            failed = first_line(error)
        if self._afterwards:
            self._sum(failed)
        elif self._static and self._used != [each.grad is not None for each in self._learning]:
            self._used, self._ddp = [], None
            raise Repeat

    def _sum(self, failed: str) -> None:
        """Sum the gradients, unless memory ran out in any process; `failed` says so of this one."""
        used = [float(each.grad is not None) for each in self._learning]
        of_any = world.max_(torch.tensor([float(bool(failed)), *used])).bool().tolist()
        if of_any.pop(0):
            raise MemoryRanOut(failed or "memory ran out in another process")
        if of_any != self._used:
            self._used, self._ddp = of_any, None
        for each, is_used in zip(self._learning, of_any, strict=True):
            if is_used:
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                world.sum_(each.grad)

    def mean(self, count: float | Tensor) -> None:
        """See `Parallel`. DDP has divided the sums by the number of processes."""
        super().mean(count if self._afterwards else count / world.size())

    @property
    def _network(self) -> nn.parallel.DistributedDataParallel:
        if self._ddp is None:
            unused = [each for each, is_used in zip(self._learning, self._used, strict=True) if not is_used]
            for each in unused if self._static else ():
                each.requires_grad_(False)  # so that DDP leaves it out
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", ".*broadcast_buffers", FutureWarning
                )  # older torch lacks its successor
                self._ddp = nn.parallel.DistributedDataParallel(
                    self.objective,
                    broadcast_buffers=False,
                    init_sync=False,
                    find_unused_parameters=not self._static,
                    gradient_as_bucket_view=True,
                )
            for each in unused:
                each.requires_grad_(True)
        return self._ddp


class Sharded(Parallel):
    """A part of every weight in each process: torch's FSDP2. `whole` is the `empty_copy` of the objective.

    The gradients of several micro-batches are accumulated unsharded and reduced with the last one: a single reduction
    per step, for the memory of all gradients.
    """

    def __init__(self, objective: Objective, whole: Objective, run: Run) -> None:
        super().__init__(objective)
        shard(objective, shards(run), autocast_dtype(run.precision))
        self._cut: Any = objective
        self._whole = whole

    @property
    def loss(self) -> Callable[[Prepared], Computed]:
        """See `Parallel`. A prepared batch needs no step number."""
        return partial(self._cut, step=0)

    def last(self, last: bool) -> AbstractContextManager[None]:
        """See `Parallel`."""
        self._cut.set_requires_gradient_sync(last)
        self._cut.set_is_last_backward(last)
        return nullcontext()

    def at(self, moment: Moment) -> None:
        """See `Parallel`."""
        super().at(moment)
        self._whole.at(moment)

    def for_evaluation(self, average: Averager) -> tuple[Objective, Swapped]:
        """See `Parallel`."""
        return self._whole, GatheredAverage(average, self.objective, self._whole)


def shard(objective: Objective, count: int, half: torch.dtype | None = None) -> None:
    """Shard the parameters of `objective`, which is on its device, over groups of `count` processes, in place.

    half: Gather the parameters of blocks in this type, in which autocast multiplies them anyway. Gradients are reduced
    in float32, and stem, tokens, positions and classifier stay float32, so that the residual stream does.

    From now on all processes must call `objective(batch, step=step)` or `before_step` together, and no parts of it.
    Gradients are sums over the processes. Raises UsageError on a device that cannot shard.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    device = next(objective.parameters()).device
    if device.type not in SHARDING:
        raise UsageError(f"--shard works on {' and '.join(SHARDING)}, not on {device.type}. Remove --shard.")
    groups, names = world.size() // count, ("copies", "parts")
    mesh = init_device_mesh(device.type, (groups, count), mesh_dim_names=names)
    mesh = mesh if groups > 1 else mesh["parts"]
    # the blocks of the encoder, and those of a decoder
    lists = [part for name, part in objective.named_modules() if name.rpartition(".")[2] == "blocks"]
    of_encoders = [[*part] for part in lists if isinstance(part, nn.ModuleList)]
    blocks = [block for encoder in of_encoders for block in encoder]
    for part in [*blocks, objective]:
        gathered = None if part is objective else half
        policy = MixedPrecisionPolicy(gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
        module = fully_shard(part, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # sums; the step divides by the count of all examples
        module.set_force_sum_reduction_for_comms(True)
    for encoder in of_encoders:  # while a block is computed, the next one is gathered
        for block, following in pairwise(encoder):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    register_fsdp_forward_method(objective, "before_step")


def empty_copy(objective: Objective) -> Objective:
    """Return a copy of `objective` that shares its buffers (BatchNorm's statistics), and whose weights are empty.

    Create it before `objective` is sharded. `GatheredAverage` fills it.
    """
    known: dict[int, object] = {id(buffer): buffer for buffer in objective.buffers()}
    for parameter in objective.parameters():
        known[id(parameter)] = nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
    return copy.deepcopy(objective, known)


@dataclass
class GatheredAverage:
    """Replaces `Averager` in the evaluation of a sharded network."""

    average: Averager
    sharded: Objective
    whole: Objective
    """An `empty_copy` of it."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which `whole` holds the average, or the weights if there is none; all processes must enter it."""
        weights = list(self.whole.parameters())
        with self.average.swapped():
            with torch.no_grad():
                for mine, part in zip(weights, self.sharded.parameters(), strict=True):
                    mine.data = part.full_tensor()  # type: ignore[attr-defined]
            try:
                yield
            finally:
                for mine in weights:
                    mine.data = mine.data.new_empty(0)
