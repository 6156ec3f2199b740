"""Everything a run is at one moment: what a checkpoint keeps, and what a resumed run must agree with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import world
from vitrail.config import plain
from vitrail.errors import CheckpointError
from vitrail.objective.base import Objective
from vitrail.training.guard import require_finite
from vitrail.training.optim.average import Averager
from vitrail.training.run import Run
from vitrail.weights.base import Base

IDENTITY = ("objective", "augment", "schedule", "average", "progressive", "optim", "batch_size", "seed", "tune")
"""Settings that a resumed run must share with the one it continues. The rest may change: duration, time_limit,
early_stop, how often to evaluate and save, and all about the machine (accumulate, precision, workers, cache,
compile, activation_checkpointing, wide_branches, device); the bits are then the same as far as the arithmetic is."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "first", "second")
"""What optimisers keep of each parameter, by the names of AdamW, SGD and LAMB."""
NOTED = ("source", "path", "sha256")
"""What a checkpoint says of the base it needs; how to find it again is in run.json."""


@dataclass
class RunStatus:
    """Where a run stands, apart from tensors."""

    step: int = 0
    """Optimiser steps done."""
    elapsed: float = 0.0
    """Seconds of training, over all sittings."""
    evaluated: int = 0
    """Step of the newest evaluation."""
    best: dict[str, float] = field(default_factory=dict)
    """Step and validation numbers of the best model; empty before the first evaluation."""
    stale: int = 0
    """Evaluations since validation top-1 last improved."""
    skipped: int = 0
    """Steps whose update was not finite."""
    ended: str = ""
    """Why the run is over; "" while it is not."""
    ended_by: dict[str, Any] = field(default_factory=dict)
    """The settings that ended it: with others it goes on."""


@dataclass(frozen=True)
class Result:
    """What `fit` returns, and run.json keeps."""

    folder: Path
    steps: int
    epochs: float
    seconds: float
    """Of training, over all sittings."""
    ended: str
    """Why: "all steps done", "time limit" or "early stop"."""
    best: dict[str, float]
    """Of the best model: its step, and top1, top5, nll and count on the validation images; without labels, loss."""
    test: dict[str, float] | None = None
    """The best model's numbers on the test images, looked at once; None where there are none to spare."""
    message: str = ""
    """For the user, in a sentence or two."""

    @classmethod
    def of(cls, status: RunStatus, folder: Path, per_epoch: int, test: dict[str, float] | None = None) -> Result:
        """Return the result of a run that stands where `status` says."""
        best = status.best
        reached = f", validation top-1 {best['top1']:.2%}" if "top1" in best else ""
        reached = f", validation loss {best['loss']:.4f}" if "loss" in best else reached
        return cls(
            folder,
            status.step,
            status.step / per_epoch,
            round(status.elapsed, 1),
            status.ended,
            best,
            test,
            f"{status.ended} after {status.step} steps{reached}; everything is in {folder}",
        )


