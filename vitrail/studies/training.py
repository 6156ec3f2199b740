"""Train the stages of a study, once with each seed. Finished stages are not repeated; failed ones are reported."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitrail.data.roles import NONE, SUBSET, Splits
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError
from vitrail.studies.sets import Sets
from vitrail.studies.study import Cell, Stage, with_data
from vitrail.training.folder import RunFolder
from vitrail.training.run import Run
from vitrail.transfer.grid import changed
from vitrail.transfer.sweep import Executor
from vitrail.transfer.trial import Outcome, Trial, finished, trial_key

log = logging.getLogger("vitrail")
Wanted = tuple[Stage, int]
"""A stage and its seed."""


@dataclass
class Training:
    """The outcomes of stages, and what is needed to train more of them.

    The folder of a stage is named by what it computes, so that studies in one folder share equal stages.
    """

    sets: Mapping[int, Sets]
    """Those of each seed."""
    folder: Path
    execute: Executor
    until: float | None = None
    """Time (`time.monotonic`) after which nothing is started; what still trains is saved."""
    outcomes: dict[Wanted, Outcome] = field(default_factory=dict)
    absent: dict[Wanted, str] = field(default_factory=dict)
    """Stages that cannot be trained, with the reason: their data, or a stage before them, are missing."""
    _opened: dict[tuple[Data, int], Splits] = field(default_factory=dict)
    _keys: dict[Wanted, str] = field(default_factory=dict)

    def train(self, wanted: Iterable[tuple[Cell, Stage, int]]) -> None:
        """Train these stages and those before them, the first ones of all chains first.

        Raises UsageError for settings that cannot work, and Interrupted after a signal: the same call continues.
        """
        labels: dict[Wanted, Cell] = {}
        for cell, stage, seed in wanted:
            for each in stage.chain():
                labels.setdefault((each, seed), cell)
        for depth in range(1 + max((stage.depth for stage, _ in labels), default=-1)):
            level = [(one, cell) for one, cell in labels.items() if one[0].depth == depth and one not in self.outcomes]
            self._train([trial for one, cell in level if (trial := self._trial(one, cell)) is not None])

    def _train(self, pairs: Sequence[tuple[Wanted, Trial]]) -> None:
        trials = {trial.key: trial for _, trial in pairs}
        found = {key: finished(trial.folder) for key, trial in trials.items()}
        ended = {key: one for key, one in found.items() if one is not None and _has_network(one)}
        if ended:
            log.info("%d of %d runs are finished already", len(ended), len(trials))
        waiting = [] if self.late() else [trial for key, trial in trials.items() if key not in ended]
        for trial in waiting:
            trial.prepare()
        with closing(self.execute(waiting)) as running:
            for trial, outcome in running:
                ended[trial.key] = outcome
                log.info("%s: %s, %.0f s (%d of %d)", trial, outcome.status, outcome.seconds, len(ended), len(trials))
                if self.late():
                    break  # closing the executor saves what still trains
        self.outcomes |= {one: ended[trial.key] for one, trial in pairs if trial.key in ended}

    def late(self) -> bool:
        """Whether nothing more is started."""
        return self.until is not None and time.monotonic() >= self.until

    def _trial(self, one: Wanted, cell: Cell) -> tuple[Wanted, Trial] | None:
        """Return the trial of a stage; None if it cannot be trained, which `absent` explains."""
        stage, seed = one
        for before in stage.before:
            if (reason := self.problem((before, seed))) is not None:
                self.absent[one] = f"what it starts from is missing: {reason}"
                return None
        try:
            run = self.placed(replace(stage.run, seed=seed))
        except DataError as error:
            self.absent[one] = str(error)
            return None
        if stage.start is not None:
            run = replace(run, weights=str(RunFolder(Path(self.outcomes[stage.start, seed].run)).last))
        if stage.tokenizer is not None:
            run = changed(run, {"objective.tokenizer": self.outcomes[stage.tokenizer, seed].run})
        marks = "+".join(self._keys[before, seed] for before in stage.before)
        self._keys[one] = key = trial_key(run, self._splits(run), marks)
        return one, Trial.of(run, key, self.folder, {"row": cell.row, "at": cell.at}, final=True)

    def problem(self, one: Wanted) -> str | None:
        """Return why a stage has no network; None if it has one."""
        if one in self.absent:
            return self.absent[one]
        outcome = self.outcomes.get(one)
        if outcome is None:
            return "not trained yet"
        return None if outcome.status == "done" else f"{outcome.status}: {outcome.reason}"

    def diverged(self, one: Wanted) -> bool:
        """Whether a stage, or one before it, diverged."""
        stage, seed = one
        found = [self.outcomes.get((each, seed)) for each in stage.chain()]
        return any(outcome is not None and outcome.status == "diverged" for outcome in found)

    def fingerprint(self, run: Run) -> str:
        """Return the fingerprint of the data of a run, whose path is the name of a data set.

        Raises DataError if they are absent.
        """
        return self._splits(self.placed(run)).fingerprint

    def placed(self, run: Run) -> Run:
        """Return `run` with the path of its data in place of their name. Raises DataError if they are absent.

        A validation split tests data that have no test split, such as ImageNet.
        """
        run = with_data(run, path=self.sets[run.seed].path(run.data.path))
        own = self._splits(run).held_out.get("validation")
        if own is None or run.data.test is not None or self._splits(run).test is not None:
            return run
        return with_data(run, test=own, validation=NONE if run.data.subset is None else SUBSET)

    def _splits(self, run: Run) -> Splits:
        key = run.data, run.seed
        if key not in self._opened:
            self._opened[key] = open_data(run.data, seed=run.seed)
        return self._opened[key]


def _has_network(outcome: Outcome) -> bool:
    """Return whether a finished run still has what the next stages and the measurements need."""
    return outcome.status != "done" or RunFolder(Path(outcome.run)).last.is_dir()


def ranked(tried: Sequence[Stage], training: Training, seed: int) -> list[Stage]:
    """Return trainings, the best one on the images held out of training first.

    Pre-trainings are compared by the negative log-likelihood of these images, fine-tunings by top-1.
    """

    def score(stage: Stage) -> float:
        outcome = training.outcomes.get((stage, seed))
        found = {} if outcome is None or outcome.dev is None else outcome.dev
        return -found.get("nll", math.inf) if stage.start is None else found.get("top1", -1.0)

    return sorted(tried, key=score, reverse=True)
