"""The `Run` of a command: defaults, changed by a recipe, then by configuration files in order, then by flags."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.config import dotted, from_yaml, lines_of, merge, plain
from vitrail.durations import LONGEST, Epochs, Percent, Steps
from vitrail.errors import CheckpointError, UsageError
from vitrail.files import names_near
from vitrail.import_path import is_own
from vitrail.model.variants import ResNetConfig, variant
from vitrail.ranges import height_width, size_text
from vitrail.recipes.by_data import (
    Facts,
    choose,
    evaluated_in_time,
    facts_of,
    fitted,
    has_absolute_warmup,
    in_time,
    sized,
    whole_patches,
)
from vitrail.recipes.by_network import warn_of_rate
from vitrail.recipes.finetune_by_data import (
    ENLARGED_COST,
    FINETUNE_BY_DATA,
    WEIGHTS,
    Decided,
    FineTuning,
    Pretrained,
    decide,
)
from vitrail.recipes.registry import find, recipe
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.item import DataSet
    from vitrail.data.roles import Splits
    from vitrail.data.settings import Data, Preparation

log = logging.getLogger("vitrail")

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
        from vitrail.data.roles import split_data_set
        from vitrail.data.sources.open import open_data_set

        place = data if is_own(type(data)) else (data.path, data.columns), labels
        if place not in self._found:
            self._found[place] = open_data_set(data, labels=labels)
        if (data, seed, labels) not in self._splits:
            found = self._found[place]
            findings = replace(found.findings, warnings=[*found.findings.warnings])  # splitting adds warnings
            self._splits[data, seed, labels] = split_data_set(
                DataSet(found.splits, findings), data, seed, labels=labels
            )
        return self._splits[data, seed, labels]


class Origin(NamedTuple):
    """Where a setting is given, the last time."""

    place: int
    """Number of the configuration file; flags come after all files."""
    words: str
    """"--model", or "my.yaml:3"."""


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
    notes: dict[str, str] = field(default_factory=dict)
    """Setting -> why `applied_to` changed the recipe's value, which nobody asked for."""

    @property
    def files(self) -> list[str]:
        """The configuration files."""
        return [str(file) for file in ([self.config] if isinstance(self.config, str | Path) else self.config)]

    def facts(self, run: Run) -> Facts:
        """Return the facts about the training images of `run`. Raises DataError and UsageError."""
        return facts_of(self.data.of(run).train)

    @cached_property
    def listed(self) -> list[dict[str, int]]:
        """The settings in each file, by their dotted names -> their lines. Raises UsageError."""
        return [lines_of(Path(file)) for file in self.files]

    @cached_property
    def asked(self) -> dict[str, Origin]:
        """The settings that files and flags give, by their dotted names. Raises UsageError."""
        found = {
            name: Origin(place, f"{file}:{line}")
            for place, (file, lines) in enumerate(zip(self.files, self.listed, strict=True))
            for name, line in lines.items()
        }
        short = {"duration": self.epochs, "optim.lr": self.lr, "weights": self.weights, "data.path": self.path}
        flags = {**dict(dotted(plain(self.settings))), **{name: at for name, at in short.items() if at is not None}}
        special = {"weights": "--from", "duration": "--duration" if self.epochs is None else "--epochs"}
        for name in flags:
            found[name] = Origin(len(self.files), special.get(name, f"--{name.replace('_', '-')}"))
        return found

    @property
    def origins(self) -> dict[str, str]:
        """The settings that files and flags give, by their dotted names -> where: "--batch-size"."""
        return {name: origin.words for name, origin in self.asked.items()}

    def applied_to(self, base: Run, *, recorded: bool = False) -> Run:
        """Return `base` with the values of the configuration files and then of the flags. Raises UsageError.

        Settings of a recipe that belong to another network or optimiser than the one asked for fall away, and `notes`
        say so. With a time limit, this is the length of the run, unless the user gives one. recorded: `base` is a run
        to resume, whose settings belong to no recipe.
        """
        run = base
        for file in self.files:
            run = from_yaml(Path(file), run)
        if self.epochs is not None and "duration" in self.settings:
            raise UsageError("--epochs and --duration both set the length of the run: give one of them")
        optim = self.settings.get("optim")
        if self.lr is not None and isinstance(optim, Mapping) and optim.get("lr", self.lr) != self.lr:
            raise UsageError(f"--lr is {self.lr:g} and --optim.lr is {optim['lr']}: give one of them")
        run = merge(run, self.settings, imports=True)
        if self.epochs is not None:
            run = replace(run, duration=Epochs(self.epochs))
        if run.time_limit is not None and not recorded and "duration" not in self.asked:
            run = _without_length(run, base)
        if self.lr is not None:
            run = merge(run, {"optim": {"lr": self.lr}})
        if self.weights is not None:
            run = merge(run, {"weights": self.weights})
        if self.path is not None:
            run = merge(run, {"data": {"path": str(self.path)}})
        self.notes.clear()
        if not recorded:
            run = self._own_rate(base, self._named_network(base, run))
        return self._one_size(run, recorded)

    def in_words(self, why: str) -> str:
        """Return `why`, with a line for each of the `notes`."""
        return "\n".join([why, *(f"  {name}: {note}" for name, note in self.notes.items())])

    def _named_network(self, base: Run, run: Run) -> Run:
        """Return `run` with the network that is named, and nothing that `base` changes in its own one."""
        named, model = self.asked.get("model"), run.model
        if run.weights is not None:
            if named and model is not None and not self._records_weights(named.place):
                raise UsageError(
                    f"{named.words} names the network {model}, but the network is that of the weights {run.weights} "
                    f"({self.asked['weights'].words if 'weights' in self.asked else 'of the recipe'}). Remove one of "
                    "them; `vitrail train DIR --model NAME` trains from scratch"
                )
            return replace(run, model=None)
        if named is None or model is None:
            return replace(run, model=base.model if model is None else model)
        plain_network, own = variant(model), dict[str, Any]()
        for name, value in run.vit.changes().items():
            given = self._asked_within(f"vit.{name}")
            if given is None:
                own[name] = value
            elif given.place < named.place and "model" in self.listed[given.place]:
                flag = f"vit.{name}".replace("_", "-")
                raise UsageError(
                    f"{given.words} sets vit.{name} {value} for another network than {model}, which {named.words} "
                    f"names. Give --{flag} if {model} is to have it, or remove it from the file"
                )
        lost = [f"{name} {value}" for name, value in own.items() if value != getattr(plain_network, name, None)]
        if model != base.model or lost:
            theirs = f", not {base.model}, the recipe's own" if base.model not in (None, model) else ""
            without = f"; the recipe's vit settings are not used: {', '.join(lost)}" if lost else ""
            asked = ", ".join(f"{name} {value}" for name, value in run.vit.changes().items() if name not in own)
            network = f"{model} with {asked}" if asked else f"exactly {model}"
            self.notes["model"] = f"{network}, as asked{theirs}{without}"
        return replace(run, vit=replace(run.vit, **dict.fromkeys(own)))

    def _asked_within(self, name: str) -> Origin | None:
        """Return where a setting is given; a class of the user's own is given as `name.class` and `name.FIELD`."""
        found = [at for asked, at in self.asked.items() if asked == name or asked.startswith(f"{name}.")]
        return max(found, key=lambda at: at.place, default=None)

    def _records_weights(self, place: int) -> bool:
        """Return whether a file is the config.yaml of a fine-tuning, which once listed a network that was not used."""
        everything = {"weights", "vit.width", "vit.patch", "seed"}
        if place >= len(self.files) or not everything <= self.listed[place].keys():
            return False
        return from_yaml(Path(self.files[place]), Run()).weights is not None

    def _own_rate(self, base: Run, run: Run) -> Run:
        """Return `run` with the optimiser's own rate and decay, unless they are given or those of `base` are its.

        Muon trains no ResNet: if the recipe has it and no optimiser is named, a ResNet gets AdamW.
        """
        scratch, recipes_own = run.weights is None, "optim.name" not in self.asked
        if scratch and recipes_own and run.optim.name == "muon" and isinstance(variant(run.network), ResNetConfig):
            run = replace(run, optim=replace(run.optim, name="adamw"))
        if run.optim.name == base.optim.name or is_own(type(run.optim)):
            return run
        given = {name.removeprefix("optim.") for name in self.asked if name.startswith("optim.")}
        optim = run.optim.with_own_rate(given)
        if optim != run.optim:
            self.notes["optim"] = (
                f"{optim.name} with learning rate {optim.lr:g} and weight decay {optim.weight_decay:g}: the recipe's "
                f"are for {base.optim.name}"
            )
        return replace(run, optim=optim)

    def _one_size(self, run: Run, recorded: bool) -> Run:
        """Return `run` with the size of the input that is asked for, in both settings that have it.

        A recipe's size becomes the next multiple of the patch of another network.
        """
        side, prepared = (self.asked.get(name) for name in ("image_size", "preprocess.image_size"))
        both = run.preprocess.image_size if run.preprocess is not None else None
        if prepared and both and (side is None or side.place < prepared.place):
            return replace(run, image_size=both)
        if not (side or prepared or recorded or run.weights is not None or run.image_size is None):
            whole = whole_patches(run.image_size, run)
            if whole != run.image_size:
                self.notes["image_size"] = (
                    f"{size_text(whole)} px, not {size_text(run.image_size)}: whole patches of {run.network}"
                )
                run = replace(run, image_size=whole)
        if run.preprocess is None or both is None or run.image_size is None:
            return run
        if prepared and (side is None or side.place <= prepared.place):  # a contradiction is training's to tell
            return run
        return replace(run, preprocess=replace(run.preprocess, image_size=height_width(run.image_size)))


