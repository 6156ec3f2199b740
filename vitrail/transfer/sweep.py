"""A sweep as in appendix B.1.1: choose on a dev split, retrain on everything with several seeds, test once.

Every trial is a run in a folder of its own (`vitrail.transfer.trial`), wherever it is trained. Finished trials are read
from there, so that a repeated call continues after any interruption, and sweeps in one folder share equal trials.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.config import plain
from vitrail.errors import TrainingError
from vitrail.evaluation.metric import ONE_LABEL, PIXELS, SEVERAL_LABELS, TITLES, Metric, headline
from vitrail.transfer.grid import Trials
from vitrail.transfer.protocol import DevSplit
from vitrail.transfer.trial import Outcome, Trial, finished, write_json
from vitrail.words import one_line

log = logging.getLogger("vitrail")
TABLE = "sweep.json"

Executor = Callable[[Sequence[Trial]], Generator[tuple[Trial, Outcome], None, None]]
"""Trains prepared trials, in any order and place, and yields each when it has ended."""


@dataclass(frozen=True)
class TrialResult:
    """A trial and its outcome: one row of the table."""

    trial: Trial
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        trial = {"values": plain(dict(self.trial.values)), "seed": self.trial.run.seed, "key": self.trial.key}
        return {**trial, **asdict(self.outcome)}


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over seeds."""

    mean: float
    std: float | None
    """None for a single seed."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of `values`; None if there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@one_line
@dataclass(frozen=True)
class SweepResult:
    """The table of a sweep."""

    folder: Path
    split: DevSplit
    search: list[TrialResult] = field(default_factory=list)
    """The trials to choose from, by their metrics on the dev split; empty if there was only one setting."""
    chosen: dict[str, Any] | None = None
    final: list[TrialResult] = field(default_factory=list)
    """The chosen setting, retrained on everything, by seed."""
    top1: Spread | None = None
    """Top-1 of the final runs on the test images, or mAP if images have several labels; None without test images."""

    @property
    def metric(self) -> str:
        """Name of the number in `top1`: top1, or map if images have several labels."""
        tests = (row.outcome.test for row in self.final)
        return next((name for test in tests if test and (name := headline(test))), "top1")

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "folder": str(self.folder),
            "dev": {"how": self.split.how, "images": self.split.dev},
            "test": {"images": self.split.test},
            "search": [row.as_json() for row in self.search],
            "chosen": plain(self.chosen),
            "final": [row.as_json() for row in self.final],
            self.metric: None if self.top1 is None else asdict(self.top1),
        }


def sweep(trials: Trials, execute: Executor) -> SweepResult:
    """Try the settings of a sweep, retrain the best with every seed, and measure these runs on the test images.

    The best trial has the best `Run.metric` on the dev split; ties go to the smaller loss, then to the smaller learning
    rate, then to the first in the list. A failed trial is a row with its reason. The table is also in sweep.json in the
    folder, updated after every trial.

    Raises UsageError, DataError and WeightsError before anything is trained; TrainingError if all trials fail;
    Interrupted after a signal: the same call continues.
    """
    split = trials.split
    log.info("choosing by %s (%s images), in %s", split.how, f"{split.dev:,}", trials.folder)
    if not split.test:
        log.warning("There are no test images: the final runs are trained, but not measured.")
    table = SweepResult(trials.folder, split)
    chosen = trials.sweep.settings()[0]
    if len({trial.key for trial in trials.search}) > 1:
        for rows in train_all(trials.search, execute):
            table = _written(replace(table, search=rows))
        best = best_trial(table.search)
        chosen = dict(best.trial.values)
        log.info("chosen: %s, dev %s", best.trial, _metrics(best.outcome.dev, best.trial.run.metric))
    table = replace(table, chosen=chosen)
    for rows in train_all(trials.finals(chosen), execute):
        table = _written(replace(table, final=rows, top1=spread(rows)))
    if all(row.outcome.status != "done" for row in table.final):
        raise TrainingError(f"the chosen setting could not be retrained:\n  {_reasons(table.final)}")
    return table


def best_trial(rows: Iterable[TrialResult]) -> TrialResult:
    """Return the best trial. Raises TrainingError with all reasons if none was trained."""
    rows = list(rows)
    trained = [row for row in rows if row.outcome.status == "done" and row.outcome.dev is not None]
    if not trained:
        raise TrainingError(f"none of the settings could be trained:\n  {_reasons(rows)}")
    return min(trained, key=_preference)


def _preference(row: TrialResult) -> tuple[float, float, float]:
    dev, metric = row.outcome.dev or {}, row.trial.run.metric
    loss, value = dev.get("nll"), dev[name := chosen_by(metric, dev)]
    worse = -metric.rank(value) if name == metric.key else -value
    return worse, math.inf if loss is None or math.isnan(loss) else loss, row.trial.run.optim.lr


def chosen_by(metric: Metric, numbers: Mapping[str, float]) -> str:
    """Return the name of the number by which a trial is chosen: that of `metric`, else the headline of its task."""
    return metric.key if metric.key in numbers else headline(numbers) or "top1"


def title(name: str) -> str:
    """Return the name of a number in sentences."""
    return TITLES.get(name, name.replace("_", " "))


def in_words(name: str, numbers: Mapping[str, float]) -> str:
    """Return the number `name` as text: a share in percent, a loss and a number of the user's own as they are."""
    shares = (*ONE_LABEL, *SEVERAL_LABELS, *PIXELS, "macro_f1")
    return f"{numbers[name]:.2%}" if name in shares else f"{numbers[name]:.4f}"


