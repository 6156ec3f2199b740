"""The `Run` of a command: defaults, changed by a recipe, then by configuration files in order, then by flags."""

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
"""The value of `--resume` without a folder."""
AUTO = "auto"
"""The value of `--resume` for scripts that are started again: resume a run if there is one, else start one."""

RECIPE_OF = {"finetune": "finetune", "sweep": "finetune"}
"""Verb -> the recipe that it starts from if none is named."""


class OpenedData:
    """The data of a command, which are opened only once."""

    def __init__(self) -> None:
        self._key: object = None
        self._splits: Splits | None = None

    def of(self, run: Run) -> Splits:
        """Open and return the data of `run`. Raises DataError and UsageError."""
        from vitrail.data.sources.open import open_data

        key = (run.data, run.seed, run.supervised)
        if self._splits is None or key != self._key:
            self._key, self._splits = key, open_data(run.data, seed=run.seed, labels=run.supervised)
        return self._splits


@dataclass(frozen=True)
class Asked:
    """The arguments by which a user describes a run, in `train`, `finetune` and `sweep`."""

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
        """Return `base` with the values of the configuration files and then of the flags. Raises UsageError."""
        for file in self.config:
            base = from_yaml(Path(file), base)
        if self.epochs is not None and "duration" in self.settings:
            raise UsageError("epochs and duration both set the length of the run: give one of them")
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
        """Return whether the settings contain preprocess.image_size, which may contradict image_size."""
        preprocess = self.settings.get("preprocess")
        return preprocess is not None and (not isinstance(preprocess, Mapping) or "image_size" in preprocess)


def starting_run(verb: str, recipes: Sequence[str], config: Sequence[str]) -> Run:
    """Return the run whose values are the defaults of a verb's flags: a recipe, then configuration files."""
    name = recipes[-1] if recipes else RECIPE_OF.get(verb)
    return Asked(config=tuple(config)).over(recipe(name) if name else Run())


def plan(asked: Asked) -> tuple[Run, str]:
    """Return the run for training from scratch, and its origin in words.

    Without a recipe and a configuration file, the images decide on the recipe. Raises UsageError and DataError.
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
    """Raise UsageError if the command does not name the images to train on."""
    brings_data = asked.recipe is not None and find(asked.recipe).brings_data
    if asked.path is None and not brings_data and not asked.config:
        raise UsageError(
            "no images to train on: name their folder, vitrail train DIR (or try vitrail demo, which needs none)"
        )


def from_recipe(asked: Asked) -> tuple[Run, str]:
    """Return the run of the named recipe, and its origin in words.

    The data are opened only if the recipe's warmup is in steps or epochs, or if its settings depend on the data
    (BiT-HyperRule). Raises UsageError and DataError.
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
    if run.schedule.warmup != base.schedule.warmup:  # the user has set it
        return run, why
    run, change = fitted(run, facts)
    return run, f"{why}; {change}" if change else why


def resumed(asked: Asked, where: str | Path) -> tuple[Run, Path] | None:
    """Return the recorded run to resume, changed by files and flags, and its folder.

    `where` is a run folder; or "latest", the run in --out with the newest valid checkpoint; or "auto", which is the
    same but returns None if no run has saved a checkpoint. A recipe may be named only with "auto", because the same
    command also starts the run. Raises CheckpointError if there is no checkpoint, or if all checkpoints are damaged.
    """
    if asked.recipe is not None and where != AUTO:
        raise UsageError(
            "a resumed run continues with its own settings: remove --recipe, or start a new run without --resume"
        )
    if where in (LATEST, AUTO):
        out = _out(asked)
        found = newest(out)
        if found is None and where == AUTO:
            return None
        if found is None:
            raise CheckpointError(
                f"no run in {out.resolve()} has a valid checkpoint to resume from: name the run with --resume RUN, "
                "or the folder of the runs with --out DIR"
            )
        folder = found
    else:
        folder = Path(where)
    written = folder / "config.yaml"
    if not written.is_file():
        raise CheckpointError(f"{folder} is not a run folder: {written} does not exist")
    return asked.over(from_yaml(written, Run())), folder


def _out(asked: Asked) -> Path:
    """Return the folder of the runs. Other flags are not read, because they may need the settings of a recorded run."""
    base = Run() if asked.recipe is None else recipe(asked.recipe)
    alone = {name: value for name, value in asked.settings.items() if name == "out"}
    return Path(replace(asked, settings=alone).over(base).out)


def newest(out: Path) -> Path | None:
    """Return the run folder in `out` with the newest valid checkpoint; None if there is no checkpoint.

    Raises CheckpointError if all checkpoints of a run are damaged.
    """
    from vitrail.training.checkpoints.checkpoint import latest_valid

    found = [(os.path.getmtime(path), path.parent) for path in out.glob("*/checkpoints")]
    for _, folder in sorted(found, reverse=True):
        if latest_valid(folder / "checkpoints") is not None:
            return folder
    return None
