"""VTAB-1k: one fine-tuning per task, all with the same setting, and the table of their accuracies.

Paper, section 4.1 and appendix B.1.1: the same hyper-parameters for all tasks, trained on all 1,000 images, measured
once on the test set. Every task is a trial in a folder of its own (`vitrail.transfer.trial`). Finished trials are never
trained again, so that a repeated call continues after any interruption.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.config import dotted, plain
from vitrail.data.benchmarks.vtab_source import HUB, PREFIX, locate
from vitrail.data.benchmarks.vtab_tasks import VtabTask
from vitrail.data.roles import NONE, split_data_set
from vitrail.data.settings import Data
from vitrail.data.sources.lists import PARTS, WHOLE
from vitrail.data.sources.open import open_data_set
from vitrail.durations import Percent
from vitrail.errors import DataError, TrainingError, UsageError
from vitrail.training.run import LORA, Run
from vitrail.transfer.grid import NEED_VALIDATION, absolute_path
from vitrail.transfer.sweep import Executor, train_all
from vitrail.transfer.trial import Outcome, Trial, here, trial_key, write_json
from vitrail.transfer.vtab_means import PUBLISHED, QUOTED, draw_means, means
from vitrail.weights.load import weights_fingerprint
from vitrail.words import listing, one_line

log = logging.getLogger("vitrail")
TABLE, FIGURE = "vtab.json", "vtab.png"
SETTING = ("image_size", "augment", "preprocess", "optim", "schedule", "duration", "batch_size", "objective", "average",
           "progressive", "tune", *LORA, "keep_head")  # fmt: skip
"""The settings that make up the paper's single setting."""


@dataclass(frozen=True)
class TaskScore:
    """The result of one task."""

    task: VtabTask
    top1: list[float]
    """Accuracy on the test set, a fraction, of each seed whose training ended."""
    images: int
    """Number of images in the test set."""
    notes: list[str] = field(default_factory=list)
    """How the data differ from VTAB-1k's, and why runs failed."""
    runs: list[str] = field(default_factory=list)
    """Run folders."""

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if no run has ended."""
        return statistics.fmean(self.top1) if self.top1 else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1) over seeds; None for fewer than two."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else None


@one_line
@dataclass(frozen=True)
class VtabTable:
    """The table of all tasks."""

    folder: Path
    weights: str
    departures: list[str]
    """Differences from the paper's setting; empty if there are none."""
    scores: list[TaskScore]
    absent: dict[str, str] = field(default_factory=dict)
    """Task without usable data -> where to get them, or why they cannot be used."""

    @property
    def percent(self) -> dict[str, float]:
        """Task -> mean top-1 in percent, for the tasks that have one."""
        return {score.task.name: 100 * score.mean for score in self.scores if score.mean is not None}

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values; accuracies are in percent."""
        return {
            "folder": str(self.folder),
            "weights": self.weights,
            "papers_setting": not self.departures,
            "departures": self.departures,
            "tasks": [
                {
                    "task": score.task.name,
                    "group": score.task.group,
                    "top1": None if score.mean is None else 100 * score.mean,
                    "std": None if score.std is None else 100 * score.std,
                    "seeds": [100 * top1 for top1 in score.top1],
                    "test_images": score.images,
                    "notes": score.notes,
                    "runs": score.runs,
                    "published": {network: row[score.task.name] for network, row in PUBLISHED.items()},
                    "quoted": {network: row[score.task.name] for network, row in QUOTED.items()},
                }
                for score in self.scores
            ],
            "means": {group: {"top1": mean, "tasks": count} for group, (mean, count) in means(self.percent).items()},
            "absent": self.absent,
        }


def departures(run: Run, paper: Run) -> list[str]:
    """Return one line for each setting of `run` that differs from the paper's, except those that each task decides."""
    was, now = (dict(dotted({name: plain(getattr(each, name)) for name in SETTING})) for each in (paper, run))
    was.pop("preprocess.image_size", None)  # it follows from image_size
    return [f"{name} {now.get(name)}, not {value}" for name, value in was.items() if now.get(name) != value]


def run_of(task: VtabTask, base: Run, root: str, seed: int) -> Run:
    """Return the run of a task: `base` trained on its 1,000 images and measured on its test set.

    Random crops and mirror images are not used for tasks whose label they would change, as in BiT. Which tasks these
    are is not published; the table of tasks decides it (`vitrail.data.benchmarks.vtab_tasks`).
    """
    where = root if root == HUB else str(Path(root).expanduser().absolute())
    path = f"{PREFIX}{task.name}:{where}"
    data = Data(path=path, train="+".join(PARTS), validation=NONE, holdout=0.0, test="test")
    crop = base.augment.crop if task.crop else "center"
    augment = replace(base.augment, crop=crop, flip=base.augment.flip and task.flip)
    # evaluated once, at the end: there are no images to choose a step by
    return replace(base, data=data, augment=augment, evaluate_every=Percent(100), seed=seed)


