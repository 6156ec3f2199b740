"""Checkpoints of a run: when one cannot be written the run goes on for a while, and says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vitrail import world
from vitrail.errors import CheckpointError, TrainingError
from vitrail.train import checkpoint
from vitrail.train.folder import RunFolder
from vitrail.train.standing import TrainingState

PATIENCE = 3
"""Checkpoints in a row that may fail before training stops: more work is not put at risk."""


GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL: torchrun's, Slurm's and Kubernetes' default."""


class Checkpoints:
    """Saves and restores a `TrainingState` in a run folder; `say` prints a line.

    The main process writes, or each its part of a sharded one.
    """

    def __init__(self, folder: RunFolder, keep: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.keep = keep
        self.say = say
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self._failed = 0
        self._warned = False
        self._standing: dict[str, Any] = {}

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint, unless there is one of this moment already; every process returns when it is done.

        Raises TrainingError if weights are not finite, or if it was the third in a row that could not be written.
        """
        step = state.standing.step
        standing = {**asdict(state.standing), "elapsed": 0.0}
        if standing == self._standing:
            return
        saved = True
        if world.is_main() or state.sharded:
            try:
                began = time.monotonic()
                checkpoint.save(self.folder.checkpoints, step, state.state_dict(), keep=self.keep)
                self._warn_if_slow(time.monotonic() - began)
            except CheckpointError as error:
                saved = False
                self._failed += 1
                self.say(f"warning: no checkpoint at step {step}: {error}")
        if not world.any_(not saved):  # all must know: the next of this moment is for all or for none
            self.saved, self._failed, self._standing = step, 0, standing
        if world.any_(self._failed >= PATIENCE):
            raise TrainingError(
                f"the last {PATIENCE} checkpoints could not be written to {self.folder.checkpoints}: make room and "
                "resume from the newest one there"
            )

    def _warn_if_slow(self, seconds: float) -> None:
        """Say once that a save takes long: it may not be done when a patient killer loses patience."""
        if seconds > GRACE / 2 and not self._warned:
            self._warned = True
            self.say(
                f"warning: saving a checkpoint took {seconds:.0f} s, and schedulers often kill {GRACE:.0f} s after "
                "SIGTERM: ask yours for more time, or the newest checkpoint will be the periodic one before"
            )

    def restore(self, state: TrainingState) -> None:
        """Load the newest whole checkpoint into `state`, and say which.

        Raises CheckpointError where there is none, or it belongs to another run.
        """
        path = world.from_main(
            lambda: checkpoint.latest_valid(
                self.folder.checkpoints,
                on_reject=lambda bad: self.say(f"warning: passing over {bad.path.name}: {bad.reason}"),
            )
        )
        if path is None:
            raise CheckpointError(f"{self.folder.checkpoints} holds no checkpoint: the run ended before its first")
        state.load_state_dict(checkpoint.read(path, state.parts()))
        self.saved, self._standing = state.standing.step, {**asdict(state.standing), "elapsed": 0.0}
        self.say(f"resuming from {path}")
