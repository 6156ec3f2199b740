"""Trials as processes of their own, side by side: on several devices, or sharing the cores of one machine.

Also the way to train them one at a time: a process gives back all memory when it ends, and one that is killed for
want of it, or dies in a driver, is a row in the table, where in the sweep's own process it would be the end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.training.guard import Interrupted, Signals
from vitrail.training.resolve import available_cores
from vitrail.transfer.trial import LOG, Outcome, Trial, read_outcome

log = logging.getLogger("vitrail")
POLL = 0.05
"""Seconds between two looks at the processes; each takes seconds to start."""
ROOT = Path(__file__).resolve().parents[2]
"""Where `vitrail` is imported from."""


@dataclass(frozen=True)
class Processes:
    """Trains as many trials at once as there are slots, each in a process, with its share of the cores.

    What a process says goes to log.txt in its trial's folder. A signal ends them all, each saving once. So does the
    end of this process, however it comes: they read from a pipe that closes with it.
    """

    slots: Sequence[str | None] = (None,)
    """The device of each; None: the run's own."""

    def __call__(self, trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        """Yield each trial when it has ended. Raises Interrupted after a signal, once all have saved."""
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
        """Return the command of a trial's process."""
        on = [] if device is None else ["--device", device]
        share = ["--cores", str(self._cores())] if len(self.slots) > 1 else []
        return [sys.executable, "-m", "vitrail.transfer.worker", str(trial.folder), *on, *share]

    def _cores(self) -> int:
        return max(1, available_cores() // len(self.slots))

    def _start(self, trial: Trial, device: str | None) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment.setdefault("GOMP_SPINCOUNT", "1000")  # see vitrail.cli
        if len(self.slots) > 1:
            cores, asked = self._cores(), environment.get("OMP_NUM_THREADS", "")
            environment["OMP_NUM_THREADS"] = str(min(cores, int(asked)) if asked.isdecimal() else cores)
        with open(trial.folder / LOG, "ab") as said:
            # a session of its own: Ctrl-C in a terminal is for the sweep, which passes it on
            return subprocess.Popen(
                self.command(trial, device),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have all of them save and end, and wait until they have; a second Ctrl-C kills them."""
    for process in running:
        process.terminate()
    try:
        for process in running:
            process.wait()
    except KeyboardInterrupt:
        for process in running:
            process.kill()
        raise


def interrupted(number: int, left: int) -> Interrupted:
    """Return the error for a sweep that a signal ended with `left` trials unfinished."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    trials = "1 trial is" if left == 1 else f"{left} trials are"
    return Interrupted(
        f"stopped by {name}; {trials} not finished, what was running is saved: the same command goes on", number
    )


def _outcome(trial: Trial, code: int) -> Outcome:
    """What a process that has ended left behind."""
    found = read_outcome(trial.folder)
    if found is not None:
        return found
    log_file = trial.folder / LOG
    lines = [line for line in log_file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code < 0:
        memory = " (which the system does where memory runs out)" if code == -signal.SIGKILL else ""
        how = f"killed by {signal.Signals(-code).name}{memory}"
    else:
        how = f"its process ended with exit code {code}"
    return Outcome(
        "failed", f"{how}: {lines[-1].strip() if lines else 'it said nothing'}; all it said is in {log_file}"
    )
