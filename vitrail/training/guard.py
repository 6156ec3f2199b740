"""Protection of a run: signals set a flag, a folder has one writer, and non-finite updates are skipped."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import TrainingError, UsageError, VitrailError
from vitrail.files import lock

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(VitrailError):
    """A signal ended the run, after its state was saved.

    `exit_code` is what the process should end with: 130 for Ctrl-C, 143 for SIGTERM (128 + the signal).
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum

    @classmethod
    def after(cls, signum: int, folder: Path, step: int, saved: int | None) -> Interrupted:
        """Return the error for a run that stopped at `step` with its newest checkpoint at step `saved`."""
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        kept = f"saved at step {saved}" if saved == step else f"the newest checkpoint is that of step {saved}"
        return cls(f"stopped by {name} after step {step}, {kept}: go on with --resume {folder}", signum)


class Diverged(TrainingError):
    """Losses, gradients or weights are not finite. The same run would fail again."""


class Stop(Exception):
    """Raised by `Signals.check` to end an evaluation after a signal, whose number is `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Context in which SIGTERM, SIGINT and SIGHUP only set a flag.

    Nothing is saved inside a handler, because a handler can interrupt a save. The training step shares the `flags` of
    all processes and the loop reads `agreed`. A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread
    Python delivers no signals, and this context does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._agreed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number

    def requested(self) -> int | None:
        """Ask all processes, and return the signal that any of them received, on every process; None if none did.

        All processes must call it together.
        """
        if not world.any_(self.received is not None):
            return None
        return max(number or 0 for number in world.gather(self.received))

    def flags(self) -> dict[str, float]:
        """Return 1 for the signal that this process received and 0 for the others, to be summed over the processes."""
        return {number.name: float(self.received == number) for number in SIGNALS}

    def agree(self, sums: dict[str, float]) -> None:
        """Take in the sums of the `flags` of all processes."""
        self._agreed = max((int(number) for number in SIGNALS if sums[number.name]), default=None)

    @property
    def agreed(self) -> int | None:
        """Return the signal that all processes know of, without asking them; None if there is none."""
        return self._agreed if world.active() else self.received

    def check(self) -> None:
        """Raise `Stop` on every process if any process received a signal. All processes must call it together."""
        if (signum := self.requested()) is not None:
            raise Stop(signum)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the run folder for this process. The kernel releases the lock however the process ends.

    Raises UsageError if another process is writing there. The lock is on `<folder>/.lock`.
    """
    if not world.is_main():  # the other processes of a run write nothing
        yield
        return
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            lock(file, wait=False)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise UsageError(
                f"another process (pid {owner}) is writing {folder}: wait for it, stop it, or start a new run"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class FiniteGuard:
    """Counts steps that are not finite, and restores the running statistics (BatchNorm) that they changed.

    A step with a non-finite loss or gradient norm changes neither weights nor optimiser state. After `limit`
    consecutive steps of this kind `skip` raises Diverged.
    """

    def __init__(self, module: nn.Module, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self._statistics = [
            buffer
            for part in module.modules()
            if isinstance(part, torch_private.BatchNorm)
            for buffer in part.buffers(recurse=False)
        ]
        self._before: list[Tensor] = []

    def before_step(self) -> None:
        """Copy the statistics that a forward pass changes."""
        self._before = [buffer.clone() for buffer in self._statistics]

    def restore(self, unless: Tensor | None = None) -> None:
        """Put back what forward passes have changed since `before_step`; not if the bool scalar `unless` is true."""
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(before if unless is None else torch.where(unless, buffer, before))

    def finite(self, loss: float, norm: float) -> bool:
        """Return whether loss and gradient norm, over all processes, are finite."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        return False

    def skip(self, step: int, loss: float, norm: float, images: list[str]) -> str:
        """Count a step that was not finite and return the message for the log; `images` names its batch.

        Raises Diverged at the limit.
        """
        self.in_a_row += 1
        what = f"step {step} has loss {loss:g} and gradient norm {norm:g}; its images: {shorten(images)}"
        if self.in_a_row < self.limit:
            return f"warning: skipped an update that is not finite: {what}"
        raise Diverged(
            f"{self.in_a_row} steps in a row were not finite and changed nothing, the last checkpoint is good: "
            f"{what}. Resuming repeats them; start anew with a lower optim.lr, optim.clip set, or precision: float32"
        )


def shorten(names: list[str], limit: int = 8) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def require_finite(module: nn.Module) -> None:
    """Raise Diverged if a weight or statistic of `module` is not finite: such weights are never saved.

    Where they are cut over the processes, all must call it; those of the first that is not finite are told by all.
    """
    state = module.state_dict()
    floating = {name: world.local(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
    bad = next((name for name, tensor in floating.items() if not bool(torch.isfinite(tensor).all())), None)
    if any(world.is_sharded(tensor) for tensor in state.values()):
        bad = next((name for name in world.gather(bad) if name is not None), None)
    if bad is not None:
        raise Diverged(
            f"{bad} holds values that are not finite, and was not saved: resume from the last checkpoint "
            "with a lower optim.lr, optim.clip set, or precision: float32"
        )
