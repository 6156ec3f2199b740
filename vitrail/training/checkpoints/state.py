"""The state of a run at one moment: what a checkpoint stores, and what a resumed run must have in common with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import world
from vitrail.config import plain
from vitrail.errors import CheckpointError
from vitrail.evaluation.metric import headline, in_words, interval, on_images
from vitrail.model.variants import ForeignConfig, ResNetConfig, flat
from vitrail.objective.base import Objective
from vitrail.training.guard import require_finite
from vitrail.training.optim.average import Averager
from vitrail.training.run import LORA, Run
from vitrail.training.validation import floor
from vitrail.weights.base import BaseWeights
from vitrail.words import one_line

IDENTITY = ("objective", "augment", "schedule", "average", "progressive", "optim", "batch_size", "seed", "tune", *LORA,
            "distill")  # fmt: skip
"""Settings that a resumed run must share with the run it continues. All others may change: duration, time_limit,
early_stop, how often to evaluate and save, and everything about the machine (accumulate, precision,
workers, cache, compile, activation_checkpointing, device). The result is the same up to rounding."""
SPLITS = ("train", "validation", "holdout", "fold", "subset", "together", "sampler")
"""Settings of the data that a resumed run must share with the run it continues."""
OPTIMIZER_STATE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "first", "second")
"""Names of the tensors that AdamW, SGD, LAMB and Muon store for each parameter."""
BASE_FACTS = ("source", "path", "sha256")
"""What a checkpoint says about the base model it needs; run.json says how to find it again."""
GAP = 0.05
"""By how much the interval of the accuracy on the test images must lie below that on the validation images before the
two are said to be different kinds of images. The validation images also choose the step, which gains little."""


@dataclass
class RunStatus:
    """How far a run has come, without its tensors."""

    step: int = 0
    """Optimiser steps done."""
    elapsed: float = 0.0
    """Seconds of training, with the time before a resume."""
    evaluated: int = 0
    """Step of the newest evaluation."""
    best: dict[str, float] = field(default_factory=dict)
    """Step and validation metrics of the best model; empty before the first evaluation."""
    stale: int = 0
    """Evaluations since validation top-1 last improved."""
    skipped: int = 0
    """Steps that were skipped because their update was not finite."""
    ended: str = ""
    """Why the run is over; "" while it is running."""
    ended_by: dict[str, Any] = field(default_factory=dict)
    """The limits that ended the run. With other limits it continues."""


@one_line
@dataclass(frozen=True)
class Result:
    """The result of `fit`, which run.json stores."""

    folder: Path
    steps: int
    epochs: float
    seconds: float
    """Of training, with the time before a resume."""
    ended: str
    """Why the run ended: "all steps done", "time limit" or "early stop"."""
    best: dict[str, float]
    """Step and validation metrics of the best model: as in `Classification.metrics` or `LabelScores.metrics`, or loss
    if there are no labels."""
    test: dict[str, float] | None = None
    """Metrics of the best model on the test images, measured once; None without test images."""
    message: str = ""
    """For the user, in one or two sentences."""
    skipped: int = 0
    """Number of steps that were skipped because their update was not finite."""
    floors: dict[str, dict[str, float]] = field(default_factory=dict)
    """What a classifier must beat on the same images as the headline (`vitrail.training.validation.floor`)."""
    no_floor: str = ""
    """Why there is no linear classifier among them."""
    lost: dict[str, str] = field(default_factory=dict)
    """What could not be written into the run folder -> the reason."""

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if something could not be written."""
        return int(bool(self.lost))

    def without(self, lost: Mapping[str, str]) -> Result:
        """Return the result of a run that could not write `lost`."""
        return replace(self, lost=dict(sorted({**self.lost, **lost}.items())))

    @property
    def verdict(self) -> str:
        """The headline on the test images, else on the validation images, beside the floors; "" without floors."""
        numbers = self.test or self.best
        if not self.floors or not (name := headline(numbers)):
            return ""
        where = "test images" if self.test else "validation images"
        skewed = any("balanced_accuracy" in one for one in self.floors.values())
        balanced = f", balanced accuracy {numbers['balanced_accuracy']:.2%}" if skewed else ""
        failed = f": this network {self.shortfall}" if self.shortfall else ""
        text = f"{in_words(name, numbers[name])}{balanced}{on_images(name, numbers, where)}"
        skipped = f" (without a linear classifier: {self.no_floor})" if self.no_floor else ""
        return f"{text}; {floor.in_words(self.floors)}{skipped}{failed}"

    @property
    def shortfall(self) -> str:
        """What it means that the network does not exceed a floor: "has not learned enough"; "" if it exceeds all."""
        return floor.shortfall(self.test or self.best, self.floors)

    @property
    def gap(self) -> str:
        """A sentence if much less of the test images is right than of the validation images, else ""."""
        test, best = self.test or {}, self.best
        if not {"top1", "count"} <= test.keys() & best.keys() or interval(test)[1] > interval(best)[0] - GAP:
            return ""
        return (
            f"The test images differ from the training images: of {best['count']:,.0f} validation images "
            f"{best['top1']:.2%} are right. `vitrail evaluate {self.folder}` shows which classes of the test images "
            "fail."
        )

    @property
    def summary(self) -> str:
        """The message, and what could not be written, with the first reason."""
        if not self.lost:
            return self.message
        reason = next(iter(self.lost.values()))
        return f"{self.message}, except what could not be written: {', '.join(self.lost)} ({reason})"

    @classmethod
    def of(
        cls,
        status: RunStatus,
        folder: Path,
        per_epoch: int,
        test: dict[str, float] | None = None,
        floors: floor.Floors | None = None,
    ) -> Result:
        """Return the result of a run with `status`; `per_epoch` is the number of steps in an epoch."""
        best, reached = status.best, ""
        shown = {} if test and headline(test) else best  # the number of the test images has a line of its own
        if name := headline(shown):
            reached = f", validation {in_words(name, best[name])}{on_images(name, best)}"
        elif "loss" in shown:
            reached = f", validation loss {best['loss']:.4f}{on_images('loss', best)}"
        if status.skipped:
            reached += f"; {status.skipped} updates were skipped because they were not finite"
        return cls(
            folder,
            steps=status.step,
            epochs=status.step / per_epoch,
            seconds=round(status.elapsed, 1),
            ended=status.ended,
            best=best,
            test=test,
            floors=floors.found if floors else {},
            no_floor=floors.skipped if floors else "",
            message=f"{status.ended} after {status.step} steps{reached}; everything is in {folder}",
            skipped=status.skipped,
        )


