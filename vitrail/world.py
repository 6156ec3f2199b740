"""The processes of this run: rank, number, and how they exchange values. The one place that asks torch.distributed.

Everything works without a process group: a single process is rank 0 of 1.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from vitrail import torch_private
from vitrail.errors import TrainingError

STEPS = "VITRAIL_STEPS"
"""Environment variable with the launcher's file in which each process writes its step, in `STEP_BYTES` bytes."""
STEP_BYTES = 8
P = ParamSpec("P")
T = TypeVar("T")


def active() -> bool:
    """Return whether a process group is running."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the index of this process, 0 <= rank < size()."""
    return dist.get_rank() if active() else 0


def size() -> int:
    """Return the number of processes in this run."""
    return dist.get_world_size() if active() else 1


def share() -> tuple[int, int]:
    """Return (index of this process, number of processes) for work that is divided without communication.

    Without a process group they come from the variables of torchrun, a Slurm array or srun.
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
    """Return whether this is the main process, which writes files and logs."""
    return rank() == 0


def on_main(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on rank 0 only; the other ranks return None at once."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_main() else None

    return wrapper


def sum_(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place."""
    if active():
        dist.all_reduce(tensor)
    return tensor


def max_(tensor: torch.Tensor) -> torch.Tensor:
    """Take the element-wise maximum of a tensor over all processes, in place."""
    if active():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all processes, which have the same shape [rows, ...], as one [size() * rows, ...]."""
    if not active():
        return tensor
    every = tensor.new_empty(size() * len(tensor), *tensor.shape[1:])
    torch_private.all_gather_single(every, tensor.contiguous())
    return every


def from_main_(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from rank 0 to all processes, in place."""
    if active():
        dist.broadcast(tensor, 0)
    return tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded over the processes (`vitrail.training.parallel`)."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a sharded tensor, detached, in the same memory. Return other tensors as given."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sum_parts_(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the processes that hold the parts of `like`, in place; not at all if it is not sharded."""
    if is_sharded(like):
        mesh: Any = like.device_mesh  # type: ignore[attr-defined]
        dist.all_reduce(tensor, group=mesh.get_group(mesh.ndim - 1))  # the other dimension holds copies
    return tensor


def rows_here(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return those of `rows`, one for each row of the sharded `like`, that this process holds."""
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    pieces, number = rows.chunk(mesh.size(mesh.ndim - 1)), mesh.get_local_rank(mesh.ndim - 1)
    return pieces[number] if number < len(pieces) else rows[:0]  # the last processes may have no rows


def copied_like(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of `tensor`. If it has the shape of the sharded `like`, it is sharded in the same way."""
    if like is None or like.shape != tensor.shape:
        return tensor.clone()
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None).clone()


def whole(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor of which each process holds a `part`, sharded in the same way as `like`.

    If `like` is not sharded, return `part` as given.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    mesh, placements = sharded.device_mesh, sharded.placements
    tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    return tensor.full_tensor()


def any_(flag: bool) -> bool:
    """Return True on every process if `flag` is True on any."""
    return bool(max_(torch.tensor(int(flag))).item()) if active() else flag


def gather(value: Any) -> list[Any]:
    """Return on every process the list of the picklable `value`s of all processes, in rank order."""
    if not active():
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_main(what: str, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 only and return its result on every rank; an exception is raised on every rank.

    `what` describes the work, as in `main_alone`.
    """
    value: Any = None
    failure: Exception | None = None
    with main_alone(what):
        try:
            value = function() if is_main() else None
        except Exception as error:
            failure = error
    value, failure = gather((value, failure))[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


class Pulse:
    """A heartbeat of the main process: while it beats, the other processes wait for the main process's long work.

    Collectives, in contrast, must be entered within `timeout` seconds, and within `later` seconds once the first step
    has been taken, in which networks are compiled and caches filled. A context, active in all processes of a run.
    """

    def __init__(self, store: dist.Store, timeout: float, later: float | None = None) -> None:
        self.timeout = timeout
        self._later = timeout if later is None else later
        self._steps: str | None = os.environ.get(STEPS)
        self._slice = min(timeout / 4, 10.0)
        self._store = store
        self._beats = store.clone()  # a connection of its own, because the other one may be waiting
        self._numbers = itertools.count()
        self._ended = threading.Event()

    def __enter__(self) -> Pulse:
        global _pulse
        _pulse = self
        if is_main():
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        global _pulse
        _pulse = None
        self._ended.set()

    def begin(self, step: int, *, first: bool) -> None:
        """See `begin_step`; `first`: Whether this process begins its first one."""
        if not first and self.timeout != self._later:
            self.timeout = self._later
            torch_private.set_timeout(timedelta(seconds=self._later))
        if self._steps is not None:
            with open(self._steps, "r+b", buffering=0) as file:
                file.seek(STEP_BYTES * rank())
                file.write(step.to_bytes(STEP_BYTES, "little"))

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store closes at the end of the run
            while not self._ended.wait(self._slice):
                self._beats.add("beats", 1)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """See `main_alone`."""
        key = f"alone/{next(self._numbers)}"
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            if is_main():
                self._store.set(key, outcome)
        if not is_main():
            self._follow(key, what)

    def _follow(self, key: str, what: str) -> None:
        beats, since = -1, time.monotonic()
        while True:
            try:
                self._store.wait([key], timedelta(seconds=self._slice))
                break
            except dist.DistStoreError:  # not yet
                now = self._store.add("beats", 0)
            if now != beats:
                beats, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                raise TrainingError(f"The main process did not respond for {self.timeout:g} s (--timeout) while {what}")
        if self._store.get(key) != b"done":
            raise TrainingError(f"The main process failed while {what}. See its own message.")

    def silent(self) -> list[int]:
        """Return the ranks that do not respond. Every process calls this after its collective has timed out."""
        self._store.set(f"waited/{rank()}", "")
        until = time.monotonic() + min(self.timeout / 2, 30.0)
        others = set(range(size()))
        while others and time.monotonic() < until:
            others = {number for number in others if not self._store.check([f"waited/{number}"])}
            self._ended.wait(0.1)
        return sorted(others)


_pulse: Pulse | None = None


def begin_step(step: int, *, first: bool) -> None:
    """Note that this process begins a training step. The launcher reads it if a process ends without a message."""
    if _pulse is not None:
        _pulse.begin(step, first=first)


def pulse() -> Pulse | None:
    """Return the heartbeat of the run that this process belongs to; None without one."""
    return _pulse


@contextmanager
def main_alone(what: str) -> Iterator[None]:
    """Context or decorator for work that only rank 0 does and that may take longer than a collective's timeout.

    All processes enter it. While the main process is alive, the others wait until it leaves the context. `what`
    describes the work, such as "writing a checkpoint". Raises TrainingError if the main process died or failed.
    """
    with nullcontext() if _pulse is None else _pulse.alone(what):
        yield


def barrier() -> None:
    """Wait until every process has called this."""
    if active():
        dist.barrier()


def leave(code: int) -> NoReturn:
    """End this process at once: gloo may abort a process that was in a group while the interpreter shuts down."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