def _without_length(run: Run, base: Run) -> Run:
    """Return `run` without a duration. The warmup of `base` keeps its share of the length that it was made for."""
    warmup, length = run.schedule.warmup, base.duration
    if length is None or type(warmup) is not type(length) or run.schedule != base.schedule:
        return replace(run, duration=None)
    share = Percent(min(100 * warmup.value / length.value, 100.0))
    return replace(run, duration=None, schedule=replace(run.schedule, warmup=share))


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
        return run, given.in_words(f"configuration {', '.join(given.files)}")
    facts = given.facts(run)
    name, why = choose(facts, run.objective.kind)
    run, why = given.applied_to(sized(recipe(name), facts)), f"recipe {name}, because of {why}"
    changes: list[str] = []
    if (seen := _in_time(run, given.data.of(run))) is not None:
        sized_here = {"image_size"} if "preprocess.image_size" in given.asked else set()
        full = run.image_size
        run, changes = in_time(run, facts.images, seen, given.asked.keys() | sized_here)
        before, after = (math.prod(height_width(size or 1)) for size in (full, run.image_size))
        run, change = _evaluated(given, run, round(seen * before / after))
        changes += [change] if change else []
    for change in changes:
        if change.startswith("image_size"):  # it can cost much accuracy, so --quiet does not hide it
            log.warning("warning: %s", change)
    rest = [change for change in changes if not change.startswith("image_size")]
    return run, "\n".join([given.in_words(why), *(f"  {change}" for change in rest)])


