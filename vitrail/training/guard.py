"""Protection of a run: signals set a flag, a folder has one writer, non-finite updates are skipped, and lost processes
are explained."""

from __future__ import annotations

import gc
import math
import os
import shlex
import signal
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import TrainingError, UsageError, VitrailError
from vitrail.files import LOCK, locked
from vitrail.words import listing

SIGNALS = tuple(
    signal.Signals(getattr(signal, name))
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)
"""Signals that end a run, as far as this system has them. Windows has no SIGHUP, and SIGBREAK for Ctrl-Break."""
NAMED = 8
"""Number of images that a message names at most."""
REMEDIES = "with a lower optim.lr, optim.clip set, or precision: float32"
LOOKED_BACK = 50
"""Number of previous steps with whose median a loss is compared."""
FEWEST = 20
"""Smallest number of previous steps for a comparison."""
SPIKE = 10.0
"""A loss of more than this many medians is a spike."""
TIMED_OUT = ("Timed out waiting", "timeout", "timed out")
"""Words with which torch and gloo report a collective that took longer than its timeout."""
DISCONNECTED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed")
"""Words with which they report that another process has ended."""


class Interrupted(VitrailError):
    """A signal ended the run, after its state was saved.

    `exit_code` is the exit code for the process: 130 after Ctrl-C, 143 after SIGTERM (128 + the signal).
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum

    @classmethod
    def after(cls, signum: int, folder: Path, step: int, saved: int | None) -> Interrupted:
        """Return the error for a run that stopped at `step` with its newest checkpoint at step `saved`."""
        where = f"saved at step {saved}" if saved == step else f"the newest checkpoint is that of step {saved}"
        return cls(
            f"stopped by {signal_name(signum)} after step {step}, {where}. "
            f"Continue with vitrail train --resume {shlex.quote(str(folder))}",
            signum,
        )


def signal_name(signum: int) -> str:
    """Return the name of a signal for messages: "Ctrl-C", "SIGTERM"."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


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
        self.restore()

    def restore(self) -> None:
        """Handle signals as before the context."""
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

    Raises UsageError if another process is writing there, or if nothing can be written there. The lock is on
    `<folder>/.lock`.
    """
    if not world.is_main():  # the other processes of a run write nothing
        yield
        return
    owner, place = "", folder / LOCK
    with suppress(OSError):  # Windows lets no other process read a locked file
        owner = place.read_text("utf-8", "replace").strip()
    busy = f"another process (pid {owner or 'unknown'}) is writing {folder}. Wait for it, stop it, or start a new run."
    with locked(place, UsageError, busy, keep=True):
        with suppress(OSError):
            place.write_text(str(os.getpid()), "utf-8")
        yield


@contextmanager
def explaining_lost_processes(folder: Path, newest: Callable[[], int | None]) -> Iterator[None]:
    """Context in which a collective that fails because another process hangs or has ended raises TrainingError.

    The message names the process, and the newest checkpoint in the run folder, whose step `newest` returns.
    """
    try:
        yield
    except RuntimeError as error:
        pulse, text = world.pulse(), str(error)
        timed_out, disconnected = (any(words in text for words in known) for known in (TIMED_OUT, DISCONNECTED))
        if pulse is None or not (timed_out or disconnected):
            raise
        if disconnected:
            what = "Another process of the run has ended; see its own message"
        else:
            silent = pulse.silent()
            which = f"Process {' and '.join(map(str, silent))}" if silent else "Another process"
            what = f"{which} did not respond within {pulse.timeout:g} s (--timeout) and may be stuck"
        step = newest()
        again = f"vitrail train --resume {shlex.quote(str(folder))}"
        advice = f"The newest checkpoint is that of step {step}. Resume with {again}"
        raise TrainingError(f"{what}. {'There is no checkpoint yet' if step is None else advice}.") from error


COLLECTED = 50
"""Number of steps from one collection of garbage to the next."""


@contextmanager
def garbage_in_turns() -> Iterator[Callable[[int], object]]:
    """Context whose value, called with the number of each step, collects garbage at the same steps in all processes.

    Otherwise each process collects at a moment of its own, and all others wait for it in their next reduction. A single
    process keeps Python's own moments.
    """
    several = world.size() > 1 and gc.isenabled()
    if several:
        gc.disable()
    try:
        yield lambda step: several and step % COLLECTED == 0 and gc.collect(1)
    finally:
        if several:
            gc.enable()


class FiniteGuard:
    """Counts consecutive steps that are not finite, and restores the running statistics (BatchNorm) they changed.

    A step with a non-finite loss or gradient norm changes neither weights nor optimiser state. After `limit`
    consecutive steps of this kind `skip` raises Diverged.
    """

    def __init__(self, module: nn.Module, limit: int) -> None:
        self.limit = limit
        self._last = -1
        self._consecutive = 0
        norms = [part for part in module.modules() if isinstance(part, torch_private.BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._before: list[Tensor] = []

    def before_step(self) -> None:
        """Copy the statistics that a forward pass changes."""
        self._before = [buffer.clone() for buffer in self._statistics]

    def restore(self, unless: Tensor | None = None) -> None:
        """Restore what forward passes have changed since `before_step`; not if the bool scalar `unless` is true."""
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(before if unless is None else torch.where(unless, buffer, before))

    def skip(self, step: int, loss: float, norm: float, images: list[str]) -> str:
        """Count a step that was not finite and return the message for the log; `images` names its batch.

        Raises Diverged at the limit.
        """
        self._consecutive = self._consecutive + 1 if step == self._last + 1 else 1
        self._last = step
        names = listing(images, NAMED, quoted=False)
        what = f"step {step} has loss {loss:g} and gradient norm {norm:g}; its images: {names}"
        if self._consecutive < self.limit:
            return f"warning: skipped an update that is not finite: {what}"
        raise Diverged(
            f"{self._consecutive} consecutive steps were not finite and changed nothing; the last checkpoint is good. "
            f"The last step: {what}. Resuming repeats them. Start a new run {REMEDIES}."
        )


class LossSpikes:
    """Compares each loss with the median of previous losses. Spikes are reported; training does not change.

    A loss below the first one is no spike: where the median is almost 0, one difficult image is many medians.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOOKED_BACK)
        self._first = math.inf

    def times(self, loss: float) -> float | None:
        """Return `loss` divided by the median if it is a spike, else None. Finite losses enter later medians."""
        usual = statistics.median(self._losses) if len(self._losses) >= FEWEST else math.inf
        if math.isfinite(loss):
            self._losses.append(loss)
            self._first = self._first if math.isfinite(self._first) else loss
        return loss / usual if usual > 0 and max(usual * SPIKE, self._first) < loss < math.inf else None


def require_finite(module: nn.Module) -> None:
    """Raise Diverged if a weight or statistic of `module` is not finite: such weights are never saved.

    All processes must call it, and all raise the same error.
    """
    state = module.state_dict()
    floating = {name: world.local_part(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
    bad = next((name for name, tensor in floating.items() if not bool(torch.isfinite(tensor).all())), None)
    bad = next((name for name in world.gather(bad) if name is not None), None)
    if bad is not None:
        raise Diverged(
            f"{bad} is not finite (NaN or infinity) and was not saved. Resume from the last checkpoint {REMEDIES}."
        )
