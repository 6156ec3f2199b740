"""What a time limit does to a run: the seconds that are left for training, the end that it foresees, and its threads.

A time limit counts from the start of the command to its end: reading the data, every decision, training, evaluations,
the test images and the report. What comes before the first step is measured. What comes after the last step is
predicted: images by the newest evaluation of this run, or else by its steps, and the rest by the share of a core that
this process gets at the moment, because other programs may keep the machine busy.

Threads that share an operation wait for each other at its end. If another program holds the core of one of them, all of
them wait, and two threads can be several times slower than one. So both ways are timed in steps of the run itself, at
its start and again and again later, and the faster one is used. Sums of floating-point numbers then have another order,
as results depend on time anyway in such a run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from vitrail import world
from vitrail.device import core_share
from vitrail.tasks.catalog import task_for
from vitrail.training.assemble import Setup
from vitrail.training.floor import FEWEST, MOST, allowed
from vitrail.training.run import Run
from vitrail.words import time_span

SAVING = 0.6
"""Seconds of a core that writing, reading and signing a small network takes after the last step."""
REPORTING = 2.4
"""Seconds of a core that report.html takes, apart from its images."""
LEAVING = 1.2
"""Seconds of a core that Python takes to leave, with torch and matplotlib. All three were measured on an EPYC core of
2.6 GHz."""
FLOOR = 2e-3
"""Seconds of a core for each image of the linear classifier that the network is compared with. With all its images it
takes 2.5 to 7.5 s on sets of 600 to 3,800 photographs."""
PICTURED = 24
"""Number of images in the report whose attention is drawn."""
FORWARD = 1 / 3
"""Work for an evaluated image as a share of the work for a training image."""
WINDOW = 5.0
"""Seconds over which the share of a core is measured."""
SMALLEST = 0.05
"""Smallest share of a core that is believed."""
LEAST = 0.2
"""Share of the time limit that should be left for training."""
SHORTEST = 1e-3
"""Seconds that a run trains at least: one step."""
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


class Clock:
    """The time of a run: the seconds of its training, and those that the time limit leaves for it.

    began: The moment of `time.monotonic()` at which the command began. reported: Whether it ends with a report.
    """

    def __init__(self, setup: Setup, began: float, *, reported: bool) -> None:
        self._setup, self._ending = setup, predicted_end(setup, reported)
        self._command_began = self._began = self._started = began
        self.end = 0.0
        """Seconds after the last step, as predicted."""

    @property
    def elapsed(self) -> float:
        """Return the seconds of training, with the time before a resume."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Return the seconds that are left of the time limit; infinity without one."""
        return self._limit - (time.monotonic() - self._command_began)

    @property
    def _limit(self) -> float:
        limit = self._setup.run.time_limit
        return math.inf if limit is None else 60 * limit

    def start(self) -> str:
        """Count the seconds of training from now on, and set the time that the limit leaves for it.

        Return a warning if that is a small part of the limit, else "". All processes call it together.
        """
        timetable, before = self._setup.timetable, self._setup.state.status.elapsed
        self._started = time.monotonic()
        self._began = self._started - before
        if timetable.limit is None:
            return ""
        timetable.limit = world.gather(self.for_training())[0]
        left, start = timetable.limit - before, self._started - self._command_began
        if left >= LEAST * self._limit:
            return ""
        return (
            f"warning: of the time limit, {time_span(self._limit)}, only {time_span(max(left, 0.0))} are left for "
            f"training: the start took {time_span(start)}, and the end will take about {time_span(self.end)}"
        )

    def for_training(self) -> float:
        """Return the seconds of training that the time limit leaves: all but the start and the end of the command.

        Those before a resume are part of them, without the start and the end of the earlier command.
        """
        status, run = self._setup.state.status, self._setup.run
        self._ending.step(self._setup.feed.wait_seconds)
        image = status.elapsed / max(status.step, 1) / (run.batch_size or 1)
        left = self._limit - (self._started - self._command_began)
        self.end = self._ending.seconds(image, left - self.end)
        return max(left - self.end, SHORTEST)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time an evaluation, by which the seconds at the end are predicted."""
        began = time.monotonic()
        yield
        self._ending.evaluation(time.monotonic() - began)


@dataclass
class Ending:
    """Predicts the seconds after the last step."""

    validation: int
    """Number of validation images."""
    test: int
    """Number of test images; 0 if they are not evaluated."""
    calibrated: bool
    """Whether the validation images are evaluated once more, to calibrate the network."""
    reported: bool
    """Whether a report is written."""
    floor: int = 0
    """Number of images of the linear classifier that the network is compared with."""
    _evaluated: float | None = None
    """Seconds per image of the newest evaluation."""
    _share: float = field(default_factory=core_share)
    _since: tuple[float, float, float] | None = None
    """Time, time of a core, and seconds of waiting for data at the beginning of the newest window."""

    def evaluation(self, seconds: float) -> None:
        """Take in the seconds of an evaluation on the validation images."""
        if self.validation:
            self._evaluated = seconds / self.validation

    def step(self, waited: float) -> None:
        """Measure the share of a core that the steps of this thread get; `waited`: its seconds of waiting for data."""
        now = (time.monotonic(), time.thread_time(), waited)
        if self._since is None:
            self._since = now
        passed, computed, waiting = (new - old for new, old in zip(now, self._since, strict=True))
        if passed < WINDOW:
            return
        # where this thread waits for others that compute, too, its own time says little
        share = core_share() if torch.get_num_threads() > 1 else computed / max(passed - waiting, computed)
        self._share = (self._share + max(share, SMALLEST)) / 2
        self._since = now

    def seconds(self, image: float, training: float) -> float:
        """Return the seconds from the last step to the end; `image` is those of a training image.

        training: Seconds of the whole training, of which the linear classifier takes its share at most.
        """
        evaluated = self._evaluated or FORWARD * image
        images = (1 + self.calibrated) * self.validation + self.test
        alone = SAVING + (REPORTING + LEAVING) * self.reported
        pictured = min(PICTURED, self.validation) * image * self.reported
        return images * evaluated + pictured + self._floor(training) + alone / self._share

    def _floor(self, training: float) -> float:
        """Return the seconds of the linear classifier, which is left out if there is time for too few images."""
        most, measured = allowed(training), self.test or self.validation
        fewest = min(self.floor, FEWEST + measured) * FLOOR / self._share
        return 0.0 if most < fewest else min(most, self.floor * FLOOR / self._share)


def predicted_end(setup: Setup, reported: bool) -> Ending:
    """Return what predicts the end of a run."""
    run, splits, validation = setup.run, setup.splits, setup.validation
    count = 0 if splits.validation is None else len(splits.validation)
    tested = len(splits.test) if splits.test is not None and validation.tests(splits) else 0
    single = run.supervised and task_for(splits.train.labels).name == "classes"
    floor = single * (min(len(splits.train), MOST) + (tested or count))
    share = 1.0 if run.time_limit is None else core_share()  # measuring it takes time
    return Ending(count, tested, run.calibrate and run.supervised, reported, floor, _share=share)


class ThreadCount:
    """How many threads a CPU computes with in a run with a time limit: all, or one where others keep the cores busy.

    Chooses between `most` threads and one by the time that steps take. A context around each step.

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