def finetuning_run(given: RunArguments) -> tuple[Run, str]:
    """Return the run for fine-tuning, and its origin in words: a line for each decision.

    Without a recipe, the images, the network and the time decide (`vitrail.recipes.finetune_by_data`). Raises
    UsageError, DataError and WeightsError.
    """
    import numpy as np

    given = with_weights(given)
    if given.recipe not in (None, FINETUNE_BY_DATA.name):
        return from_recipe(given)
    base = replace(recipe(FINETUNE_BY_DATA.name), duration=UNSET, batch_size=None)
    asked = given.applied_to(base)
    if not (network := _network(asked)).blocks:
        asked = given.applied_to(replace(base, optim=replace(base.optim, layer_decay=None)))
    splits, facts = given.data.of(asked), given.facts(asked)
    single = isinstance(splits.train.labels, np.ndarray) and asked.supervised and not asked.objective.numbers
    framed = _framing(asked, splits) if single and asked.preprocess is None else None
    timed = _in_time(asked if framed is None else replace(asked, preprocess=framed[0]), splits)
    seen = min((count for count in (timed, _given_length(asked, facts.images)) if count is not None), default=None)
    linear = single and not asked.keep_head and not _own_head(asked)
    task = FineTuning(facts, len(splits.class_names), network, seen, timed, linear)
    decided = decide(task)
    if framed is not None:
        decided = Decided(replace(decided.run, preprocess=framed[0]), {**decided.why, "preprocess": framed[1]})
    run = given.applied_to(decided.run if given.recipe else replace(decided.run, name=RUN_NAME))
    kind = "targets" if run.objective.numbers else "classes"
    about = f"{facts.images:,} images of {task.classes} {kind}, of about {facts.side} pixels"
    length = []
    if run.duration is None and timed is not None:
        passes = timed / facts.images / (ENLARGED_COST if run.image_size == decided.run.image_size is not None else 1)
        length = [f"  duration: that of the time limit, about {passes:.2g} passes over the images"]
    if timed is not None:
        run, change = _evaluated(given, run, min(timed, seen or timed))
        length += [f"  {change}"] if change else []
    why = given.in_words(f"recipe {FINETUNE_BY_DATA.name} for {about}")
    return run, "\n".join([why, *length, *_reasons(decided, run)])