@dataclass
class TrainingState:
    """The parts of a run that change during training."""

    objective: Objective
    optimizer: torch.optim.Optimizer
    average: Averager
    identity: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    """The default values of settings, for a checkpoint that was written before a setting existed (`defaults`)."""
    status: RunStatus = field(default_factory=RunStatus)
    base: BaseWeights | None = None
    """The base model with the frozen tensors, which no checkpoint holds, if only a part of the network is trained."""

    def mark(self, ended: str, run: Run) -> None:
        """Record why the run is over, and the limits in `run` that ended it; "" while it is running."""
        self.status.ended = ended
        self.status.ended_by = _limits(run) if ended else {}

    def is_over(self, run: Run) -> bool:
        """Return whether the run has ended and the limits in `run` are still those that ended it."""
        return bool(self.status.ended) and self.status.ended_by == _limits(run)

    @property
    def sharded(self) -> bool:
        """Whether each process holds only its part of the tensors, so that all of them save together."""
        return any(map(world.is_sharded, self.objective.parameters()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and JSON values. Raises TrainingError for non-finite weights."""
        require_finite(self.objective)
        shared = self._base_tensors()
        return {
            "model": {name: value for name, value in self.objective.state_dict().items() if name not in shared},
            "base": None if self.base is None else {name: getattr(self.base, name) for name in BASE_FACTS},
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "standing": asdict(self.status),
            "identity": self.identity,
        }

    def sharded_tensors(self) -> dict[str, Tensor]:
        """Return name in a checkpoint -> tensor sharded like the one saved under that name; {} if nothing is sharded.

        The optimiser has no state before its first step, so its entries are the parameters, which are sharded alike.
        """
        found: dict[str, Any] = {f"model/{name}": tensor for name, tensor in self.objective.state_dict().items()}
        found |= {f"average/mean/{name}": tensor for name, tensor in self.average.state_dict()["mean"].items()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            found |= {f"optimizer/state/{number}/{name}": parameter for name in OPTIMIZER_STATE}
        return {name: tensor for name, tensor in found.items() if world.is_sharded(tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises CheckpointError with the differences if it is from another run."""
        stored = completed(of_foreign(state["identity"], self.identity), self.defaults)
        if differences := differing(stored, self.identity):
            raise CheckpointError(
                "the checkpoint belongs to another run:\n  "
                + "\n  ".join(differences)
                + "\nResume with the data and settings of that run, or start a new run from its weights (--from)."
            )
        self._load_model(state["model"], state.get("base"))
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
        self.status = RunStatus(**state["standing"])

    def _base_tensors(self) -> set[str]:
        """Return the names of the objective's tensors that are in the base model."""
        return set() if self.base is None else {f"model.{name}" for name in self.base.shared}

    def _load_model(self, tensors: dict[str, Any], recorded: dict[str, Any] | None) -> None:
        """Load a checkpoint's tensors, after checking that the base model is the one with the `recorded` facts."""
        if recorded is not None and self.base is not None and recorded["sha256"] != self.base.sha256:
            raise CheckpointError(
                f"the checkpoint holds only the tuned part of a model. Its base is {recorded['source']} "
                f"({recorded['path']}), but the weights in {self.base.path} have another checksum. Restore the "
                "base, or pass its new place with --from."
            )
        if tensors.keys() != self.objective.state_dict().keys() - self._base_tensors():
            raise CheckpointError("the checkpoint belongs to another run: its tensors are not those of this network")
        self.objective.load_state_dict(tensors, strict=False)


def _limits(run: Run) -> dict[str, Any]:
    return {name: plain(getattr(run, name)) for name in ("duration", "time_limit", "early_stop")}


def identity(run: Run, config: Any, class_names: list[str], fingerprint: str) -> dict[str, Any]:
    """Return what identifies a run, as JSON values: data, classes, network and the settings that shape the gradient."""
    return {
        "data": fingerprint,
        "splits": {name: getattr(run.data, name) for name in SPLITS},
        "class_names": class_names,
        "model": {"kind": type(config).__name__, **plain(flat(config))},
        **{name: plain(getattr(run, name)) for name in IDENTITY},
    }


def of_foreign(stored: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the stored identity with only what `identity` knows of a network that is not one of vitrail's.

    Earlier versions stored the sizes of a ResNet for it.
    """
    kind = ForeignConfig.__name__
    if identity["model"]["kind"] != kind or stored["model"].get("kind") != ResNetConfig.__name__:
        return stored
    known = {name: value for name, value in stored["model"].items() if name in identity["model"]}
    return {**stored, "model": {**known, "kind": kind}}


def defaults(run: Run, config: Any) -> dict[str, Any]:
    """Return the default values of the settings in `identity`, as JSON values, by section."""
    sections = {"splits": run.data, "model": config} | {name: getattr(run, name) for name in IDENTITY}
    values = {
        name: {
            item.name: plain(item.default if item.default_factory is MISSING else item.default_factory())
            for item in fields(value)
            if item.default is not MISSING or item.default_factory is not MISSING
            if name != "splits" or item.name in SPLITS
        }
        for name, value in sections.items()
        if is_dataclass(value)
    }
    values["model"] |= values["model"].pop("origin", {})  # flat, as in `identity`
    return values


def completed(stored: Any, defaults: Any) -> Any:
    """Return nested values with the defaults of settings that did not exist when they were stored."""
    if not (isinstance(stored, dict) and isinstance(defaults, dict)):
        return stored
    filled = {name: completed(value, defaults.get(name)) for name, value in stored.items()}
    return {**{name: value for name, value in defaults.items() if name not in stored}, **filled}


def differing(there: Any, here: Any, where: str = "") -> list[str]:
    """Return one line for each value that differs between two nested values, the stored one first."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted({*there, *here})
        pairs = [(f"{where}.{key}" if where else str(key), there.get(key), here.get(key)) for key in keys]
    elif isinstance(there, list | tuple) and isinstance(here, list | tuple):
        if len(there) != len(here):
            return [f"{where}: {len(there)} entries there, {len(here)} here"]
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(there, here, strict=True))]
    else:
        return [] if there == here else [f"{where}: {there!r} there, {here!r} here"]
    return [line for place, a, b in pairs for line in differing(a, b, place)]
