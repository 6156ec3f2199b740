"""How many threads a CPU computes with in a run with a time limit: all, or one where others keep the cores busy.

Threads that share an operation wait for each other at its end. If another program holds the core of one of them, all of
them wait, and two threads can be several times slower than one. So both ways are timed in steps of the run itself, at
its start and again and again later, and the faster one is used. Sums of floating-point numbers then have another order,
as results depend on time anyway in such a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from vitrail import world
from vitrail.device import core_share
from vitrail.training.run import Run

TIMED = 3
"""Number of steps by which each way is timed."""
HOPELESS = 2.0
"""A way is given up after one step if this takes so many times as long as a step the other way."""
PAUSE, LEAST_PAUSE = 20.0, 5.0
"""Pause until the next comparison: so many times the seconds of its steps, and at least so many seconds."""
ENOUGH = 0.7
"""Share of a core that a thread must get for several threads to be tried."""
FASTER = 0.9
"""The other way is chosen if its steps take less than this share of the time."""


class ThreadCount:
    """Chooses between `most` threads and one by the time that steps take. A context around each step.

    tell: Called with a sentence at each change.
    """

    def __init__(self, most: int, tell: Callable[[str], None]) -> None:
        self.most, self.threads = most, 1  # one thread is never much slower than it could be
        self._tell = tell
        self._times: dict[int, list[float]] = {}
        self._warm = self._comparing = False
        self._next = 0.0
        torch.set_num_threads(self.threads)

    @classmethod
    def of(cls, run: Run, device: torch.device, tell: Callable[[str], None]) -> ThreadCount | None:
        """Return the choice for `run`; None where there is none to make.

        Without a time limit a run gives the same bits each time, so it keeps its threads. Several processes share the
        cores already.
        """
        most = torch.get_num_threads()
        chosen = run.time_limit is None or device.type != "cpu" or world.active() or most == 1
        return None if chosen else cls(most, tell)

    def __enter__(self) -> None:
        """Set the number of threads for the next step."""
        self._comparing = self._warm and self._starts_comparing()
        if self._comparing and len(self._times.get(self.threads, [])) > len(self._times.get(self._other, [])):
            torch.set_num_threads(self._other)
        self._began = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        """Take in the time of a step, and choose."""
        took, used = time.monotonic() - self._began, torch.get_num_threads()
        torch.set_num_threads(self.threads)
        if not self._warm:  # the first step allocates memory
            self._warm = True
        elif self._comparing:
            self._times.setdefault(used, []).append(took)
            self._choose()

    @property
    def _other(self) -> int:
        return 1 if self.threads == self.most else self.most

    def _starts_comparing(self) -> bool:
        """Return whether it is time to compare; where others are busy, several threads are not even tried."""
        if self._times or time.monotonic() < self._next:
            return bool(self._times)
        if self.threads == 1 and core_share() < ENOUGH:
            self._next = time.monotonic() + LEAST_PAUSE
            return False
        return True

    def _choose(self) -> None:
        """End the comparison if it is decided."""
        ours, others = self._times.get(self.threads, []), self._times.get(self._other, [])
        if not others or not (min(others) > HOPELESS * min(ours) or len(others) >= TIMED):
            return
        now, then = statistics.median(ours), statistics.median(others)
        self._times, self._next = {}, time.monotonic() + max(PAUSE * (sum(ours) + sum(others)) / 2, LEAST_PAUSE)
        if then < FASTER * now:
            self.threads = self._other
            torch.set_num_threads(self.threads)
            what = f"threads: {self.threads} instead of {self._other}"
            self._tell(f"{what}, because a step takes {then:.3g} s instead of {now:.3g} s")
