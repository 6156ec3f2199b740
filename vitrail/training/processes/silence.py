"""What a process of a run says when another one is gone, or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitrail import world
from vitrail.errors import TrainingError
from vitrail.training.checkpoints.saving import Checkpoints
from vitrail.training.run import Run

LATE = ("Timed out waiting", "timeout", "timed out")
"""How torch says that a collective took longer than it may: gloo's words, and its own."""
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed")
"""How it says that another process has ended."""


@contextmanager
def explaining_silence(run: Run, checkpoints: Checkpoints) -> Iterator[None]:
    """Context in which another process that hangs or has ended is a TrainingError that says so, and what is saved."""
    try:
        yield
    except RuntimeError as error:
        pulse, said = world.pulse(), str(error)
        late, gone = (any(words in said for words in known) for known in (LATE, GONE))
        if pulse is None or not (late or gone):
            raise
        if gone:
            what = "another process of the run has ended, and its own message says why"
        else:
            silent = pulse.silent()
            them = " and ".join(map(str, silent)) or "another one"
            what = f"process {them} did not answer for {run.timeout:g} s (timeout): does it hang?"
        step, folder = checkpoints.newest(), checkpoints.folder.path
        kept = f"the newest checkpoint is that of step {step}: go on with --resume {folder}"
        raise TrainingError(f"{what}; {'there is no checkpoint yet' if step is None else kept}") from error
