"""The state of a run: what a checkpoint stores, how it is saved and restored, and how a run is resumed.

At a step that saves, the tensors are copied in main memory, and a thread writes the copies. The next save, and the end
of the run, wait for the thread: a step that is reported as saved is durable. Until then the previous checkpoint stays,
so that a kill at any moment loses at most the work since that one. A few checkpoints may fail before training stops.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail import world
from vitrail.config import from_yaml, plain
from vitrail.device import free_memory
from vitrail.errors import CheckpointError, TrainingError, WeightsError
from vitrail.model.variants import ForeignConfig, ResNetConfig, flat
from vitrail.objective.base import Objective
from vitrail.training.checkpoints import checkpoint
from vitrail.training.checkpoints.flatten import copied, flatten, nbytes, shares
from vitrail.training.folder import RunFolder
from vitrail.training.guard import require_finite
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import LossScale
from vitrail.training.python_objects import PythonObjects
from vitrail.training.recorded import are_other_weights, recorded_run
from vitrail.training.run import LORA, Run
from vitrail.weights.base import BaseWeights
from vitrail.weights.load import local_path
from vitrail.weights.store import WEIGHTS

IDENTITY = ("objective", "augment", "schedule", "average", "progressive", "optim", "batch_size", "seed", "tune", *LORA,
            "distill")  # fmt: skip
"""Settings that a resumed run must share with the run it continues. All others may change: duration, time_limit,
early_stop, how often to evaluate and save, and everything about the machine (accumulate, precision,
workers, worker_kind, cache, compile, activation_checkpointing, device). The result is the same up to rounding."""
BEGINNING = ("keep_head", "probe_head", "classes")
"""Settings that have had their effect before the first step: a resumed run keeps them."""
SPLITS = ("train", "validation", "holdout", "fold", "group", "subset", "together", "sampler")
"""Settings of the data that a resumed run must share with the run it continues."""
OPTIMIZER_STATE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "first", "second")
"""Names of the tensors that AdamW, SGD, LAMB and Muon store for each parameter."""
BASE_FACTS = ("source", "path", "sha256")
"""What a checkpoint says about the base model it needs; run.json says how to find it again."""
PATIENCE = 3
"""Training stops after this number of consecutive checkpoints that could not be written."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, by default, in torchrun, Slurm and Kubernetes."""
ROOM = 2.0
"""Free memory needed for a copy, as a multiple of its size. With less, training waits for the save."""
LONGEST = timedelta(days=7)
"""How long the processes of a sharded run wait for one another while they write: a slow disk is no error."""


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
    highest: dict[str, float] = field(default_factory=dict)
    """Those of the evaluation with the highest value of the run's metric, which the best model may share in all but
    chance (`Metric.tied`)."""
    before: dict[str, float] = field(default_factory=dict)
    """Of a run that keeps classes: the accuracy of the weights on the validation images, by old and new classes."""
    stale: int = 0
    """Evaluations since validation top-1 last improved."""
    skipped: int = 0
    """Steps that were skipped because their update was not finite."""
    ended: str = ""
    """Why the run is over; "" while it is running."""
    ended_by: dict[str, Any] = field(default_factory=dict)
    """The limits that ended the run. With other limits it continues."""


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
    scale: LossScale | None = None
    """The factor of the loss, if it is computed in float16."""

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
        """Return the state as nested dicts of tensors and JSON values."""
        shared = self._base_tensors()
        return {
            "model": {name: value for name, value in self.objective.state_dict().items() if name not in shared},
            "base": None if self.base is None else {name: getattr(self.base, name) for name in BASE_FACTS},
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "scale": None if self.scale is None else self.scale.state_dict(),
            "standing": asdict(self.status),
            "identity": self.identity,
        }

    def of_parameters(self) -> dict[str, Tensor]:
        """Return name in a checkpoint -> a tensor that is sharded like it, or like it the same in all processes.

        The optimiser has no state before its first step, so its entries are the parameters.
        """
        found: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in self.objective.named_parameters()}
        found |= {f"average/mean/{name}": tensor for name, tensor in self.average.state_dict()["mean"].items()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            found |= {f"optimizer/state/{number}/{name}": parameter for name in OPTIMIZER_STATE}
        return found

    def sharded_tensors(self) -> dict[str, Tensor]:
        """Return those of `of_parameters` that are sharded."""
        return {name: tensor for name, tensor in self.of_parameters().items() if world.is_sharded(tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises CheckpointError with the differences if it is from another run."""
        stored = with_defaults(of_foreign(state["identity"], self.identity), self.defaults)
        if differences := differing(stored, self.identity):
            raise CheckpointError(
                "the checkpoint belongs to another run:\n  "
                + "\n  ".join(differences)
                + "\nResume with the data and settings of that run, or start a new run from its weights (--from)."
            )
        self._load_model(state["model"], state.get("base"))
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
        if self.scale is not None and state.get("scale") is not None:  # there is none after steps in another precision
            self.scale.load_state_dict(state["scale"])
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


def with_defaults(stored: Any, defaults: Any) -> Any:
    """Return nested values with the defaults of settings that did not exist when they were stored."""
    if not (isinstance(stored, dict) and isinstance(defaults, dict)):
        return stored
    filled = {name: with_defaults(value, defaults.get(name)) for name, value in stored.items()}
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


class Checkpoints:
    """Saves and restores a `TrainingState` in a run folder; `say` prints a line.

    Each process writes its part of a sharded state, and its share of another one. Processes that do not see the folder,
    on machines without a common disk, write nothing. A context that ends when no checkpoint is being written any more.
    """

    def __init__(self, folder: RunFolder, keep: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.keep = keep
        self.say = say
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self._failed = 0
        self._reason = ""
        self._warned = False
        self._saved_status: dict[str, Any] = {}
        self._pending: _Save | None = None
        self._buffers: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._writers: list[int] = []

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not KeyboardInterrupt:  # a second Ctrl-C ends the process at once
            self._join()

    @property
    def lost(self) -> dict[str, str]:
        """What could not be written -> the reason: the newest checkpoint, or nothing."""
        return {"the newest checkpoint": self._reason} if self._failed else {}

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, without communicating with other processes."""
        self._join()
        return checkpoint.newest(self.folder.checkpoints)

    def save(self, state: TrainingState, *, wait: bool = True, after: Callable[[], object] = lambda: None) -> None:
        """Write a checkpoint, unless the newest one is of the same state; all processes call it.

        With `wait`, return when the checkpoint is durable, else as soon as training can continue. `after` returns when
        what the checkpoint speaks of, such as the best model, is in the run folder; it is written then. Raises
        TrainingError if weights are not finite, or after `PATIENCE` consecutive failures.
        """
        self.wait()
        status = {**asdict(state.status), "elapsed": 0.0}
        if status == self._saved_status:
            return
        require_finite(state.objective)
        step, tensors, options = state.status.step, state.state_dict(), dict[str, Any](keep=self.keep)
        if world.size() > 1:
            options["group"] = self._saving_group()
        if world.size() > 1 and not state.sharded:
            options["share"] = self._share(tensors, state)
        share = options.get("share")
        if not wait and nbytes(tensors, share) * ROOM < free_memory(torch.device("cpu")) + nbytes(self._buffers):
            tensors = copied(tensors, self._buffers, share)
        else:
            wait = True
        write = partial(checkpoint.save, self.folder.checkpoints, step, tensors, **options)
        self._pending = _Save(step, status, write, after)
        if wait:
            self._pending.run()
            self.wait()
        else:
            self._pending.start()

    def wait(self) -> None:
        """Return when the checkpoint that is being written is durable or has failed; all processes call it.

        Raises TrainingError after `PATIENCE` consecutive failures.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with world.main_alone("writing a checkpoint"):
            pending.join()
        if isinstance(pending.error, CheckpointError):
            self._failed += 1
            self._reason = str(pending.error)
            self.say(f"warning: no checkpoint at step {pending.step}: {pending.error}")
        elif pending.error is not None:
            raise pending.error
        self._warn_if_slow(pending.seconds)
        if not world.any_(pending.error is not None):  # all processes must agree on what is saved
            self.saved, self._failed, self._saved_status = pending.step, 0, pending.status
        if world.any_(self._failed >= PATIENCE):
            raise TrainingError(
                f"the last {PATIENCE} checkpoints could not be written to {self.folder.checkpoints}. Free disk space "
                f"and resume from the newest checkpoint: vitrail train --resume {shlex.quote(str(self.folder.path))}"
            )

    def restore(self, state: TrainingState) -> None:
        """Load the newest intact checkpoint into `state` and print which one it is.

        Raises CheckpointError if there is none or it belongs to another run.
        """
        path = world.from_main(
            "checking the checkpoints",
            lambda: checkpoint.latest_valid(
                self.folder.checkpoints,
                on_reject=lambda bad: self.say(f"warning: skipping {bad.path.name}: {bad.reason}"),
            ),
        )
        if path is None:
            raise CheckpointError(f"{self.folder.checkpoints} holds no checkpoint: the run ended before its first")
        state.load_state_dict(checkpoint.read(path, state.sharded_tensors()))
        self.saved, self._saved_status = state.status.step, {**asdict(state.status), "elapsed": 0.0}
        self.say(f"resuming from {path}")

    def _join(self) -> None:
        """Wait until nothing is being written, but at most `GRACE` seconds for other processes, which may be gone."""
        if self._pending is not None:
            self._pending.join(None if self._group is None else GRACE)

    def _saving_group(self) -> dist.ProcessGroup:
        """Return the process group for saving, apart from the one that training uses at the same time."""
        if self._group is None:
            group = dist.new_group(backend="gloo", timeout=LONGEST)
            assert isinstance(group, dist.ProcessGroup)  # every process belongs to it
            self._group = group
            mark = self.folder.path / f".seen-by-{os.getpid()}"
            with self.folder.tolerating("a file that is not kept"):
                if world.is_main():
                    mark.touch()
            mark = world.gather(mark)[0]
            self._writers = [rank for rank, sees in enumerate(world.gather(mark.exists())) if sees]
            if world.is_main():
                mark.unlink(missing_ok=True)
        return self._group

    def _share(self, state: dict[str, Any], of: TrainingState) -> list[str]:
        """Return the names of the tensors in `state` that this process writes. All processes call it."""
        if world.rank() not in self._writers:
            return []
        divided = shares(flatten(state)[1], of.of_parameters().keys(), len(self._writers))
        return divided[self._writers.index(world.rank())]

    def _warn_if_slow(self, seconds: float) -> None:
        """Warn once that a save takes so long that a scheduler may kill the process before the save is done."""
        if seconds > GRACE / 2 and not self._warned:
            self._warned = True
            self.say(
                f"warning: saving a checkpoint took {seconds:.0f} s, and schedulers often kill {GRACE:.0f} s after "
                "SIGTERM. Ask your scheduler for more time. Otherwise the newest checkpoint will be the periodic one "
                "before the signal."
            )


class _Save(threading.Thread):
    """One checkpoint being written by calling `after` and `write`."""

    def __init__(
        self, step: int, status: dict[str, Any], write: Callable[[], object], after: Callable[[], object]
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.step, self.status = step, status
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._write, self._after = write, after

    def run(self) -> None:
        """Write the checkpoint. An error is kept, to be raised in the training thread."""
        began = time.monotonic()
        try:
            self._after()
            self._write()
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - began

    def join(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is written or has failed, but at most `timeout` seconds."""
        if self.ident is not None:  # started
            super().join(timeout)


def resumed_run(run: Run, folder: RunFolder, objects: PythonObjects) -> tuple[Run, str | None]:
    """Return the run to continue in `folder`, and the weights it is built from (`starting_weights`).

    Raises WeightsError if only a part of the network is trained and its base model cannot be found, UsageError if the
    run needs objects that were not `given`, CheckpointError if it has another network or prepares images otherwise.
    """
    objects.check_resume(folder)
    recorded = from_yaml(folder.path / "config.yaml", Run())
    run = relocated(inherit(run, recorded), recorded, folder)
    _check_kept(run, recorded, folder)
    return run, starting_weights(run, recorded, folder)


def _check_kept(run: Run, recorded: Run, folder: RunFolder) -> None:
    """Raise CheckpointError for settings that a checkpoint does not compare, and that a resumed run cannot change.

    The network of a run from weights is theirs, whatever name is given, and so is its beginning. Images that are
    prepared otherwise would be measured otherwise than the best model, whose card says how.
    """
    kept = {name: True for name in BEGINNING}
    kept |= {"preprocess": recorded.preprocess is not None, "model": run.weights is not None and run.model is not None}
    kept |= {"weights": _begins_otherwise(run, recorded, folder)}
    differences = [
        line
        for name, compared in kept.items()
        if compared
        for line in differing(plain(getattr(recorded, name)), plain(getattr(run, name)), name)
    ]
    if differences:
        raise CheckpointError(
            f"the run in {folder.path} has other settings, which a resumed run keeps:\n  "
            + "\n  ".join(differences)
            + "\nRemove them, or start a new run from its weights (--from)."
        )


def _begins_otherwise(run: Run, recorded: Run, folder: RunFolder) -> bool:
    """Return whether `run` is asked to begin from other weights. A checkpoint compares those of a tuned part itself."""
    if recorded.tune != "all" or run.weights == recorded.weights:
        return False
    located = recorded_run(folder.path)
    return are_other_weights(run.weights, None if located is None else located.weights)


def inherit(run: Run, recorded: Run) -> Run:
    """Return `run` with its automatic settings as in `recorded`: a resumed run decides nothing again."""
    automatic = (
        "image_size",
        "preprocess",
        "batch_size",
        "accumulate",
        "precision",
        "workers",
        "worker_kind",
        "augment_on",
        "cache",
        "compile",
    )
    decided = {name: getattr(recorded, name) for name in (*automatic, *LORA) if getattr(run, name) in (None, "auto")}
    return replace(run, **decided)


def relocated(run: Run, recorded: Run, folder: RunFolder) -> Run:
    """Return `run` with the present place of its base model as weights: the run folder or the base may have moved.

    `recorded` is the run in the folder's config.yaml. If `run` names other weights, these are used, so that `--from`
    can give the new place. Raises WeightsError if the base is in none of the recorded places.
    """
    noted = folder.facts().get("base")
    if recorded.tune == "all" or noted is None or run.weights != recorded.weights:
        return run
    return replace(run, weights=BaseWeights.read(noted, folder.path / "run.json").located(folder.path))


def starting_weights(run: Run, recorded: Run, folder: RunFolder) -> str | None:
    """Return the weights that a resumed run is built from, before its checkpoint replaces all of them.

    These are `run.weights`. If they are gone and the whole network is trained, the folder's newest model takes their
    place, so that a resumed run needs only its folder and its data, unless it keeps classes of the weights. `recorded`
    is the run in the folder's config.yaml; weights that differ from its own are returned as they are.
    """
    own = folder.last
    if (
        run.weights is None
        or run.keeps_classes
        or run.tune != "all"
        or run.weights != recorded.weights
        or not (own / WEIGHTS).is_file()
    ):
        return run.weights
    try:
        local_path(run.weights)
    except WeightsError:
        return str(own)
    return run.weights
