"""The `Run` of a command: defaults, changed by a recipe, then by configuration files in order, then by flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import from_yaml, merge
from vitrail.durations import LONGEST, Epochs, Steps
from vitrail.errors import CheckpointError, UsageError
from vitrail.files import names_near
from vitrail.import_path import is_own
from vitrail.recipes.by_data import Facts, choose, facts_of, fitted, has_absolute_warmup, in_time, sized
from vitrail.recipes.by_network import warn_of_rate
from vitrail.recipes.finetune_by_data import FINETUNE_BY_DATA, WEIGHTS, Decided, FineTuning, Pretrained, decide
from vitrail.recipes.registry import find, recipe
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.item import DataSet
    from vitrail.data.settings import Data
    from vitrail.data.sources.open import Splits

LATEST = "latest"
"""The value of `--resume` without a folder."""
AUTO = "auto"
"""The value of `--resume` for scripts that are started again: resume a run if there is one, else start one."""

RECIPE_OF = {"finetune": FINETUNE_BY_DATA.name, "sweep": "finetune"}
"""Verb -> the recipe that it starts from if none is named."""
RUN_NAME = "finetune"
"""Name of a fine-tuning without a recipe."""
UNSET = Epochs(LONGEST)
"""A duration that nobody gives, to find out whether one is given."""
MEASURED = 2.0
"""Seconds for which the speed of training is measured if there is a time limit."""


class OpenedData:
    """The data of a command, which are opened only once, also if they are split in several ways."""

    def __init__(self) -> None:
        self._found: dict[object, DataSet] = {}
        self._splits: dict[object, Splits] = {}

    def of(self, run: Run) -> Splits:
        """Return the data of `run`, opened. Raises DataError and UsageError."""
        return self.splits(run.data, run.seed, run.supervised)

    def splits(self, data: Data, seed: int, labels: bool = True) -> Splits:
        """Return what `open_data` returns for these arguments. Raises DataError and UsageError."""
        from vitrail.data.item import DataSet
        from vitrail.data.sources.open import find_data, split_found

        place = data if is_own(type(data)) else (data.path, data.columns), labels
        if place not in self._found:
            self._found[place] = find_data(data, labels=labels)
        if (data, seed, labels) not in self._splits:
            found = self._found[place]
            findings = replace(found.findings, warnings=[*found.findings.warnings])  # splitting adds warnings
            self._splits[data, seed, labels] = split_found(DataSet(found.splits, findings), data, seed, labels=labels)
        return self._splits[data, seed, labels]


@dataclass(frozen=True)
class RunArguments:
    """The arguments by which a user describes a run, in `train`, `finetune` and `sweep`."""

    path: str | Path | None = None
    recipe: str | None = None
    config: Sequence[str | Path] | str | Path = ()
    """Configuration files, or a single one."""
    epochs: float | None = None
    lr: float | None = None
    weights: str | Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: OpenedData = field(default_factory=OpenedData)

    @property
    def files(self) -> list[str]:
        """The configuration files."""
        return [str(file) for file in ([self.config] if isinstance(self.config, str | Path) else self.config)]

    def facts(self, run: Run) -> Facts:
        """Return the facts about the training images of `run`. Raises DataError and UsageError."""
        return facts_of(self.data.of(run).train)

    def applied_to(self, base: Run) -> Run:
        """Return `base` with the values of the configuration files and then of the flags. Raises UsageError."""
        for file in self.files:
            base = from_yaml(Path(file), base, imports=True)
        if self.epochs is not None and "duration" in self.settings:
            raise UsageError("--epochs and --duration both set the length of the run: give one of them")
        run = merge(base, self.settings, imports=True)
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
    return RunArguments(config=config).applied_to(recipe(name) if name else Run())


def training_run(given: RunArguments) -> tuple[Run, str]:
    """Return the run for training from scratch, and its origin in words.

    Without a recipe and a configuration file, the objective and the images decide on the recipe, and a time limit on
    the size of the images and the batch. Raises UsageError and DataError.
    """
    require_images(given)
    if given.recipe is not None:
        return from_recipe(given)
    run = given.applied_to(Run())
    if given.files:
        return run, f"configuration {', '.join(given.files)}"
    facts = given.facts(run)
    name, why = choose(facts, run.objective.kind)
    base, why = sized(recipe(name), facts), f"recipe {name}, because of {why}"
    run = given.applied_to(base)
    if (seen := _in_time(run, given.data.of(run))) is None:
        return run, why
    shortened, changes = in_time(base, facts.images, seen)
    run = given.applied_to(shortened)
    # what files and flags set stays as it is
    kept = [change for change in changes if _same(change.partition(":")[0], run, shortened)]
    return run, "\n".join([why, *(f"  {change}" for change in kept)])


def finetuning_run(given: RunArguments) -> tuple[Run, str]:
    """Return the run for fine-tuning, and its origin in words: a line for each decision.

    Without a recipe, the images, the network and the time decide (`vitrail.recipes.finetune_by_data`). Raises
    UsageError, DataError and WeightsError.
    """
    import numpy as np

    given = with_weights(given)
    if given.recipe not in (None, FINETUNE_BY_DATA.name):
        return from_recipe(given)
    asked = given.applied_to(replace(recipe(FINETUNE_BY_DATA.name), duration=UNSET, batch_size=None))
    splits, facts = given.data.of(asked), given.facts(asked)
    timed = _in_time(asked, splits)
    seen = min((count for count in (timed, _given_length(asked, facts.images)) if count is not None), default=None)
    single = isinstance(splits.train.labels, np.ndarray) and not asked.objective.numbers
    task = FineTuning(facts, len(splits.class_names), _network(asked), seen, timed, single)
    decided = decide(task)
    run = given.applied_to(decided.run if given.recipe else replace(decided.run, name=RUN_NAME))
    kind = "targets" if run.objective.numbers else "classes"
    about = f"{facts.images:,} images of {task.classes} {kind}, of about {facts.side} pixels"
    return run, "\n".join([f"recipe {FINETUNE_BY_DATA.name} for {about}", *_reasons(decided, run)])


def _reasons(decided: Decided, run: Run) -> list[str]:
    """Return a line for each decision that files and flags have not replaced in `run`."""
    return [f"  {name}: {why}" for name, why in decided.why.items() if _same(name, run, decided.run)]


def _same(name: str, one: Run, other: Run) -> bool:
    """Return whether two runs have the same value of a setting."""
    return bool(getattr(one, name) == getattr(other, name))


def _network(run: Run) -> Pretrained:
    """Return the facts about the pretrained network of `run`. Raises WeightsError."""
    from vitrail.model.variants import ResNetConfig
    from vitrail.weights.load import read_card

    assert run.weights is not None
    card = read_card(run.weights)
    config, side = card.config, run.image_size or min(card.config.image_size)
    if isinstance(config, ResNetConfig):
        return Pretrained(config.width * 2 ** (len(config.units) + 1), 0, side, config.classes > 0)
    return Pretrained(config.width, config.depth, side, config.classes > 0)


def _given_length(run: Run, images: int) -> int | None:
    """Return the number of images in the length that the user gave; None if there is none, or steps without a batch."""
    if run.duration == UNSET or (isinstance(run.duration, Steps) and run.batch_size is None):
        return None
    batch = run.batch_size or 1
    return max(run.duration.steps(per_epoch=images / batch, batch_size=batch) * batch, 1)


def _in_time(run: Run, splits: Splits) -> int | None:
    """Return the number of images of full size that `run` sees in its time limit; None without a limit.

    The speed is measured, which takes seconds. Processes that torchrun started do not measure it, because they must all
    decide the same.
    """
    if run.time_limit is None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return None
    from vitrail.transfer.timing import images_per_second

    speed = images_per_second(replace(run, duration=Epochs(1)), splits, MEASURED)
    return max(int(60 * run.time_limit * speed), 1)


def require_images(given: RunArguments) -> None:
    """Raise UsageError if the command does not name the images to train on."""
    brings_data = given.recipe is not None and find(given.recipe).brings_data
    data = {name: value for name, value in given.settings.items() if name == "data"}
    own = bool(data) and is_own(type(merge(Run(), data, imports=True).data))
    if given.path is None and not brings_data and not given.files and not own:
        raise UsageError(
            "no images to train on: name their folder, vitrail train DIR (or try vitrail demo, which needs none)"
        )


def with_weights(given: RunArguments) -> RunArguments:
    """Return `given` with the shipped weights if neither flags nor files name others.

    Raises UsageError if the command does not name the images to train on.
    """
    if given.path is None and not given.files:
        raise UsageError("no images are given: vitrail finetune DIR")
    if given.weights is not None or given.applied_to(Run()).weights is not None:
        return given
    return replace(given, weights=WEIGHTS)


def from_recipe(given: RunArguments) -> tuple[Run, str]:
    """Return the run of the named recipe, and its origin in words.

    The data are opened only if the recipe's warmup is in steps or epochs, or if its settings depend on the data
    (BiT-HyperRule). Raises UsageError and DataError.
    """
    assert given.recipe is not None
    base, rule = recipe(given.recipe), find(given.recipe).by_data
    run, why = given.applied_to(base), f"recipe {given.recipe}"
    warn_of_rate(given.recipe, run)
    if rule is None and not has_absolute_warmup(run):
        return run, why
    facts = given.facts(run)
    if rule is not None:
        base = replace(rule(facts.images, facts.side), name=base.name)
        run = given.applied_to(base)
        why += f" for {facts.images:,} images of about {facts.side} pixels"
    if run.schedule.warmup != base.schedule.warmup:  # the user has set it
        return run, why
    run, change = fitted(run, facts)
    return run, f"{why}; {change}" if change else why


def resumed(given: RunArguments, where: str | Path) -> tuple[Run, Path] | None:
    """Return the recorded run to resume, changed by files and flags, and its folder.

    `where` is a run folder; or "latest", the run in --out with the newest valid checkpoint; or "auto", which is the
    same but returns None if no run has saved a checkpoint. A recipe may be named only with "auto", because the same
    command also starts the run. Raises CheckpointError if there is no checkpoint, or if all checkpoints are damaged.
    """
    if given.recipe is not None and where != AUTO:
        raise UsageError(
            "a resumed run continues with its own settings: remove --recipe, or start a new run without --resume"
        )
    if where in (LATEST, AUTO):
        out = _out(given)
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
    if not folder.exists():
        raise CheckpointError(f"there is no run folder {folder}.{names_near(folder)} Give a run to resume.")
    if not written.is_file():
        raise CheckpointError(f"{folder} is not a run folder: {written} does not exist")
    from vitrail.training.folder import RunFolder
    from vitrail.training.given import Given

    Given().check_resume(RunFolder.open(folder))
    return given.applied_to(from_yaml(written, Run(), imports=True)), folder


def _out(given: RunArguments) -> Path:
    """Return the folder of the runs. Other flags are not read, because they may need the settings of a recorded run."""
    base = Run() if given.recipe is None else recipe(given.recipe)
    alone = {name: value for name, value in given.settings.items() if name == "out"}
    return Path(replace(given, settings=alone).applied_to(base).out)


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
