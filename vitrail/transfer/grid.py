"""A sweep as a value (a run, the settings to vary, the images to choose by), and its trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vitrail.config import merge
from vitrail.data.roles import Splits
from vitrail.data.settings import Data
from vitrail.data.sources.open import OpenedData
from vitrail.durations import Percent
from vitrail.errors import UsageError
from vitrail.ranges import height_width
from vitrail.training.run import Run
from vitrail.transfer.protocol import DevSplit, arrange
from vitrail.transfer.trial import Trial, trial_key
from vitrail.weights.load import weights_fingerprint
from vitrail.words import listing

SEEDS = (0, 1, 2)
"""Table 2: "averaged over three fine-tuning runs"."""
DECIDED = ("name", "out", "seed", "device", "early_stop", "evaluate_every", "fewshot", "knn", "metric.name")
"""Settings that the sweep itself decides, in addition to those in `DATA`."""
NEED_VALIDATION = ("early_stop", "fewshot", "knn")
"""Settings that are for validation images, which runs on all training images do not have."""
RECIPE = "recipe"
"""The name, among the values of a trial, of one of a sweep's other runs."""
DATA = ("data.path", "data.train", "data.validation", "data.holdout", "data.fold", "data.test")


@dataclass(frozen=True)
class Sweep:
    """The settings to try, the images to choose by, and the seeds of the final runs."""

    base: Run
    """All settings that do not vary. Its seed is that of every trial of the search."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Dotted name of a field of `Run` -> the values to try; all combinations of several fields are tried."""
    seeds: Sequence[int] = SEEDS
    """Seeds of the final runs, which are reported."""
    others: Mapping[str, Run] = field(default_factory=dict)
    """Name of a recipe -> its run, to try as well as the grid, such as BiT's HyperRule (appendix B.1.1)."""
    dev: float | None = None
    """Share of the training images to choose by; None: the validation split, or without one the paper's share."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Settings that must be used as they are, by their dotted names -> who asks for them: "--batch-size"."""
    make: Callable[[Mapping[str, Any]], Run] | None = None
    """Makes the run of some values as if a user asked for them: an optimiser has its own rate, a network its own sizes.
    None: `base` with these values, and nothing else is changed."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds are {list(self.seeds)}. Give at least one seed, and none of them twice.")
        for name, values in self.grid.items():
            if name in (*DECIDED, *DATA):
                raise UsageError(f"{name} cannot be varied, because the sweep decides it")
            if not values:
                raise UsageError(f"{name} has no values to try. Give at least one.")
        if not self.base.supervised:
            kind = self.base.objective.kind
            raise UsageError(
                f"A sweep chooses by accuracy, but objective {kind} uses no labels. Choose another recipe."
            )
        if self.base.objective.numbers:
            raise UsageError(
                "A sweep chooses by accuracy, and objective regression predicts numbers. Use vitrail train."
            )
        if any(getattr(self.base, name) is not None for name in NEED_VALIDATION):
            raise UsageError(
                f"{listing(NEED_VALIDATION, quoted=False)} need images to choose by, and the final runs of a sweep "
                "have none. Remove them; to choose the length of training, vary duration."
            )
        for combination in self.settings():
            self.run(self.base, combination)

    def settings(self) -> list[dict[str, Any]]:
        """Return every combination of values, the last field varying fastest, then {"recipe": name} of the others."""
        names = list(self.grid)
        combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [*combinations, *({RECIPE: name} for name in self.others)]

    def run(self, base: Run, values: Mapping[str, Any]) -> Run:
        """Return `base` with one of the settings. Raises UsageError for unknown names and invalid values."""
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name} cannot be {value}")
        if RECIPE in values:
            made = self.others[values[RECIPE]]
        else:
            base = changed(base, values)
            made = base if self.make is None else self.make(values)
        kept = {name: getattr(base, name) for name in ("data", "weights", "seed", "evaluate_every", "out", "name")}
        return replace(made, **kept)


def changed(run: Run, values: Mapping[str, Any]) -> Run:
    """Return `run` with `values` (dotted name -> value). Raises UsageError for unknown names and invalid values."""
    for name, value in values.items():
        nested: Any = value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        run = merge(run, nested)
    if "image_size" in values and run.image_size is not None and run.preprocess is not None:
        run = replace(run, preprocess=replace(run.preprocess, image_size=height_width(run.image_size)))
    return run


@dataclass(frozen=True)
class Trials:
    """The trials of a sweep on its data, and the folder they go to. Creating it writes nothing.

    Raises UsageError, DataError and WeightsError before anything is trained.
    """

    sweep: Sweep
    folder: Path
    split: DevSplit
    data_sets: OpenedData = field(default_factory=OpenedData, repr=False, compare=False)

    @classmethod
    def of(cls, sweep: Sweep, folder: Path | str) -> Trials:
        """Open the data of `sweep`; its trials go to `folder`."""
        return cls(sweep, Path(folder), arrange(sweep.base.data, sweep.dev, sweep.base.seed))

    @cached_property
    def search(self) -> list[Trial]:
        """One trial per combination of values, without the images to choose by; the test split is not opened."""
        run, splits = self._open(self.split.search)
        return [self._trial(run, values, splits, final=False) for values in self.sweep.settings()]

    def finals(self, values: Mapping[str, Any]) -> list[Trial]:
        """Return one trial per seed, with the chosen `values`, on all training images."""
        run, splits = self._open(self.split.final)
        return [self._trial(replace(run, seed=seed), values, splits, final=True) for seed in self.sweep.seeds]

    @cached_property
    def _base(self) -> Run:
        """The base with a single evaluation, of the last weights: final runs have no images to choose a step by."""
        return replace(self.sweep.base, evaluate_every=Percent(100))

    def _open(self, data: Data) -> tuple[Run, Splits]:
        run = replace(self._base, data=replace(data, path=absolute_path(data.path)))
        return run, self.data_sets.splits(run.data, run.seed)

    @cached_property
    def _fingerprint(self) -> Callable[[str], str]:
        """Weights -> their fingerprint, computed once because large files take seconds."""
        return cache(weights_fingerprint)

    def _trial(self, run: Run, values: Mapping[str, Any], splits: Splits, *, final: bool) -> Trial:
        run = self.sweep.run(run, values)
        weights = None if run.weights is None else absolute_path(run.weights)
        run = replace(run, weights=weights)
        key = trial_key(run, splits, "" if weights is None else self._fingerprint(weights))
        asked = self.sweep.asked if RECIPE not in values else {}  # a recipe of its own has settings of its own
        return Trial.of(run, key, self.folder, dict(values), final=final, asked=asked)


def absolute_path(path: str) -> str:
    """Return the absolute path of an existing file or folder, because trials run elsewhere; return a name unchanged."""
    place = Path(path).expanduser()
    return str(place.absolute()) if path not in ("", "digits") and place.exists() else path