@dataclass
class TrainingState:
    """The parts of a run that change, gathered."""

    objective: Objective
    optimizer: torch.optim.Optimizer
    average: Averager
    identity: dict[str, Any]
    status: RunStatus = field(default_factory=RunStatus)
    base: Base | None = None
    """Of a network of which only a part learns: where the rest is, which no checkpoint holds."""

    def mark(self, ended: str, run: Run) -> None:
        """Note that the run is over, because of what in `run`; "" while it is not."""
        self.status.ended = ended
        self.status.ended_by = _limits(run) if ended else {}

    def is_over(self, run: Run) -> bool:
        """Did this run end by itself, and is there nothing in `run` that would let it go on?"""
        return bool(self.status.ended) and self.status.ended_by == _limits(run)

    @property
    def sharded(self) -> bool:
        """Has each process only its part of the tensors? Then all of them save together."""
        return any(map(world.is_sharded, self.objective.parameters()))

    def state_dict(self) -> dict[str, Any]:
        """Return it all as nested dicts of tensors and JSON values. Raises TrainingError if not all is finite."""
        require_finite(self.objective)
        shared = self._shared()
        return {
            "model": {name: value for name, value in self.objective.state_dict().items() if name not in shared},
            "base": None if self.base is None else {name: getattr(self.base, name) for name in NOTED},
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "standing": asdict(self.status),
            "identity": self.identity,
        }

    def parts(self) -> dict[str, Tensor]:
        """Name in a checkpoint -> tensor that is sharded as what is saved under that name, of a sharded run; else {}.

        The optimiser has no state before its first step: what has its parameter's shape is sharded as that is.
        """
        found: dict[str, Any] = {f"model/{name}": tensor for name, tensor in self.objective.state_dict().items()}
        found |= {f"average/mean/{name}": tensor for name, tensor in self.average.state_dict()["mean"].items()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            found |= {f"optimizer/state/{number}/{name}": parameter for name in MOMENTS}
        return {name: tensor for name, tensor in found.items() if world.is_sharded(tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` left off.

        Raises CheckpointError, listing the differences, if it is of another run.
        """
        if differences := differing(state["identity"], self.identity):
            raise CheckpointError(
                "the checkpoint belongs to another run:\n  "
                + "\n  ".join(differences)
                + "\nresume with the data and settings it was made with, or start a new run from its weights (--from)"
            )
        self._load_model(state["model"], state.get("base"))
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
        self.status = RunStatus(**state["standing"])

    def _shared(self) -> set[str]:
        """What of the objective's tensors stands in the base."""
        return set() if self.base is None else {f"model.{name}" for name in self.base.shared}

    def _load_model(self, tensors: dict[str, Any], noted: dict[str, Any] | None) -> None:
        """Take over a checkpoint's tensors, after a look at whether the others are those of its base, as `noted`."""
        if noted is not None and self.base is not None and noted["sha256"] != self.base.sha256:
            raise CheckpointError(
                f"the checkpoint holds the tuned part of a network whose rest was in {noted['source']} "
                f"({noted['path']}), and the weights in {self.base.path} are others (their checksum differs): restore "
                "them, or say with --from where the right ones are"
            )
        if tensors.keys() != self.objective.state_dict().keys() - self._shared():
            raise CheckpointError("the checkpoint holds other tensors than this network has: it is of another run")
        self.objective.load_state_dict(tensors, strict=False)


def _limits(run: Run) -> dict[str, Any]:
    return {name: plain(getattr(run, name)) for name in ("duration", "time_limit", "early_stop")}


def identity(run: Run, config: Any, class_names: list[str], fingerprint: str) -> dict[str, Any]:
    """Return what makes a run itself: data, classes, network and whatever shapes its gradient, as JSON values."""
    return {
        "data": fingerprint,
        "splits": {name: getattr(run.data, name) for name in ("train", "validation", "holdout", "subset", "together")},
        "class_names": class_names,
        "model": {"kind": type(config).__name__, **plain(config)},
        **{name: plain(getattr(run, name)) for name in IDENTITY},
    }


def differing(was: Any, now: Any, where: str = "") -> list[str]:
    """Return one line for each value that differs between two nested values."""
    if isinstance(was, dict) and isinstance(now, dict):
        lines = []
        for key in sorted({*was, *now}):
            below = f"{where}.{key}" if where else str(key)
            lines += differing(was.get(key), now.get(key), below)
        return lines
    if isinstance(was, list | tuple) and isinstance(now, list | tuple):
        if len(was) == len(now):
            places = enumerate(zip(was, now, strict=True))
            return [line for i, (a, b) in places for line in differing(a, b, f"{where}[{i}]")]
        return [f"{where}: {len(was)} entries there, {len(now)} here"]
    return [] if was == now else [f"{where}: {was!r} there, {now!r} here"]
