"""A sweep as in appendix B.1.1: choose on a dev split, retrain on everything with several seeds, test once.

Every trial is a run in a folder of its own (`vitrail.transfer.trial`), wherever it is trained; what is finished
there is read, so the same call goes on after any end, and two sweeps in one folder share what they have in common.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.config import plain
from vitrail.errors import TrainingError
from vitrail.training.folder import RunFolder
from vitrail.transfer.dev import Arranged
from vitrail.transfer.grid import Planned
from vitrail.transfer.trial import Outcome, Trial, finished

log = logging.getLogger("vitrail")
TABLE = "sweep.json"

Executor = Callable[[Sequence[Trial]], Generator[tuple[Trial, Outcome], None, None]]
"""Trains prepared trials, in any order and place, and yields each when it has ended."""


@dataclass(frozen=True)
class Row:
    """A trial and what came of it."""

    trial: Trial
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        outcome = self.outcome
        return {
            "values": plain(dict(self.trial.values)),
            "seed": self.trial.run.seed,
            "key": self.trial.key,
            "status": outcome.status,
            "reason": outcome.reason,
            "dev": outcome.dev,
            "test": outcome.test,
            "steps": outcome.steps,
            "seconds": outcome.seconds,
            "run": outcome.run,
        }


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over seeds."""

    mean: float
    std: float | None
    """None for a single seed."""
    count: int


@dataclass(frozen=True)
class Swept:
    """The one table of a sweep."""

    folder: Path
    arranged: Arranged
    search: list[Row] = field(default_factory=list)
    """Chosen from, by the numbers on the dev split; empty where there was only one setting."""
    chosen: dict[str, Any] | None = None
    final: list[Row] = field(default_factory=list)
    """The choice, retrained on everything, by seed."""
    top1: Spread | None = None
    """On the test images; None where the data have none."""

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        top1 = self.top1
        return {
            "folder": str(self.folder),
            "dev": {"how": self.arranged.how, "images": self.arranged.dev},
            "test": {"images": self.arranged.test},
            "search": [row.as_json() for row in self.search],
            "chosen": plain(self.chosen),
            "final": [row.as_json() for row in self.final],
            "top1": None if top1 is None else {"mean": top1.mean, "std": top1.std, "count": top1.count},
        }


def sweep(planned: Planned, execute: Executor) -> Swept:
    """Try the settings of a sweep, retrain the best for every seed, and measure those on the test images.

    Trials are chosen from by top-1 on the dev split, of equals by the smaller loss, then the smaller learning rate,
    then as listed. One that fails is a row with its reason. The table is also in sweep.json, in the folder, brought up
    to date after every trial.

    Raises UsageError, DataError and WeightsError before anything is trained; TrainingError where all trials fail;
    Interrupted after a signal: the same call goes on.
    """
    arranged = planned.arranged
    log.info("choosing by %s (%s images), in %s", arranged.how, f"{arranged.dev:,}", planned.folder)
    if not arranged.test:
        log.warning("there are no test images: the final runs are trained, and not measured")
    table = Swept(planned.folder, arranged)
    chosen = planned.sweep.settings()[0]
    if len({trial.key for trial in planned.search}) > 1:
        for rows in _trained(planned.search, execute):
            table = _written(replace(table, search=rows))
        best = choose(table.search)
        chosen = dict(best.trial.values)
        log.info("chosen: %s, dev %s", best.trial, _numbers(best.outcome.dev))
    table = replace(table, chosen=chosen)
    for rows in _trained(planned.finals(chosen), execute):
        table = _written(replace(table, final=rows, top1=spread(rows)))
    if all(row.outcome.status != "done" for row in table.final):
        raise TrainingError(f"the setting chosen could not be retrained:\n  {_reasons(table.final)}")
    return table


def choose(rows: Iterable[Row]) -> Row:
    """Return the row to go on with. Raises TrainingError, with every reason, where none was trained."""
    rows = list(rows)
    able = [row for row in rows if row.outcome.status == "done" and row.outcome.dev is not None]
    if not able:
        raise TrainingError(f"none of the settings could be trained:\n  {_reasons(rows)}")
    return min(able, key=_preference)


def _preference(row: Row) -> tuple[float, float, float]:
    dev = row.outcome.dev or {}
    loss = dev.get("nll")
    return -dev["top1"], math.inf if loss is None or math.isnan(loss) else loss, row.trial.run.optim.lr


def spread(rows: Iterable[Row]) -> Spread | None:
    """Return mean and sample standard deviation of test top-1, a share, over the rows that have it; None of none."""
    found = [row.outcome.test["top1"] for row in rows if row.outcome.test is not None]
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def _trained(trials: Sequence[Trial], execute: Executor) -> Generator[list[Row], None, None]:
    """Yield the rows so far: first those that were finished before, then again whenever a trial has ended."""
    ended = {trial.key: outcome for trial in trials if (outcome := finished(trial.folder)) is not None}
    waiting = {trial.key: trial for trial in trials if trial.key not in ended}

    def rows() -> list[Row]:
        return [Row(trial, ended[trial.key]) for trial in trials if trial.key in ended]

    if ended:
        log.info("%d of %d trials are finished already", len(trials) - len(waiting), len(trials))
    yield rows()
    if not waiting:
        return
    for trial in waiting.values():
        trial.prepare()
    with closing(execute(list(waiting.values()))) as running:
        for trial, outcome in running:
            ended[trial.key] = outcome
            log.info("%s: %s (%d of %d)", trial, _told(outcome), len(ended), len({trial.key for trial in trials}))
            yield rows()


def _told(outcome: Outcome) -> str:
    if outcome.status != "done":
        return f"{outcome.status}: {outcome.reason.splitlines()[0] if outcome.reason else ''}"
    parts = [f"{name} {_numbers(of)}" for name, of in (("dev", outcome.dev), ("test", outcome.test)) if of]
    return ", ".join([*parts, f"{outcome.seconds:,.0f} s"])


def _numbers(of: dict[str, float] | None) -> str:
    return "" if of is None else f"top-1 {of['top1']:.2%} loss {of['nll']:.4f}"


def _reasons(rows: Iterable[Row]) -> str:
    return "\n  ".join(f"{row.trial}: {row.outcome.status}: {row.outcome.reason}" for row in rows)


def _written(table: Swept) -> Swept:
    if table.folder.is_dir():
        RunFolder(table.folder).write_json(TABLE, table.as_json())
    return table
