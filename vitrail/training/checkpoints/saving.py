"""Checkpoints of a run, written in a thread while training continues.

At a step that saves, the tensors are copied in main memory, and a thread writes the copies. The next save, and the end
of the run, wait for the thread: a step that is reported as saved is durable. Until then the previous checkpoint stays,
so that a kill at any moment loses at most the work since that one. A few checkpoints may fail before training stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail import world
from vitrail.device import free_memory
from vitrail.errors import CheckpointError, TrainingError
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.flatten import copied, nbytes
from vitrail.training.checkpoints.state import TrainingState
from vitrail.training.folder import RunFolder

PATIENCE = 3
"""Training stops after this number of consecutive checkpoints that could not be written."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, by default, in torchrun, Slurm and Kubernetes."""
ROOM = 2.0
"""Free memory needed for a copy, as a multiple of its size. With less, training waits for the save."""
LONGEST = timedelta(days=7)
"""How long the processes of a sharded run wait for one another while they write: a slow disk is no error."""


class Checkpoints:
    """Saves and restores a `TrainingState` in a run folder; `say` prints a line.

    The main process writes; of a sharded state each process writes its part. A context that ends when no checkpoint is
    being written any more.
    """

    def __init__(self, folder: RunFolder, keep: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.keep = keep
        self.say = say
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self._failed = 0
        self._reason = ""
        self._warned = False
        self._saved_status: dict[str, Any] = {}
        self._pending: _Save | None = None
        self._buffers: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not KeyboardInterrupt:  # a second Ctrl-C ends the process at once
            self._join()

    @property
    def lost(self) -> dict[str, str]:
        """What could not be written -> the reason: the newest checkpoint, or nothing."""
        return {"the newest checkpoint": self._reason} if self._failed else {}

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, without communicating with other processes."""
        self._join()
        return checkpoint.newest(self.folder.checkpoints)

    def save(self, state: TrainingState, *, wait: bool = True) -> None:
        """Write a checkpoint, unless the newest one is of the same state; all processes call it.

        With `wait`, return when the checkpoint is durable, else as soon as training can continue. Raises TrainingError
        if weights are not finite, or after `PATIENCE` consecutive failures.
        """
        self.wait()
        status = {**asdict(state.status), "elapsed": 0.0}
        if status == self._saved_status:
            return
        step = state.status.step
        write: Callable[[], object] | None = None
        if world.is_main() or state.sharded:
            tensors = state.state_dict()
            if not wait and nbytes(tensors) * ROOM < free_memory(torch.device("cpu")) + nbytes(self._buffers):
                tensors = copied(tensors, self._buffers)
            else:
                wait = True
            options = {"group": self._saving_group()} if state.sharded else {}
            write = partial(checkpoint.save, self.folder.checkpoints, step, tensors, keep=self.keep, **options)
        self._pending = _Save(step, status, write)
        if wait:
            self._pending.run()
            self.wait()
        elif write is not None:
            self._pending.start()

    def wait(self) -> None:
        """Return when the checkpoint that is being written is durable or has failed; all processes call it.

        Raises TrainingError after `PATIENCE` consecutive failures.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with world.main_alone("writing a checkpoint"):
            pending.join()
        if isinstance(pending.error, CheckpointError):
            self._failed += 1
            self._reason = str(pending.error)
            self.say(f"warning: no checkpoint at step {pending.step}: {pending.error}")
        elif pending.error is not None:
            raise pending.error
        self._warn_if_slow(pending.seconds)
        if not world.any_(pending.error is not None):  # all processes must agree on what is saved
            self.saved, self._failed, self._saved_status = pending.step, 0, pending.status
        if world.any_(self._failed >= PATIENCE):
            raise TrainingError(
                f"the last {PATIENCE} checkpoints could not be written to {self.folder.checkpoints}. Free disk space "
                f"and resume from the newest checkpoint: vitrail train --resume {self.folder.path}"
            )

    def restore(self, state: TrainingState) -> None:
        """Load the newest intact checkpoint into `state` and print which one it is.

        Raises CheckpointError if there is none or it belongs to another run.
        """
        path = world.from_main(
            "checking the checkpoints",
            lambda: checkpoint.latest_valid(
                self.folder.checkpoints,
                on_reject=lambda bad: self.say(f"warning: skipping {bad.path.name}: {bad.reason}"),
            ),
        )
        if path is None:
            raise CheckpointError(f"{self.folder.checkpoints} holds no checkpoint: the run ended before its first")
        state.load_state_dict(checkpoint.read(path, state.sharded_tensors()))
        self.saved, self._saved_status = state.status.step, {**asdict(state.status), "elapsed": 0.0}
        self.say(f"resuming from {path}")

    def _join(self) -> None:
        """Wait until nothing is being written, but at most `GRACE` seconds for other processes, which may be gone."""
        if self._pending is not None:
            self._pending.join(None if self._group is None else GRACE)

    def _saving_group(self) -> dist.ProcessGroup:
        """Return the process group for saving, apart from the one that training uses at the same time."""
        if self._group is None:
            group = dist.new_group(backend="gloo", timeout=LONGEST)
            assert isinstance(group, dist.ProcessGroup)  # every process belongs to it
            self._group = group
        return self._group

    def _warn_if_slow(self, seconds: float) -> None:
        """Warn once that a save takes so long that a scheduler may kill the process before the save is done."""
        if seconds > GRACE / 2 and not self._warned:
            self._warned = True
            self.say(
                f"warning: saving a checkpoint took {seconds:.0f} s, and schedulers often kill {GRACE:.0f} s after "
                "SIGTERM. Ask your scheduler for more time. Otherwise the newest checkpoint will be the periodic one "
                "before the signal."
            )


class _Save(threading.Thread):
    """One checkpoint being written by calling `write`, which is None on a process that has nothing to write."""

    def __init__(self, step: int, status: dict[str, Any], write: Callable[[], object] | None) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.step, self.status = step, status
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._write = write

    def run(self) -> None:
        """Write the checkpoint. An error is kept, to be raised in the training thread."""
        if self._write is None:
            return
        began = time.monotonic()
        try:
            self._write()
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - began

    def join(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is written or has failed, but at most `timeout` seconds."""
        if self.ident is not None:  # started
            super().join(timeout)
