"""VTAB-1k: one fine-tuning for each task, all with one setting, and the table of what they reach.

Paper, section 4.1 and appendix B.1.1: the same hyper-parameters for all tasks, trained on all 1,000 images, measured
once on the test set. Every task is a trial in a folder of its own (`vitrail.transfer.trial`), known by what it
computes: what is finished is never trained again, and the same call goes on after any end.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.config import Percent, plain
from vitrail.data.benchmarks.index_lists import PARTS, WHOLE
from vitrail.data.benchmarks.vtab import Task
from vitrail.data.benchmarks.vtab_source import HUB, PREFIX, locate
from vitrail.data.roles import NONE
from vitrail.data.settings import Data
from vitrail.data.sources.open import find, split_found
from vitrail.errors import DataError, TrainingError, UsageError
from vitrail.training.folder import RunFolder
from vitrail.training.guard import Interrupted
from vitrail.training.run import Run
from vitrail.transfer.figure2 import draw
from vitrail.transfer.table9 import PUBLISHED, means
from vitrail.transfer.trial import Outcome, Trial, finished, run_trial, trial_key
from vitrail.weights.fingerprint import weights_fingerprint

log = logging.getLogger("vitrail")
TABLE, FIGURE = "vtab.json", "vtab.png"
SETTING = ("image_size", "augment", "preprocess", "optim", "schedule", "duration", "batch_size", "objective", "average",
           "progressive", "tune", "keep_head")  # fmt: skip
"""What the paper's single setting is made of."""


@dataclass(frozen=True)
class Score:
    """What one task came to."""

    task: Task
    top1: list[float]
    """On the test set, a share, for each seed that was trained to its end."""
    images: int
    """In the test set."""
    notes: list[str] = field(default_factory=list)
    """In what the data differ from VTAB-1k's, and why runs failed."""
    runs: list[str] = field(default_factory=list)
    """Run folders."""

    @property
    def mean(self) -> float | None:
        """Over seeds; None where no run ended."""
        return statistics.fmean(self.top1) if self.top1 else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None of fewer than two."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else None


@dataclass(frozen=True)
class Scores:
    """The table."""

    folder: Path
    weights: str
    departures: list[str]
    """From the paper's setting; empty where it is the paper's."""
    scores: list[Score]
    absent: dict[str, str] = field(default_factory=dict)
    """Task -> where its data come from, as they are not there, or why they cannot be used."""

    @property
    def percent(self) -> dict[str, float]:
        """Task -> mean top-1 in percent, of those that have one."""
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
                }
                for score in self.scores
            ],
            "means": {group: {"top1": mean, "tasks": count} for group, (mean, count) in means(self.percent).items()},
            "absent": self.absent,
        }


def departures(run: Run, paper: Run) -> list[str]:
    """Return one line for each setting in which `run` is not the paper's; what each task decides is none of them."""
    was, now = (dict(_flat({name: plain(getattr(each, name)) for name in SETTING})) for each in (paper, run))
    was.pop("preprocess.image_size", None)  # follows from image_size
    return [f"{name} {now.get(name)}, not {value}" for name, value in was.items() if now.get(name) != value]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def run_of(task: Task, base: Run, root: str, seed: int) -> Run:
    """Return the run of a task: `base` on its 1,000 images, measured on its test set.

    Random crops and mirror images are left out where they would change the label, as BiT does; which tasks those are is
    not published, and is in the table of tasks (`vitrail.data.benchmarks.vtab`).
    """
    where = root if root == HUB else str(Path(root).expanduser().absolute())
    augment = replace(
        base.augment,
        crop=base.augment.crop if task.crop else "center",
        flip=base.augment.flip and task.flip,
    )
    return replace(
        base,
        data=Data(
            path=f"{PREFIX}{task.name}:{where}", train="+".join(PARTS), validation=NONE, holdout=0.0, test="test"
        ),
        augment=augment,
        evaluate_every=Percent(100),  # there is nothing to choose a step by
        seed=seed,
    )


