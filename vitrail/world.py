"""Who am I among the processes of this run: the one place that asks torch.distributed.

Everything works without an initialised process group: one process is rank 0 of 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


def active() -> bool:
    """Is a process group running?"""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Index of this process, 0 <= rank < size()."""
    return dist.get_rank() if active() else 0


def size() -> int:
    """Number of processes in this run."""
    return dist.get_world_size() if active() else 1


def share() -> tuple[int, int]:
    """Return (number of this process, how many there are) for work that is shared without talking.

    From the process group if there is one, else from what torchrun, a Slurm array or srun has set.
    """
    if active():
        return rank(), size()
    for number, count, first in (
        ("RANK", "WORLD_SIZE", "0"),
        ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", os.environ.get("SLURM_ARRAY_TASK_MIN", "0")),
        ("SLURM_PROCID", "SLURM_NTASKS", "0"),
    ):
        if number in os.environ and count in os.environ:
            return int(os.environ[number]) - int(first), int(os.environ[count])
    return 0, 1


def is_main() -> bool:
    """Is this the process that writes files and logs?"""
    return rank() == 0


def on_main(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: run on rank 0 only; the other ranks get None and do not wait."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_main() else None

    return wrapper


def sum_(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all processes, in place; the identity for one process."""
    if active():
        dist.all_reduce(tensor)
    return tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Is this one of the tensors that are cut over the processes (`vitrail.train.sharding`)?"""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process, without a gradient and in the same memory; else the tensor."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def any_(flag: bool) -> bool:
    """True on every process if it is true on one."""
    if not active():
        return flag
    tensor = torch.tensor(int(flag))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())


def gather(value: Any) -> list[Any]:
    """Return the picklable `value` of every process, in rank order, on every process."""
    if not active():
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_main(function: Callable[[], T]) -> T:
    """Return what `function` returns on rank 0, where alone it runs, on every process; what it raises, all raise."""
    outcome: tuple[Any, Exception | None] = (None, None)
    if is_main():
        try:
            outcome = (function(), None)
        except Exception as error:
            outcome = (None, error)
    value, failure = gather(outcome)[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def barrier() -> None:
    """Wait until every process is here."""
    if active():
        dist.barrier()