def vtab(
    base: Run,
    paper: Run,
    tasks: Sequence[VtabTask],
    root: str,
    seeds: Sequence[int],
    folder: Path,
    asked: Mapping[str, str] | None = None,
    execute: Executor = here,
) -> VtabTable:
    """Fine-tune `base.weights` on each task whose data are in `root`, once per seed, and measure the result.

    `paper` is the paper's setting; the table lists how `base` differs from it. The table is also in vtab.json in the
    folder, updated after every run, and the means by group are drawn in vtab.png (paper, Figure 2). asked: See
    `vitrail.transfer.trial.Trial`. execute: Trains the runs of all tasks.

    Raises UsageError for settings that cannot be used; DataError if no task has data; TrainingError if all tasks fail;
    Interrupted after a signal: the same call continues.
    """
    if base.weights is None:
        raise UsageError("Fine-tune which network? Name it with --from: vitrail vtab --from RUN --data DIR")
    if not seeds or any(getattr(base, name) is not None for name in NEED_VALIDATION):
        without = listing(NEED_VALIDATION, quoted=False)
        raise UsageError(f"VTAB needs a seed, and {without} cannot be used: it has no images to choose by")
    weights = absolute_path(base.weights)
    base = replace(base, weights=weights)
    mark = weights_fingerprint(weights)
    table = VtabTable(folder, weights, departures(base, paper), [])
    trials: list[Trial] = []
    for task in tasks:
        try:
            if locate(task, root) is None:
                table.absent[task.name] = task.entry.source
                continue
            score, of_task = _prepared(task, base, root, seeds, folder, mark, asked or {})
        except DataError as error:
            log.warning("%s is skipped: %s", task.name, error)
            table.absent[task.name] = str(error)
            continue
        table.scores.append(score)
        trials += of_task
    unmeasured = list(table.scores)
    for rows in train_all(trials, execute) if trials else ():
        outcomes = {row.trial.key: row.outcome for row in rows}
        table.scores[:] = [
            _measured(score, trials[number * len(seeds) :][: len(seeds)], outcomes)
            for number, score in enumerate(unmeasured)
        ]
        write_json(folder / TABLE, table.as_json())
    _require_results(table, root)
    draw_means({Path(weights).name: table.percent, **PUBLISHED, **QUOTED}, folder / FIGURE)
    return table


def _require_results(table: VtabTable, root: str) -> None:
    """Raise DataError if no task has data, TrainingError if none could be trained."""
    if not table.scores:
        reasons = "\n  ".join(f"{task}: {reason}" for task, reason in table.absent.items())
        raise DataError(f"{root} contains the data of none of these tasks. They come from:\n  {reasons}")
    if not table.percent:
        reasons = "\n  ".join(f"{score.task.name}: {', '.join(score.notes)}" for score in table.scores)
        raise TrainingError(f"no task could be trained:\n  {reasons}")


def _prepared(
    task: VtabTask, base: Run, root: str, seeds: Sequence[int], folder: Path, mark: str, asked: Mapping[str, str]
) -> tuple[TaskScore, list[Trial]]:
    """Return a task without numbers yet, and its trials, one for each seed. Raises DataError for unusable data."""
    run = run_of(task, base, root, seeds[0])
    found = open_data_set(run.data)
    if WHOLE in found.splits:  # a copy without the division into 800 and 200
        run = replace(run, data=replace(run.data, train=WHOLE))
    splits = split_data_set(found, run.data)
    assert splits.test is not None  # it is asked for by name
    trials = []
    for seed in seeds:
        run = replace(run, seed=seed)
        key = trial_key(run, splits, mark)
        place = folder / f"{task.name}-seed-{seed}-{key}"
        trials.append(Trial(key, run, place, {"task": task.name}, final=True, asked=asked))
    return TaskScore(task, [], len(splits.test), found.findings.lines()), trials


def _measured(score: TaskScore, trials: Sequence[Trial], outcomes: Mapping[str, Outcome]) -> TaskScore:
    """Return `score` with the outcomes of those of its trials that have ended."""
    top1, notes, runs = list[float](), list(score.notes), list[str]()
    for trial in trials:
        outcome = outcomes.get(trial.key)
        if outcome is not None and outcome.status == "done" and outcome.test is not None:
            top1.append(outcome.test["top1"])
            runs.append(outcome.run)
        elif outcome is not None:
            notes.append(f"seed {trial.run.seed} {outcome.status}: {outcome.reason}")
    return replace(score, top1=top1, notes=notes, runs=runs)
