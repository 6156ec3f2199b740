"""The trackers of a run, several at once. One that fails is dropped with a warning; the run continues."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from vitrail.training.trackers.mlflow import MLflow
from vitrail.training.trackers.tensorboard import TensorBoard
from vitrail.training.trackers.tracker import TrackedRun, Tracker, without_credentials
from vitrail.training.trackers.wandb import WandB
from vitrail.version import extra_of, install_extra

TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("TensorBoard", TensorBoard),
    "wandb": ("W&B", WandB),
    "mlflow": ("MLflow", MLflow),
}
"""Word of `--track` -> the name of the tracker and its class."""


class Trackers:
    """The trackers in `names`, started for `run`."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._surviving(name):
                self._open[name] = TRACKERS[name][1](run)

    @property
    def seen(self) -> list[str]:
        """How a person sees the run in each tracker, as sentences."""
        return [f"{TRACKERS[name][0]}: {tracker.seen}" for name, tracker in self._open.items() if tracker.seen]

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        self._each(lambda tracker: tracker.log(numbers, step))

    def picture(self, name: str, png: bytes, step: int) -> None:
        """See `Tracker.picture`."""
        self._each(lambda tracker: tracker.picture(name, png, step))

    def report(self, page: Path) -> None:
        """See `Tracker.report`."""
        self._each(lambda tracker: tracker.report(page))

    def close(self, *, finished: bool) -> None:
        """See `Tracker.close`."""
        self._each(lambda tracker: tracker.close(finished=finished))
        self._open.clear()

    def _each(self, do: Callable[[Tracker], None]) -> None:
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