def _evaluated(given: RunArguments, run: Run, seen: int) -> tuple[Run, str]:
    """Return `run` with as many evaluations as its time limit allows, and the change in words."""
    validation = given.data.of(run).validation
    run, why = evaluated_in_time(run, seen, 0 if validation is None else len(validation), given.asked)
    return run, f"evaluate_every: {why}" if why else ""


def _reasons(decided: Decided, run: Run) -> list[str]:
    """Return a line for each decision that files and flags have not replaced in `run`."""
    return [f"  {name}: {why}" for name, why in decided.why.items() if getattr(run, name) == getattr(decided.run, name)]


def _network(run: Run) -> Pretrained:
    """Return the facts about the pretrained network of `run`. Raises WeightsError."""
    from vitrail.model.variants import ResNetConfig
    from vitrail.weights.load import read_card

    assert run.weights is not None
    card = read_card(run.weights)
    config, side = card.config, min(height_width(run.image_size or card.config.image_size))
    if isinstance(config, ResNetConfig):
        return Pretrained(config.width * 2 ** (len(config.units) + 1), 0, side, config.classes > 0)
    return Pretrained(config.width, config.depth, side, config.classes > 0)


def _own_head(run: Run) -> bool:
    """Return whether the classifier of `run` is of the user's own: its own one, or of the kind in its weights."""
    from vitrail.weights.load import read_card

    assert run.weights is not None
    return run.vit.head is not None or getattr(read_card(run.weights).config, "head", None) is not None


def _given_length(run: Run, images: int) -> int | None:
    """Return the number of images in the length that the user gave; None if there is none, or steps without a batch."""
    if run.duration in (UNSET, None) or (isinstance(run.duration, Steps) and run.batch_size is None):
        return None
    batch = run.batch_size or 1
    return max(run.duration.steps(per_epoch=images / batch, batch_size=batch) * batch, 1)


def _framing(run: Run, splits: Splits) -> tuple[Preparation, str] | None:
    """Return how images are best prepared, and the reason; None where nothing is tried.

    Processes that torchrun started do not try it, because they must all decide the same.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return None
    from vitrail.transfer.framing import framing

    return framing(run, splits)


def _in_time(run: Run, splits: Splits) -> int | None:
    """Return the number of images of full size that `run` sees in its time limit; None without a limit.

    The speed is measured, which takes seconds. Processes that torchrun started do not measure it, because they must all
    decide the same.
    """
    if run.time_limit is None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return None
    from vitrail.transfer.timing import seen_in_time

    return seen_in_time(replace(run, duration=Epochs(1)), splits, MEASURED)


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
        return run, given.in_words(why)
    facts = given.facts(run)
    if rule is not None:
        base = replace(rule(facts.images, facts.side), name=base.name)
        run = given.applied_to(base)
        why += f" for {facts.images:,} images of about {facts.side} pixels"
    run, change = (run, "") if "schedule.warmup" in given.asked else fitted(run, facts)
    return run, given.in_words(f"{why}; {change}" if change else why)


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
    before = from_yaml(written, Run())
    run = given.applied_to(before, recorded=True)
    fixed = ("name",) if where in (LATEST, AUTO) else ("name", "out")
    for name in fixed:
        if getattr(run, name) != getattr(before, name):
            raise UsageError(
                f"{given.asked[name].words} is {getattr(run, name)}, but the run to resume is {folder} and stays "
                "there. Remove it, or start a new run without --resume"
            )
    return run, folder


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
