"""What shows a run besides its folder: TensorBoard, Weights & Biases, and MLflow, several at once (`Trackers`).

A tracker may raise any exception, anywhere: it is dropped with a warning, and the run continues. None of them uses the
network unless the user's environment names a server.

* TensorBoard: event files in the run folder. They hold no report, because TensorBoard shows no pages.
* Weights & Biases: files in WANDB_DIR or ./wandb, for `wandb sync`; with WANDB_MODE=online it sends them itself.
* MLflow: in MLFLOW_TRACKING_URI, or else in its own default place, a file in the working directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.config import dotted, plain
from vitrail.training.run import Run
from vitrail.version import extra_of, install_extra

PROJECT = "vitrail"
"""Name of the project, or experiment, in which a tracker keeps the runs."""
CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@|(?<=\?)\S+")
"""User and password of a web address, and what follows its question mark, where signatures and tokens stand."""
WANDB_PATIENCE = 60
"""Seconds that a start, a login and an end may take; what has not been sent by then stays on the disk."""
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # a server that does not answer must not hold the run up for the minutes that are MLflow's own defaults
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""Variables of MLflow's that are set unless the user has set them."""
MLFLOW_AT_ONCE = 100
"""Maximum number of settings that MLflow takes in one request."""
MLFLOW_LONGEST = 500
"""Maximum length of a setting in characters, for all versions."""
FORBIDDEN = re.compile(r"[^\w\-./ ]")
"""Characters that no name in MLflow may have."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns about a run when it starts."""

    folder: Path
    identifier: str
    """Differs between any two runs, and stays when a run is resumed."""
    settings: dict[str, Any]
    """Dotted name -> value, without credentials: {"optim.lr": 0.001}."""
    step: int = 0
    """Step at which the run starts or resumes."""

    @classmethod
    def of(cls, run: Run, folder: Path, facts: Mapping[str, Any], step: int) -> TrackedRun:
        """Return what trackers learn about `run`, whose run.json says `facts`."""
        origin = [facts.get(name) for name in ("name", "started", "directory", "command", "machine")]
        identifier = hashlib.sha256(json.dumps(origin, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return cls(folder, identifier, {name: _shown(value) for name, value in dotted(plain(run))}, step)


class Tracker(ABC):
    """Shows one run. It is made with a `TrackedRun`, and gets what the run folder gets, as it is written."""

    seen: str = ""
    """How a person sees the run, as a sentence; "" if everybody knows."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start, or find the run again that was started before a resume."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Show numbers by name, such as "train/loss", after `step` optimiser steps."""

    @abstractmethod
    def picture(self, name: str, png: bytes, step: int) -> None:
        """Show a picture."""

    def report(self, page: Path) -> None:  # noqa: B027  # optional
        """Show the report, an HTML page, once it is written."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Send what is pending and close. finished: Whether the run ended by itself, not by a signal or an error."""


def without_credentials(text: str) -> str:
    """Return a text in which the credentials of web addresses are replaced by three stars."""
    return CREDENTIALS.sub("***", text) if "://" in text else text


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shown(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


class TensorBoard(Tracker):
    """Writes events, and hides those that an earlier process wrote after the step of a resume."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._excepthook = threading.excepthook
        threading.excepthook = partial(_show_error, self._excepthook)
        try:
            after = run.step + 1 if run.step else None
            self._writer = SummaryWriter(str(run.folder), purge_step=after)  # type: ignore[no-untyped-call]
            rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.step)  # type: ignore[no-untyped-call]
        except BaseException:
            threading.excepthook = self._excepthook
            raise

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`."""
        pixels = np.asarray(Image.open(io.BytesIO(png)))
        self._writer.add_image(name, pixels, step, dataformats="HWC")  # type: ignore[no-untyped-call]

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        try:
            self._writer.close()  # type: ignore[no-untyped-call]
        finally:
            threading.excepthook = self._excepthook


def _show_error(show: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs) -> None:
    """Show the error of a thread, except what TensorBoard's own thread cannot write: the next event raises it again."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        show(args)


class WandB(Tracker):
    """A run of W&B with its numbers over "step". It holds nothing about the machine, the code or its repository."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which would use the network; read at the import
        import wandb

        self._wandb, mode = wandb, os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.identifier,
            dir=os.environ.get("WANDB_DIR") or os.getcwd(),  # W&B itself stays where the process first used it
            resume="allow" if mode == "online" else None,  # offline, `wandb sync` joins files of the same identifier
            reinit="create_new",
            config=run.settings,
            settings=wandb.Settings(
                mode=mode,  # type: ignore[arg-type]
                silent=True,
                console="off",
                init_timeout=WANDB_PATIENCE,
                login_timeout=WANDB_PATIENCE,
                finish_timeout=WANDB_PATIENCE,
                finish_timeout_raises=True,
                disable_git=True,  # the address of a repository may hold a token
                disable_code=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        # steps of its own may not go back, which those of a resumed run do
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        files = Path(self._run.dir).parent
        self.seen = f"upload it with wandb sync {files}" if self._run.offline else str(self._run.url)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log({**numbers, "step": step})

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`."""
        self._run.log({name: self._wandb.Image(Image.open(io.BytesIO(png))), "step": step})

    def report(self, page: Path) -> None:
        """See `Tracker`."""
        self._run.log({"report": self._wandb.Html(str(page), inject=False)})

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """A run of MLflow: metrics, parameters, and artifacts for pictures and the report."""

    seen = "mlflow ui"

    def __init__(self, run: TrackedRun) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        self._id, found = self._find(run)
        settings = [Param(name, str(value)[:MLFLOW_LONGEST]) for name, value in run.settings.items()]
        for first in range(0, 0 if found else len(settings), MLFLOW_AT_ONCE):  # what is set cannot be changed
            self._client.log_batch(self._id, params=settings[first : first + MLFLOW_AT_ONCE])

    def _find(self, run: TrackedRun) -> tuple[str, bool]:
        """Return the identifier of the run in MLflow, and whether it was there already."""
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), "vitrail.run"
        known: Any = self._client.get_experiment_by_name(name)
        experiment: str = self._client.create_experiment(name) if known is None else known.experiment_id
        if runs := self._client.search_runs([experiment], f"tags.`{tag}` = '{run.identifier}'", max_results=1):
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            return runs[0].info.run_id, True
        made = self._client.create_run(experiment, run_name=run.folder.name, tags={tag: run.identifier})
        return made.info.run_id, False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        now = int(time.time() * 1000)
        metrics = [self._metric(FORBIDDEN.sub("_", name), float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker`. A later picture takes the place of an earlier one."""
        self._client.log_image(self._id, Image.open(io.BytesIO(png)), f"pictures/{name}.png")

    def report(self, page: Path) -> None:
        """See `Tracker`."""
        self._client.log_artifact(self._id, str(page))

    def close(self, *, finished: bool) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("TensorBoard", TensorBoard),
    "wandb": ("W&B", WandB),
    "mlflow": ("MLflow", MLflow),
}
"""Word of `--track` -> the name of the tracker and its class."""


class Trackers:
    """The trackers in `names`, started for `run`. One that fails is dropped with a warning; the run continues."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._surviving(name):
                self._open[name] = TRACKERS[name][1](run)

    @property
    def seen(self) -> list[str]:
        """How a person sees the run in each tracker, as sentences."""
        return [f"{TRACKERS[name][0]}: {tracker.seen}" for name, tracker in self._open.items() if tracker.seen]

    def each(self, do: Callable[[Tracker], None]) -> None:
        """Call `do` with each tracker."""
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                do(tracker)

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Context in which a failure of the tracker `name` drops it. What it prints would spoil --json: it is lost."""
        try:
            with redirect_stdout(io.StringIO()):
                yield
        except (Exception, SystemExit) as error:  # whatever a tracker does, it must never stop a run
            self._open.pop(name, None)
            title = TRACKERS[name][0]
            missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == name
            why = f"it is not installed: {install_extra(extra_of(name) or name)}" if missing else str(error)
            why = " ".join(without_credentials(why).split()) or type(error).__name__
            print(f"warning: {title} stopped: {why}. Training continues without {title}.", file=sys.stderr)
