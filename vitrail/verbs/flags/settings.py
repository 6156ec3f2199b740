"""From what was asked to a `Run`: defaults < recipe < configuration files in their order < flags and keywords."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import Epochs, from_yaml, merge
from vitrail.errors import CheckpointError, UsageError
from vitrail.recipes.by_data import Facts, absolute, choose, facts_of, fitted
from vitrail.recipes.registry import find, recipe
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.sources.open import Splits

LATEST = "latest"
"""What `--resume` without a folder means."""
AUTO = "auto"
"""To `--resume`: go on if there is something to go on with, else begin; for scripts that are started again."""

RECIPE_OF = {"finetune": "finetune", "sweep": "finetune"}
"""Verb -> the recipe that it starts from where none is named."""


class OpenedData:
    """The data of a command, opened once, however often they are asked for."""

    def __init__(self) -> None:
        self._key: object = None
        self._splits: Splits | None = None

    def of(self, run: Run) -> Splits:
        """Return the data of `run`, opened. Raises DataError and UsageError."""
        from vitrail.data.sources.open import open_data

        key = (run.data, run.seed, run.supervised)
        if self._splits is None or key != self._key:
            self._key, self._splits = key, open_data(run.data, seed=run.seed, labels=run.supervised)
        return self._splits


@dataclass(frozen=True)
class Asked:
    """The arguments that `train` and `finetune` have in common."""

    path: str | Path | None = None
    recipe: str | None = None
    config: tuple[str, ...] = ()
    epochs: float | None = None
    lr: float | None = None
    weights: str | Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: OpenedData = field(default_factory=OpenedData)

    def facts(self, run: Run) -> Facts:
        """Return the facts about the training images of `run`. Raises DataError and UsageError."""
        return facts_of(self.data.of(run).train)

    def over(self, base: Run) -> Run:
        """Return `base` changed by the configuration files, then by the flags. Raises UsageError."""
        for file in self.config:
            base = from_yaml(Path(file), base)
        if self.epochs is not None and "duration" in self.settings:
            raise UsageError("epochs and duration both say how long the run is: give one of them")
        run = merge(base, self.settings)
        if self.epochs is not None:
            run = replace(run, duration=Epochs(self.epochs))
        if self.lr is not None:
            run = merge(run, {"optim": {"lr": self.lr}})
        if self.weights is not None:
            run = merge(run, {"weights": self.weights})
        if run.preprocess is not None and run.image_size is not None and not self._names_input_size():
            size = (run.image_size, run.image_size)
            run = replace(run, preprocess=replace(run.preprocess, image_size=size))
        return run if self.path is None else merge(run, {"data": {"path": str(self.path)}})

    def _names_input_size(self) -> bool:
        """Is the size of the network's input given twice, so that a contradiction must be told, not mended?"""
        preprocess = self.settings.get("preprocess")
        return preprocess is not None and (not isinstance(preprocess, Mapping) or "image_size" in preprocess)


def starting_run(verb: str, recipes: Sequence[str], config: Sequence[str]) -> Run:
    """Return the run that a verb's other flags change: of the last recipe named, then of the configuration files."""
    name = recipes[-1] if recipes else RECIPE_OF.get(verb)
    return Asked(config=tuple(config)).over(recipe(name) if name else Run())


def plan(asked: Asked) -> tuple[Run, str]:
    """Return the run for training from scratch, and one sentence on where it came from.

    Without a recipe and without a configuration file, the recipe is chosen by a look at the data. Raises
    UsageError and DataError.
    """
    asking_for_images(asked)
    if asked.recipe is not None:
        return from_recipe(asked)
    run = asked.over(Run())
    if asked.config:
        return run, f"configuration {', '.join(asked.config)}"
    name, why = choose(asked.facts(run))
    return asked.over(recipe(name)), f"recipe {name}, because of {why}"


def asking_for_images(asked: Asked) -> None:
    """Raise UsageError where nothing says which images to train on."""
    brings_data = asked.recipe is not None and find(asked.recipe).brings_data
    if asked.path is None and not brings_data and not asked.config:
        raise UsageError("which images? Say where they are: vitrail train DIR (or vitrail demo, to try it out)")


def from_recipe(asked: Asked) -> tuple[Run, str]:
    """Return the run of the recipe asked for, and a sentence on it.

    Where the recipe counts its warmup in steps or epochs, or follows from the data altogether (BiT-HyperRule), the
    data are looked at. Raises UsageError and DataError.
    """
    assert asked.recipe is not None
    base, rule = recipe(asked.recipe), find(asked.recipe).by_data
    run, why = asked.over(base), f"recipe {asked.recipe}"
    if rule is None and not absolute(run):
        return run, why
    facts = asked.facts(run)
    if rule is not None:
        base = replace(rule(facts.images, facts.side), name=base.name)
        run = asked.over(base)
        why += f" for {facts.images:,} images of about {facts.side} pixels"
    if run.schedule.warmup != base.schedule.warmup:  # asked for: left as it is
        return run, why
    run, told = fitted(run, facts)
    return run, f"{why}; {told}" if told else why


def resumed(asked: Asked, where: str | Path) -> tuple[Run, Path] | None:
    """Return the recorded run to go on with, changed by files and flags, and its folder.

    `where` is a run folder, or "latest": the folder below the `out` asked for whose valid checkpoint is newest; or
    "auto": the same, and None where no run there has saved anything yet. Only with "auto" may a recipe be asked for,
    by the words that began the run. Raises CheckpointError where there is none, or all that there is is damaged.
    """
    if asked.recipe is not None and where != AUTO:
        raise UsageError("a resumed run goes on with its own settings: leave --recipe out, or start a new run")
    if where in (LATEST, AUTO):
        out = _out(asked)
        found = newest(out)
        if found is None and where == AUTO:
            return None
        if found is None:
            raise CheckpointError(
                f"no run in {out.resolve()} has a valid checkpoint to resume from: say which run with --resume RUN, "
                "or where the runs are with --out DIR"
            )
        folder = found
    else:
        folder = Path(where)
    written = folder / "config.yaml"
    if not written.is_file():
        raise CheckpointError(f"{folder} is no run folder: there is no {written}")
    return asked.over(from_yaml(written, Run())), folder


def _out(asked: Asked) -> Path:
    """Return the folder of runs asked for. Other flags may make sense only together with what the run has recorded."""
    base = Run() if asked.recipe is None else recipe(asked.recipe)
    alone = {name: value for name, value in asked.settings.items() if name == "out"}
    return Path(replace(asked, settings=alone).over(base).out)


def newest(out: Path) -> Path | None:
    """Return the run folder in `out` with the newest valid checkpoint; None where nothing was saved.

    Raises CheckpointError where all checkpoints of a run are damaged.
    """
    from vitrail.training.checkpoints.checkpoint import latest_valid

    found = [(os.path.getmtime(path), path.parent) for path in out.glob("*/checkpoints")]
    for _, folder in sorted(found, reverse=True):
        if latest_valid(folder / "checkpoints") is not None:
            return folder
    return None
