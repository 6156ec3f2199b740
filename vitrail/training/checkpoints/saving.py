"""Checkpoints of a run, written while training goes on; when one cannot be written the run goes on for a while, too.

At a step that saves, the tensors are copied in main memory, and a thread writes the copies. The next save waits for the
one before, and so does whoever ends the run: what is said to be saved is durable. Until it is, the checkpoint before
stays, so a kill at any moment costs at most what came after that one.
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
from vitrail.errors import CheckpointError, TrainingError
from vitrail.training.batch_size import free_memory
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.flat import copied, nbytes
from vitrail.training.checkpoints.state import TrainingState
from vitrail.training.folder import RunFolder

PATIENCE = 3
"""Checkpoints in a row that may fail before training stops: more work is not put at risk."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL: torchrun's, Slurm's and Kubernetes' default."""
ROOM = 2.0
"""Free memory that a copy takes, as a multiple of it, or else training waits for the save."""
LONGEST = timedelta(days=7)
"""That the processes of a sharded run wait while one of them writes its part: as long as one process alone would."""


class Checkpoints:
    """Saves and restores a `TrainingState` in a run folder; `say` prints a line.

    The main process writes, or each its part of a sharded one. A context, which ends when nothing is being written.
    """

    def __init__(self, folder: RunFolder, keep: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.keep = keep
        self.say = say
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self._failed = 0
        self._warned = False
        self._saved_status: dict[str, Any] = {}
        self._pending: _Save | None = None
        self._copies: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not KeyboardInterrupt:  # a second Ctrl-C waits for nothing
            self._settle()

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, as it is when other processes may not answer any more."""
        self._settle()
        return checkpoint.newest(self.folder.checkpoints)

    def save(self, state: TrainingState, *, wait: bool = True) -> None:
        """Write a checkpoint, unless there is one of this moment already; all processes call it.

        With `wait` it returns when that is durable, else as soon as training can go on. Raises TrainingError if weights
        are not finite, or if it was the third in a row that could not be written.
        """
        self.wait()
        status = {**asdict(state.status), "elapsed": 0.0}
        if status == self._saved_status:
            return
        step = state.status.step
        write: Callable[[], object] | None = None
        if world.is_main() or state.sharded:
            contents = state.state_dict()
            if not wait and nbytes(contents) * ROOM < free_memory(torch.device("cpu")) + nbytes(self._copies):
                contents = copied(contents, self._copies)
            else:
                wait = True
            options = {"group": self._talking()} if state.sharded else {}
            write = partial(checkpoint.save, self.folder.checkpoints, step, contents, keep=self.keep, **options)
        self._pending = _Save(step, status, write)
        self._pending.start(threaded=not wait)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when what is being written is durable, or has failed; all processes call it.

        Raises TrainingError if it was the third in a row that could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with world.main_alone("writing a checkpoint"):
            pending.join()
        if isinstance(pending.error, CheckpointError):
            self._failed += 1
            self.say(f"warning: no checkpoint at step {pending.step}: {pending.error}")
        elif pending.error is not None:
            raise pending.error
        self._warn_if_slow(pending.seconds)
        if not world.any_(pending.error is not None):  # all must know: the next of this moment is for all or for none
            self.saved, self._failed, self._saved_status = pending.step, 0, pending.status
        if world.any_(self._failed >= PATIENCE):
            raise TrainingError(
                f"the last {PATIENCE} checkpoints could not be written to {self.folder.checkpoints}: make room and "
                "resume from the newest one there"
            )

    def restore(self, state: TrainingState) -> None:
        """Load the newest whole checkpoint into `state`, and say which.

        Raises CheckpointError where there is none, or it belongs to another run.
        """
        path = world.from_main(
            "looking through the checkpoints",
            lambda: checkpoint.latest_valid(
                self.folder.checkpoints,
                on_reject=lambda bad: self.say(f"warning: passing over {bad.path.name}: {bad.reason}"),
            ),
        )
        if path is None:
            raise CheckpointError(f"{self.folder.checkpoints} holds no checkpoint: the run ended before its first")
        state.load_state_dict(checkpoint.read(path, state.parts()))
        self.saved, self._saved_status = state.status.step, {**asdict(state.status), "elapsed": 0.0}
        self.say(f"resuming from {path}")

    def _settle(self) -> None:
        """Let what is being written become durable; with other processes' help, which may be gone, for a while only."""
        if self._pending is not None:
            self._pending.join(None if self._group is None else GRACE)

    def _talking(self) -> dist.ProcessGroup:
        """What the processes talk through while they save: training goes on talking in the meantime."""
        if self._group is None:
            group = dist.new_group(backend="gloo", timeout=LONGEST)
            assert isinstance(group, dist.ProcessGroup)  # all processes are in it
            self._group = group
        return self._group

    def _warn_if_slow(self, seconds: float) -> None:
        """Say once that a save takes long: it may not be done when a patient killer loses patience."""
        if seconds > GRACE / 2 and not self._warned:
            self._warned = True
            self.say(
                f"warning: saving a checkpoint took {seconds:.0f} s, and schedulers often kill {GRACE:.0f} s after "
                "SIGTERM: ask yours for more time, or the newest checkpoint will be the periodic one before"
            )


class _Save:
    """A checkpoint of step `step` that `write` writes; None on a process that has nothing to write."""

    def __init__(self, step: int, status: dict[str, Any], write: Callable[[], object] | None) -> None:
        self.step, self.status = step, status
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._write = write
        self._thread: threading.Thread | None = None

    def start(self, *, threaded: bool) -> None:
        """Write it, here or in a thread that nobody waits for when the process ends."""
        if not threaded:
            self._run()
        elif self._write is not None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Return when it has been written, or has failed; after `timeout` seconds in any case."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        if self._write is None:
            return
        began = time.monotonic()
        try:
            self._write()
        except BaseException as error:  # for the thread that trains
            self.error = error
        self.seconds = time.monotonic() - began