def spread(rows: Iterable[TrialResult]) -> Spread | None:
    """Return the spread of test top-1, a fraction, over the rows that have it; None if none has."""
    return Spread.of([test[headline(test) or "top1"] for row in rows if (test := row.outcome.test) is not None])


def train_all(trials: Sequence[Trial], execute: Executor) -> Generator[list[TrialResult], None, None]:
    """Yield the rows so far: first those that were finished before, then again whenever a trial has ended."""
    ended = {trial.key: outcome for trial in trials if (outcome := finished(trial.folder)) is not None}
    waiting = {trial.key: trial for trial in trials if trial.key not in ended}

    def rows() -> list[TrialResult]:
        return [TrialResult(trial, ended[trial.key]) for trial in trials if trial.key in ended]

    if ended:
        log.info("%d of %d trials are finished already", len(trials) - len(waiting), len(trials))
    yield rows()
    if not waiting:
        return
    for trial in waiting.values():
        trial.prepare()
    total = len(ended) + len(waiting)
    with closing(execute(list(waiting.values()))) as running:
        for trial, outcome in running:
            ended[trial.key] = outcome
            log.info("%s: %s (%d of %d)", trial, _summary(outcome, trial.run.metric), len(ended), total)
            yield rows()


def _summary(outcome: Outcome, metric: Metric) -> str:
    if outcome.status != "done":
        return f"{outcome.status}: {outcome.reason.splitlines()[0] if outcome.reason else ''}"
    parts = [f"{name} {_metrics(of, metric)}" for name, of in (("dev", outcome.dev), ("test", outcome.test)) if of]
    return ", ".join([*parts, f"{outcome.seconds:,.0f} s"])


def _metrics(of: dict[str, float] | None, metric: Metric) -> str:
    if of is None:
        return ""
    name = chosen_by(metric, of)
    said = "" if name == "nll" else f"{title(name)} {in_words(name, of)} "
    return f"{said}loss {of['nll']:.4f}"


def _reasons(rows: Iterable[TrialResult]) -> str:
    return "\n  ".join(f"{row.trial}: {row.outcome.status}: {row.outcome.reason}" for row in rows)


def _written(table: SweepResult) -> SweepResult:
    if table.folder.is_dir():
        write_json(table.folder / TABLE, table.as_json())
    return table
