"""What a user asks for: `Asked` is a command, a call or a script's arguments, and knows where each setting stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.config import dotted, from_yaml, lines_of, merge, plain
from vitrail.durations import Epochs, Percent
from vitrail.errors import UsageError
from vitrail.import_path import is_own
from vitrail.model.variants import ResNetConfig, variant
from vitrail.ranges import height_width, size_text
from vitrail.recipes.by_data import whole_patches
from vitrail.recipes.finetune_by_data import FINETUNE_BY_DATA, WEIGHTS
from vitrail.recipes.registry import find_recipe, recipe
from vitrail.training.run import COMBINABLE, Run

RECIPE_OF = {"finetune": FINETUNE_BY_DATA.name, "sweep": "finetune"}
"""Verb -> the recipe that it starts from if none is named."""


class Place(NamedTuple):
    """Where a setting is given, the last time."""

    place: int
    """Number of the configuration file; flags come after all files."""
    words: str
    """"--model", or "my.yaml:3"."""


@dataclass(frozen=True)
class Asked:
    """The arguments by which a user describes a run, in `train`, `finetune` and `sweep`."""

    path: str | Path | None = None
    recipe: str | None = None
    config: Sequence[str | Path] | str | Path = ()
    """Configuration files, or a single one."""
    epochs: float | None = None
    lr: float | None = None
    weights: str | Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The configuration files."""
        return [str(file) for file in ([self.config] if isinstance(self.config, str | Path) else self.config)]

    @cached_property
    def listed(self) -> list[dict[str, int]]:
        """The settings in each file, by their dotted names -> their lines. Raises UsageError."""
        return [lines_of(Path(file)) for file in self.files]

    @cached_property
    def places(self) -> dict[str, Place]:
        """The settings that files and flags give, by their dotted names. Raises UsageError."""
        found = {
            name: Place(place, f"{file}:{line}")
            for place, (file, lines) in enumerate(zip(self.files, self.listed, strict=True))
            for name, line in lines.items()
        }
        special = {"weights": "--from", "duration": "--duration" if self.epochs is None else "--epochs"}
        for values in self._flags:
            for name, _ in dotted(plain(values)):
                found[name] = Place(len(self.files), special.get(name, f"--{name.replace('_', '-')}"))
        return found

    @property
    def _flags(self) -> list[Mapping[str, Any]]:
        """The flags as settings, in the order in which they are applied."""
        lr, epochs = self.lr, None if self.epochs is None else Epochs(self.epochs)
        path = None if self.path is None else {"path": str(self.path)}
        short = {"duration": epochs, "optim": lr and {"lr": lr}, "weights": self.weights, "data": path}
        return [self.settings, *({name: value} for name, value in short.items() if value is not None)]

    @property
    def origins(self) -> dict[str, str]:
        """The settings that files and flags give, by their dotted names -> where: "--batch-size"."""
        return {name: origin.words for name, origin in self.places.items()}

    def applied_to(self, base: Run, *, recorded: bool = False) -> tuple[Run, dict[str, str]]:
        """Return `base` with the values of the configuration files and then of the flags. Raises UsageError.

        Settings of a recipe that belong to another network or optimiser than the one asked for fall away, and the
        second value says so: setting -> why it is not the recipe's, though nobody asked for that. With a time limit,
        this is the length of the run, unless the user gives one. recorded: `base` is a run to resume, whose settings
        belong to no recipe.
        """
        run = base
        for file in self.files:
            run = from_yaml(Path(file), run)
        if self.epochs is not None and "duration" in self.settings:
            raise UsageError("--epochs and --duration both set the length of the run: give one of them")
        optim = self.settings.get("optim")
        if self.lr is not None and isinstance(optim, Mapping) and optim.get("lr", self.lr) != self.lr:
            raise UsageError(f"--lr is {self.lr:g} and --optim.lr is {optim['lr']}: give one of them")
        for values in self._flags:
            run = merge(run, values, imports=True)
        if recorded:
            return self._one_size(run, recorded=True)
        if run.time_limit is not None and "duration" not in self.places:
            run = _without_length(run, base)
        run, of_network = self._named_network(base, run)
        run, of_rate = self._own_rate(base, run)
        run, of_size = self._one_size(run)
        run, of_shape = self._any_shape(run)
        run, of_metric = self._mean_of_classes(run)
        return run, {**of_network, **of_rate, **of_size, **of_shape, **of_metric}

    def _named_network(self, base: Run, run: Run) -> tuple[Run, dict[str, str]]:
        """Return `run` with the network that is named, and nothing that `base` changes in its own one; and why."""
        named, model = self.places.get("model"), run.model
        if run.weights is not None:
            if named and model is not None and not self._records_weights(named.place):
                raise UsageError(
                    f"{named.words} names the network {model}, but the network is that of the weights {run.weights} "
                    f"({self.places['weights'].words if 'weights' in self.places else 'of the recipe'}). Remove one of "
                    "them; `vitrail train DIR --model NAME` trains from scratch"
                )
            fixed = [name for name in run.vit.changes() if name not in COMBINABLE]
            unused = [name for name in fixed if self._asked_within(f"vit.{name}") is None]
            recipes = ", ".join(f"{name} {getattr(run.vit, name)}" for name in unused)
            why = {"vit": f"that of {run.weights}; the recipe's {recipes} are not used"} if unused else {}
            return replace(run, model=None, vit=replace(run.vit, **dict.fromkeys(unused))), why
        if named is None or model is None:
            return replace(run, model=base.model if model is None else model), {}
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
        run = replace(run, vit=replace(run.vit, **dict.fromkeys(own)))
        if model == base.model and not lost:
            return run, {}
        theirs = f", not {base.model}, the recipe's own" if base.model not in (None, model) else ""
        without = f"; the recipe's vit settings are not used: {', '.join(lost)}" if lost else ""
        asked = ", ".join(f"{name} {value}" for name, value in run.vit.changes().items())
        network = f"{model} with {asked}" if asked else f"exactly {model}"
        return run, {"model": f"{network}, as asked{theirs}{without}"}

    def _asked_within(self, name: str) -> Place | None:
        """Return where a setting is given; a class of the user's own is given as `name.class` and `name.FIELD`."""
        found = [at for asked, at in self.places.items() if asked == name or asked.startswith(f"{name}.")]
        return max(found, key=lambda at: at.place, default=None)

    def _records_weights(self, place: int) -> bool:
        """Return whether a file is the config.yaml of a fine-tuning, which once listed a network that was not used."""
        everything = {"weights", "vit.width", "vit.patch", "seed"}
        if place >= len(self.files) or not everything <= self.listed[place].keys():
            return False
        return from_yaml(Path(self.files[place]), Run()).weights is not None

    def _own_rate(self, base: Run, run: Run) -> tuple[Run, dict[str, str]]:
        """Return `run` with the optimiser's own rate and decay, unless they are given or those of `base` are its; why.

        Muon trains no ResNet: if the recipe has it and no optimiser is named, a ResNet gets AdamW.
        """
        scratch, recipes_own = run.weights is None, "optim.name" not in self.places
        if scratch and recipes_own and run.optim.name == "muon" and isinstance(variant(run.network), ResNetConfig):
            run = replace(run, optim=replace(run.optim, name="adamw"))
        if run.optim.name == base.optim.name or is_own(type(run.optim)):
            return run, {}
        given = {name.removeprefix("optim.") for name in self.places if name.startswith("optim.")}
        optim = run.optim.with_own_rate(given)
        rates = f"{optim.name} with learning rate {optim.lr:g} and weight decay {optim.weight_decay:g}"
        why = {"optim": f"{rates}: the recipe's are for {base.optim.name}"} if optim != run.optim else {}
        return replace(run, optim=optim), why

    def _any_shape(self, run: Run) -> tuple[Run, dict[str, str]]:
        """Return `run` without what a recipe sets for images of one shape, if they keep their own, and why."""
        if run.preprocess is None or run.preprocess.resize != "native":
            return run, {}
        why, reasons = "images keep their shapes, and it needs those of one", dict[str, str]()
        of_one: dict[str, Any] = {"mixup": 0.0, "cutmix": 0.0}
        of_one |= {"crop": "inception"} if run.augment.crop == "random" else {}
        changes = {name: value for name, value in of_one.items() if f"augment.{name}" not in self.places}
        augment, grows = replace(run.augment, **changes), run.progressive
        if "progressive.start" not in self.places:
            grows = replace(grows, start=1.0)
        if augment != run.augment:
            reasons["augment"] = f"without the recipe's mixing and crops of one size: {why}"
        if grows != run.progressive:
            reasons["progressive"] = f"without the recipe's growth of images: {why}"
        return replace(run, augment=augment, progressive=grows), reasons

    def _mean_of_classes(self, run: Run) -> tuple[Run, dict[str, str]]:
        """Return `run` with the metric for added classes, unless one is given, and why."""
        if run.classes != ("add",) or self._asked_within("metric") is not None:
            return run, {}
        of = "of the classes: how many validation images show old and new ones says nothing about later images"
        metric = replace(Run().metric, name="balanced_accuracy")
        return replace(run, metric=metric), {"metric": f"{metric.name}, the mean {of}"}

    def _one_size(self, run: Run, *, recorded: bool = False) -> tuple[Run, dict[str, str]]:
        """Return `run` with the size of the input that is asked for, in both settings that have it, and why.

        A recipe's size becomes the next multiple of the patch of another network.
        """
        side, prepared = (self.places.get(name) for name in ("image_size", "preprocess.image_size"))
        both = run.preprocess.image_size if run.preprocess is not None else None
        if prepared and both and (side is None or side.place < prepared.place):
            return replace(run, image_size=both), {}
        why: dict[str, str] = {}
        if not (side or prepared or recorded or run.weights is not None or run.image_size is None):
            whole = whole_patches(run.image_size, run)
            if whole != run.image_size:
                why["image_size"] = (
                    f"{size_text(whole)} px, not {size_text(run.image_size)}: whole patches of {run.network}"
                )
                run = replace(run, image_size=whole)
        if run.preprocess is None or both is None or run.image_size is None:
            return run, why
        if prepared and (side is None or side.place <= prepared.place):  # a contradiction is training's to tell
            return run, why
        return replace(run, preprocess=replace(run.preprocess, image_size=height_width(run.image_size))), why


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
    return Asked(config=config).applied_to(recipe(name) if name else Run())[0]


def require_images(asked: Asked) -> None:
    """Raise UsageError if the command does not name the images to train on."""
    brings_data = asked.recipe is not None and find_recipe(asked.recipe).brings_data
    data = {name: value for name, value in asked.settings.items() if name == "data"}
    own = bool(data) and is_own(type(merge(Run(), data, imports=True).data))
    if asked.path is None and not brings_data and not asked.files and not own:
        raise UsageError(
            "no images to train on: name their folder, vitrail train DIR (or try vitrail demo, which needs none)"
        )


def with_weights(asked: Asked) -> Asked:
    """Return `asked` with the shipped weights if neither flags nor files name others.

    Raises UsageError if the command does not name the images to train on.
    """
    if asked.path is None and not asked.files:
        raise UsageError("no images are given: vitrail finetune DIR")
    if asked.weights is not None or asked.applied_to(Run())[0].weights is not None:
        return asked
    return replace(asked, weights=WEIGHTS)
