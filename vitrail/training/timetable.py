"""When each event of a run happens: its durations, converted to optimiser steps once."""

from __future__ import annotations

import math

from vitrail.durations import LONGEST, Duration
from vitrail.errors import UsageError
from vitrail.objective.base import Moment
from vitrail.training.run import Run
from vitrail.words import shown

LOGGED = 2000
"""Largest number of training lines in metrics.jsonl. A plot cannot show more."""


class Timetable:
    """When each event of `run` happens, in optimiser steps, for epochs of `per_epoch` steps.

    A time limit compresses the whole schedule, warmup included: the progress of the run is the larger of steps done /
    steps planned and time spent / time allowed. Such a run ends on time, with its learning rate at the end of the
    schedule. It depends on the speed of the machine, so a second run does not give the same bits.

    Raises UsageError for a run without a step, and for a schedule that contradicts itself.
    """

    def __init__(self, run: Run, per_epoch: int) -> None:
        assert run.batch_size is not None
        units = {"per_epoch": per_epoch, "batch_size": run.batch_size}
        self.run, self.per_epoch, self.batch_size = run, per_epoch, run.batch_size
        self.total = total = run.duration.steps(**units)
        if total < 1:
            raise UsageError(f"duration is {run.duration}: a run needs at least one step")
        if total > LONGEST:
            raise UsageError(f"duration is {run.duration}, {total:.3g} steps; a run has at most {LONGEST:.0e} steps")

        def steps(duration: Duration) -> int:
            return duration.steps(**units, total=total)

        self.warmup = steps(run.schedule.warmup)
        self.evaluate_every = max(steps(run.evaluate_every), 1)
        self.checkpoint_every = max(steps(run.checkpoint_every), 1)
        self.average_start = steps(run.average.start)
        self.full_size = max(steps(run.progressive.until), 1)
        """Step from which images have their full size."""
        self.limit = None if run.time_limit is None else 60 * run.time_limit
        """Seconds of training, including all evaluations but the last."""
        self.learning_rate(0, 0.0)  # raises UsageError for a schedule that contradicts itself

    def done(self, step: int, elapsed: float) -> float:
        """Return the progress of the run, 0 to 1, after `step` steps and `elapsed` seconds."""
        by_time = elapsed / self.limit if self.limit else 0.0
        return min(max(step / self.total, by_time), 1.0)

    def learning_rate(self, step: int, elapsed: float) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        schedule = self.run.schedule
        rate = schedule.rate(self.moment(step, elapsed), self.run.optim.lr)
        if not (isinstance(rate, int | float) and math.isfinite(rate) and rate >= 0):
            raise UsageError(f"{type(schedule).__name__}.rate returned {shown(rate)}; a learning rate is at least 0")
        return rate

    def weight_decay(self, step: int, elapsed: float) -> float:
        """Return the weight decay of step `step`, which follows half a cosine from its first to its last value."""
        first, last = self.run.optim.weight_decay, self.run.optim.weight_decay_end
        last = first if last is None else last
        return last + (first - last) * (1 + math.cos(math.pi * self.done(step, elapsed))) / 2

    def moment(self, step: int, elapsed: float) -> Moment:
        """Return the progress of the run for the objective and the schedule."""
        done = self.done(step, elapsed)
        now = float(step) if self.limit is None else done * self.total
        return Moment(done, self.total, self.per_epoch, self.batch_size, now)

    def growth(self, step: int, elapsed: float) -> float:
        """Return how far images have grown to their full size, 0 to 1."""
        return min(self.done(step, elapsed) * self.total / self.full_size, 1.0)

    def left(self, elapsed: float) -> float | None:
        """Return the seconds left until the time limit; None without a limit."""
        return None if self.limit is None else max(self.limit - elapsed, 0.0)

    def over(self, step: int, elapsed: float) -> str:
        """Return why the run is over ("all steps done", "time limit"), or "" while it is not."""
        if step >= self.total:
            return "all steps done"
        return "time limit" if self.limit is not None and elapsed >= self.limit else ""

    def evaluates(self, step: int) -> bool:
        """Return whether the run is evaluated after `step` steps."""
        return step % self.evaluate_every == 0 if step else self.run.probe_head

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is saved after `step` steps."""
        return step > 0 and step % self.checkpoint_every == 0

    def logs(self, step: int) -> bool:
        """Return whether metrics.jsonl gets a line after `step` steps."""
        every = -(-self.total // LOGGED)
        return step % every == 0 or step == self.total or self.evaluates(step)
