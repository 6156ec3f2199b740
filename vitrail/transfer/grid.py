"""What a sweep tries, as a value: a run, the settings to vary and by what to choose; and its trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.config import Percent, merge
from vitrail.data.settings import Data
from vitrail.data.sources.open import Splits, open_data
from vitrail.errors import UsageError
from vitrail.training.run import Run
from vitrail.transfer.dev import Arranged, arrange
from vitrail.transfer.trial import Trial, trial_key
from vitrail.weights.fingerprint import weights_fingerprint

SEEDS = (0, 1, 2)
"""Table 2: "averaged over three fine-tuning runs"."""
DECIDED = ("name", "out", "seed", "device", "early_stop", "evaluate_every", "fewshot")
"""Settings that the sweep itself decides, beside which images are for what."""
DATA = ("data.path", "data.train", "data.validation", "data.holdout", "data.test")


@dataclass(frozen=True)
class Sweep:
    """Settings to try, how to choose among them, and how often to repeat the choice."""

    base: Run
    """All that does not vary. Its seed is that of every trial that is chosen from."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Field of `Run`, by dotted name -> the values to try; of several, all combinations."""
    seeds: Sequence[int] = SEEDS
    """Of the runs that are reported."""
    dev: float | None = None
    """Share of the training images to choose by; None: the validation split, else the paper's share for so many."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds are {list(self.seeds)}: at least one, and none of them twice")
        for name, values in self.grid.items():
            if name in (*DECIDED, *DATA):
                raise UsageError(f"{name} cannot be varied: the sweep decides it")
            if not values:
                raise UsageError(f"there are no values of {name} to try")
        if self.base.early_stop is not None or self.base.fewshot is not None:
            raise UsageError(
                "early_stop and fewshot need images to choose by, and the final runs of a sweep have none: leave them "
                "out (and vary duration, if the length is in question)"
            )
        for combination in self.settings():
            changed(self.base, combination)

    def settings(self) -> list[dict[str, Any]]:
        """Return every combination of values, the last field varying fastest."""
        names = list(self.grid)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*self.grid.values())]


def changed(run: Run, values: Mapping[str, Any]) -> Run:
    """Return `run` with `values` by dotted name. Raises UsageError for names and values that cannot be."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} cannot be {value}")
        nested: Any = value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        run = merge(run, nested)
    if "image_size" in values and run.image_size is not None and run.preprocess is not None:
        run = replace(run, preprocess=replace(run.preprocess, image_size=(run.image_size, run.image_size)))
    return run


@dataclass(frozen=True)
class Planned:
    """A sweep that has met its data: the trials, in the folder they go to. Opening it writes nothing.

    Raises UsageError, DataError and WeightsError before anything is trained.
    """

    sweep: Sweep
    folder: Path
    arranged: Arranged

    @classmethod
    def of(cls, sweep: Sweep, folder: Path | str) -> Planned:
        """Look at the data of `sweep`; its trials go to `folder`."""
        if not sweep.base.supervised:
            raise UsageError(f"a sweep chooses by accuracy, and objective {sweep.base.objective.kind} has no labels")
        return cls(sweep, Path(folder), arrange(sweep.base.data, sweep.dev, sweep.base.seed))

    @cached_property
    def search(self) -> list[Trial]:
        """One trial for each combination of values, without the images to choose by; the test split is not opened."""
        run, splits = self._open(self.arranged.search)
        return [self._trial(run, values, splits, final=False) for values in self.sweep.settings()]

    def finals(self, values: Mapping[str, Any]) -> list[Trial]:
        """Return one trial for each seed, with the `values` chosen, on all training images."""
        run, splits = self._open(self.arranged.final)
        return [self._trial(replace(run, seed=seed), values, splits, final=True) for seed in self.sweep.seeds]

    @cached_property
    def _base(self) -> Run:
        """With one evaluation, of the last weights: the final runs have nothing to choose a step by either."""
        return replace(self.sweep.base, evaluate_every=Percent(100))

    def _open(self, data: Data) -> tuple[Run, Splits]:
        run = replace(self._base, data=replace(data, path=_absolute(data.path)))
        return run, open_data(run.data, seed=run.seed)

    @cached_property
    def _fingerprints(self) -> dict[str | None, str]:
        """Of the weights met so far: large ones take seconds."""
        return {None: ""}

    def _trial(self, run: Run, values: Mapping[str, Any], splits: Splits, *, final: bool) -> Trial:
        run = changed(run, values)
        run = run if run.weights is None else replace(run, weights=_absolute(run.weights))
        if run.weights not in self._fingerprints and run.weights is not None:
            self._fingerprints[run.weights] = weights_fingerprint(run.weights)
        key = trial_key(run, splits, self._fingerprints[run.weights])
        return Trial.of(run, key, self.folder, dict(values), final=final)


def _absolute(path: str) -> str:
    """A path that exists, from the root, since trials run elsewhere; a name as it is."""
    place = Path(path).expanduser()
    return str(place.absolute()) if path not in ("", "digits") and place.exists() else path
