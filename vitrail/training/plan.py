"""Durations converted to optimiser steps once, and what the loop asks about a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.errors import UsageError
from vitrail.objective.base import Moment
from vitrail.training.optim.schedule import learning_rate
from vitrail.training.run import Run, Schedule

LINES = 2000
"""Largest number of training lines in metrics.jsonl. A plot cannot show more."""


@dataclass(frozen=True)
class Plan:
    """When each event of a run happens, in optimiser steps; `limit` is in seconds, `batch_size` in images.

    A time limit compresses the whole schedule, warmup included: the progress of the run is the larger of steps done /
    steps planned and time spent / time allowed. Such a run ends on time, with its learning rate at the end of the
    schedule. It depends on the speed of the machine, so repeating it does not give the same bits.
    """

    total: int
    per_epoch: int
    batch_size: int
    warmup: int
    timescale: int
    evaluate_every: int
    checkpoint_every: int
    average_start: int
    grown: int
    """Step from which images have their full size."""
    limit: float | None
    """Seconds of training, including all evaluations but the last."""
    peak: float
    schedule: Schedule
    decay: tuple[float, float]
    """Weight decay at the start and at the end."""

    @classmethod
    def of(cls, run: Run, per_epoch: int) -> Plan:
        """Convert the durations of `run` for epochs of `per_epoch` steps. Raises UsageError."""
        assert run.batch_size is not None
        units = {"per_epoch": per_epoch, "batch_size": run.batch_size}
        total = run.duration.steps(**units)
        if total < 1:
            raise UsageError(f"duration is {run.duration}: a run needs at least one step")
        if run.time_limit is not None and run.time_limit <= 0:
            raise UsageError(f"time_limit is {run.time_limit} minutes; it must be above 0, or null for none")
        last = run.optim.weight_decay_end
        plan = cls(
            total=total,
            per_epoch=per_epoch,
            batch_size=run.batch_size,
            warmup=run.schedule.warmup.steps(**units, total=total),
            timescale=run.schedule.timescale.steps(**units, total=total),
            evaluate_every=max(run.evaluate_every.steps(**units, total=total), 1),
            checkpoint_every=max(run.checkpoint_every.steps(**units, total=total), 1),
            average_start=run.average.start.steps(**units, total=total),
            grown=max(run.progressive.until.steps(**units, total=total), 1),
            limit=None if run.time_limit is None else 60 * run.time_limit,
            peak=run.optim.lr,
            schedule=run.schedule,
            decay=(run.optim.weight_decay, run.optim.weight_decay if last is None else last),
        )
        plan.learning_rate(0, 0.0)  # a schedule that contradicts itself is refused before the first step
        return plan

    def done(self, step: int, elapsed: float) -> float:
        """Return how far the run is, 0 to 1, after `step` steps and `elapsed` seconds."""
        by_time = elapsed / self.limit if self.limit else 0.0
        return min(max(step / self.total, by_time), 1.0)

    def learning_rate(self, step: int, elapsed: float) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        at = float(step) if self.limit is None else self.done(step, elapsed) * self.total
        return learning_rate(
            at,
            self.total,
            self.peak,
            shape=self.schedule.shape,
            warmup=self.warmup,
            end=self.schedule.end,
            timescale=self.timescale,
            drops=[share * self.total / 100 for share in self.schedule.drops],
        )

    def weight_decay(self, step: int, elapsed: float) -> float:
        """Return the weight decay of step `step`, which follows half a cosine from first to last."""
        first, last = self.decay
        return last + (first - last) * (1 + math.cos(math.pi * self.done(step, elapsed))) / 2

    def moment(self, step: int, elapsed: float) -> Moment:
        """Return the progress of the run for the objective."""
        return Moment(self.done(step, elapsed), self.total, self.per_epoch, self.batch_size)

    def growth(self, step: int, elapsed: float) -> float:
        """Return how far images have grown to their full size, 0 to 1."""
        return min(self.done(step, elapsed) * self.total / self.grown, 1.0)

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
        return step > 0 and step % self.evaluate_every == 0

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is saved after `step` steps."""
        return step > 0 and step % self.checkpoint_every == 0

    def logs(self, step: int) -> bool:
        """Return whether metrics.jsonl gets a line after `step` steps."""
        every = -(-self.total // LINES)
        return step % every == 0 or step == self.total or self.evaluates(step)
