"""When each event of a run happens: its durations, converted to optimiser steps once."""

from __future__ import annotations

import math

from vitrail.durations import LONGEST, Duration, Percent
from vitrail.errors import UsageError
from vitrail.objective.base import Moment
from vitrail.objective.settings import DINO
from vitrail.training.run import NOMINAL, Run
from vitrail.words import shown

LEAST_PERCENT = 0.1
"""Smallest part of a time limit after which something is done again."""
FEWEST = 3
"""Number of steps from which on the length of a run with a time limit is estimated."""
LOGGED = 2000
"""Largest number of training lines in metrics.jsonl. A plot cannot show more."""


class Timetable:
    """When each event of `run` happens, in optimiser steps, for epochs of `per_epoch` steps.

    A time limit compresses the whole schedule, warmup included: the progress of the run is the larger of steps done /
    steps planned and time spent / time allowed. Such a run ends on time, with its learning rate at the end of the
    schedule. It depends on the speed of the machine, so a second run does not give the same bits. Without a duration
    the time limit is the length of the run, and the schedule, made for `NOMINAL`, is stretched, too.

    Raises UsageError for a run without a step, without an end, and for a schedule that contradicts itself.
    """

    def __init__(self, run: Run, per_epoch: int) -> None:
        assert run.batch_size is not None
        units = {"per_epoch": per_epoch, "batch_size": run.batch_size}
        self.run, self.per_epoch, self.batch_size = run, per_epoch, run.batch_size
        if run.duration is None and run.time_limit is None:
            raise UsageError("the run has no end: set duration (--epochs, --duration) or time_limit (--time-limit)")
        length = run.duration or NOMINAL
        self.total = total = length.steps(**units)
        if total < 1:
            raise UsageError(f"duration is {length}: a run needs at least one step")
        if total > LONGEST:
            raise UsageError(f"duration is {length}, {total:.3g} steps; a run has at most {LONGEST:.0e} steps")

        def steps(duration: Duration) -> int:
            return duration.steps(**units, total=total)

        self.warmup = steps(run.schedule.warmup)
        self.evaluate_every = max(steps(run.evaluate_every), 1)
        self.checkpoint_every = max(steps(run.checkpoint_every), 1)
        self.average_start = steps(run.average.start)
        self.full_size = max(steps(run.progressive.until), 1)
        """Step from which images have their full size."""
        self.limit = None if run.time_limit is None else 60 * run.time_limit
        """Seconds of training, including all evaluations but the last: what the time limit leaves for it. In a run it
        is less than the time limit, and changes (`vitrail.training.time_limit`)."""
        self._parts: dict[str, int] = {}
        self.open = run.duration is None
        """Whether only the time limit ends the run."""
        self.learning_rate(0, 0.0)  # raises UsageError for a schedule that contradicts itself

    def done(self, step: int, elapsed: float) -> float:
        """Return the progress of the run, 0 to 1, after `step` steps and `elapsed` seconds."""
        by_time = elapsed / self.limit if self.limit else 0.0
        by_steps = 0.0 if self.open else step / self.total
        return min(max(by_steps, by_time), 1.0)

    def expected(self, step: int, elapsed: float) -> int | None:
        """Return the number of steps that the whole run will have, an estimate with a time limit; None at its start."""
        if self.limit is None:
            return self.total
        done = self.done(step, elapsed)
        return round(step / done) if step >= FEWEST and done > 0 else None

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

    def left(self, step: int, elapsed: float) -> float | None:
        """Return the seconds of training that are left in a run with a time limit; None without a limit."""
        if self.limit is None:
            return None
        by_time = max(self.limit - elapsed, 0.0)
        return by_time if self.open else min(by_time, (self.total - step) * elapsed / max(step, 1))

    def over(self, step: int, elapsed: float) -> str:
        """Return why the run is over ("all steps done", "time limit"), or "" while it is not.

        A step that would end more than half of its time after the limit is not taken.
        """
        if step >= self.total and not self.open:
            return "all steps done"
        half = elapsed / step / 2 if step else 0.0
        return "time limit" if self.limit is not None and elapsed + half >= self.limit else ""

    def evaluates(self, step: int, elapsed: float = 0.0) -> bool:
        """Return whether the run is evaluated after `step` steps and `elapsed` seconds. Ask once for each step.

        With a time limit a percentage is one of its time. A classifier that begins as a probe, or with rows of the
        weights, is evaluated first, and so are the features of weights from which DINO continues.
        """
        if not step:
            continues = isinstance(self.run.objective, DINO) and self.run.weights is not None
            return self.run.probe_head or self.run.keeps_classes or (continues and self.run.knn is not None)
        return self._is_due("evaluate_every", self.evaluate_every, step, elapsed)

    def saves(self, step: int, elapsed: float = 0.0) -> bool:
        """Return whether a checkpoint is saved, like `evaluates`."""
        return self._is_due("checkpoint_every", self.checkpoint_every, step, elapsed)

    def _is_due(self, name: str, every: int, step: int, elapsed: float) -> bool:
        asked = getattr(self.run, name)
        if self.limit is None or not isinstance(asked, Percent):
            return step > 0 and step % every == 0
        parts = math.floor(100 * self.done(step, elapsed) / max(asked.value, LEAST_PERCENT))
        before = self._parts.setdefault(name, parts)
        self._parts[name] = max(parts, before)  # the limit changes a little, and with it the share that is done
        return parts > before

    def logs(self, step: int, elapsed: float = 0.0) -> bool:
        """Return whether metrics.jsonl gets a line after `step` steps and `elapsed` seconds. Ask once for each step.

        With a time limit, its lines are spaced by its time, because nobody knows how many steps there will be.
        """
        every = -(-self.total // LOGGED)
        if step % self.evaluate_every == 0 or self.over(step, elapsed):
            return True
        if self.limit is None:
            return step % every == 0
        parts, before = int(self.moment(step, elapsed).step // every), self._parts.get("logs", -1)
        self._parts["logs"] = max(parts, before)
        return parts > before
