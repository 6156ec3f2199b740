"""Trials in processes of their own, in parallel: on several devices, or sharing the cores of one machine.

Trials that run one at a time also get a process each: it frees all memory when it ends, and a trial that is killed
because memory ran out, or crashes in a driver, becomes a failed row of the table and does not end the sweep.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from vitrail.device import SIGKILL, available_cores
from vitrail.training.guard import Interrupted, Signals, signal_name
from vitrail.training.processes import check_room, kill, python, python_path, start, stop, trials_at_once
from vitrail.transfer.trial import LOG, Outcome, Trial, read_outcome

log = logging.getLogger("vitrail")
POLL = 0.05
"""Seconds between two checks of the processes; each takes seconds to start."""


@dataclass(frozen=True)
class Processes:
    """Trains one trial per slot at a time, each in a process with an equal part of the cores.

    The output of a process goes to log.txt in its trial's folder. After a signal all processes save once and end. They
    do the same when this process ends for any reason: they read from a pipe that closes with it.
    """

    slots: Sequence[str | None] = (None,)
    """The device of each slot; None: the run's own."""

    def __call__(self, trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        """Yield each trial when it has ended. Raises Interrupted after a signal, when all trials have saved."""
        if trials:
            check_room("--parallel", len(self.slots), trials[0].run, self.slots[0])
        waiting, free = deque(trials), list(self.slots)
        running: dict[subprocess.Popen[bytes], tuple[Trial, str | None]] = {}
        with Signals() as signals:
            try:
                while waiting or running:
                    if (number := signals.requested()) is not None:
                        raise interrupted(number, len(waiting) + len(running))
                    while waiting and free:
                        trial, device = waiting.popleft(), free.pop(0)
                        running[self._start(trial, device)] = trial, device
                        log.info("%s: started%s", trial, "" if device is None else f" on {device}")
                    for process in [process for process in running if process.poll() is not None]:
                        trial, device = running.pop(process)
                        free.append(device)
                        yield trial, _outcome(trial, process.returncode)
                    time.sleep(POLL)
            finally:
                _end(list(running))

    def command(self, trial: Trial, device: str | None) -> list[str]:
        """Return the command line of a trial's process."""
        on = [] if device is None else ["--device", device]
        share = ["--cores", str(self._cores())] if len(self.slots) > 1 else []
        return [*python("vitrail.transfer.trial"), str(trial.folder), *on, *share]

    def _cores(self) -> int:
        return max(1, available_cores() // len(self.slots))

    def _start(self, trial: Trial, device: str | None) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = python_path()
        environment.setdefault("GOMP_SPINCOUNT", "1000")  # see vitrail.cli
        if len(self.slots) > 1:
            cores, asked = self._cores(), environment.get("OMP_NUM_THREADS", "")
            environment["OMP_NUM_THREADS"] = str(min(cores, int(asked)) if asked.isdecimal() else cores)
        with open(trial.folder / LOG, "ab") as output:
            return start(self.command(trial, device), stdout=output, stderr=subprocess.STDOUT, env=environment)


def automatic(trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
    """Yield each trial when it has ended, as `Processes` does. Their number depends on the trials and the machine."""
    yield from Processes([None] * trials_at_once([trial.run for trial in trials]))(trials)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate all processes and wait until they have saved and ended; a second Ctrl-C kills them."""
    for process in running:
        stop(process)
    try:
        for process in running:
            process.wait()
    except KeyboardInterrupt:
        for process in running:
            kill(process)
        raise


def interrupted(number: int, left: int) -> Interrupted:
    """Return the error for a sweep that a signal ended with `left` unfinished trials."""
    trials = "1 trial is" if left == 1 else f"{left} trials are"
    return Interrupted(
        f"stopped by {signal_name(number)}. {trials} not finished; running trials are saved. Repeat the command to "
        "continue.",
        number,
    )


def _outcome(trial: Trial, code: int) -> Outcome:
    """Return the outcome that an ended process has written, or else a failure that explains its end."""
    if (outcome := read_outcome(trial.folder)) is not None:
        return outcome
    log_file = trial.folder / LOG
    lines = [line for line in log_file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code < 0:
        memory = " (the system does this when memory runs out)" if code == -SIGKILL else ""
        how = f"killed by {signal.Signals(-code).name}{memory}"
    else:
        how = f"its process ended with exit code {code}"
    last = lines[-1].strip() if lines else "it printed nothing"
    return Outcome("failed", f"{how}: {last}; see {log_file}")