def vtab(base: Run, paper: Run, tasks: Sequence[Task], root: str, seeds: Sequence[int], folder: Path) -> Scores:
    """Fine-tune `base.weights` on each task whose data are below `root`, once for each seed, and measure it.

    `paper` is the paper's setting, which the table says `base` departs from. The table is also in vtab.json, in the
    folder, brought up to date after every task, and the means by group in vtab.png (paper, Figure 2).

    Raises UsageError for settings that cannot be; DataError where no task has data; TrainingError where all fail;
    Interrupted after a signal: the same call goes on.
    """
    if base.weights is None:
        raise UsageError("fine-tune which network? vitrail vtab --from RUN --data DIR")
    if not seeds or base.early_stop is not None or base.fewshot is not None:
        raise UsageError("VTAB needs a seed, and no early_stop or fewshot: there are no images to choose by")
    place = Path(base.weights).expanduser()
    base = replace(base, weights=str(place.absolute()) if place.exists() else base.weights)
    assert base.weights is not None
    mark = weights_fingerprint(base.weights)
    table = Scores(folder, base.weights, departures(base, paper), [])
    for task in tasks:
        try:
            if locate(task, root) is None:
                table.absent[task.name] = task.entry.source
                continue
            score = _score(task, base, root, seeds, folder, mark)
        except DataError as error:
            log.warning("%s left out: %s", task.name, error)
            table.absent[task.name] = str(error)
            continue
        log.info("%s: %s", task.name, "failed" if score.mean is None else f"top-1 {score.mean:.2%}")
        table.scores.append(score)
        RunFolder(folder).write_json(TABLE, table.as_json())
    _refuse_nothing(table, root)
    try:
        draw({**PUBLISHED, Path(base.weights).name: table.percent}, folder / FIGURE)
    except OSError as error:
        log.warning("could not write %s: %s", folder / FIGURE, error.strerror or error)
    return table


def _refuse_nothing(table: Scores, root: str) -> None:
    if not table.scores:
        reasons = "\n  ".join(f"{task}: {reason}" for task, reason in table.absent.items())
        raise DataError(f"{root} holds the data of none of these tasks. Where they come from:\n  {reasons}")
    if not table.percent:
        reasons = "\n  ".join(f"{score.task.name}: {', '.join(score.notes)}" for score in table.scores)
        raise TrainingError(f"no task could be trained:\n  {reasons}")


def _score(task: Task, base: Run, root: str, seeds: Sequence[int], folder: Path, mark: str) -> Score:
    """Train a task for every seed, where that is not done yet. Raises DataError where it has no data."""
    run = run_of(task, base, root, seeds[0])
    found = find(run.data.path)
    if WHOLE in found.splits:  # a copy that does not say which 200 are to choose by
        run = replace(run, data=replace(run.data, train=WHOLE))
    splits = split_found(found, run.data)
    assert splits.test is not None  # it was asked for by name
    score = Score(task, [], len(splits.test), found.findings.lines())
    for seed in seeds:
        key = trial_key(replace(run, seed=seed), splits, mark)
        trial = Trial(key, replace(run, seed=seed), folder / f"{task.name}-seed-{seed}-{key}", {}, final=True)
        outcome = finished(trial.folder) or _trained(trial)
        if outcome.status == "done" and outcome.test is not None:
            score.top1.append(outcome.test["top1"])
            score.runs.append(outcome.run)
        else:
            score.notes.append(f"seed {seed} {outcome.status}: {outcome.reason}")
    return score


def _trained(trial: Trial) -> Outcome:
    trial.prepare()
    try:
        return run_trial(trial.folder)
    except Interrupted as error:
        name = trial.folder.name
        raise Interrupted(f"stopped in {name}, which is saved: the same command goes on", error.signum) from None
