"""Trials as tasks of a Ray cluster instead of processes of this machine; needs the extra `[ray]`.

Every node must find the sweep's folder, the data and the weights at the same paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.training.guard import Interrupted, Signals
from vitrail.transfer.processes import interrupted
from vitrail.transfer.ray_cluster import LOCAL, connected, cores_of_each, gpus_of_each
from vitrail.transfer.trial import LOG, Outcome, Trial, read_outcome, run_trial

POLL = 1.0
"""Seconds between two checks for a signal."""


@dataclass(frozen=True)
class OnRay:
    """Trains trials wherever the cluster at `address` has room; if a node is lost, its trials resume on another."""

    address: str = LOCAL
    """local: a cluster started on this machine; auto: the cluster of this machine; or ray://HOST:10001."""
    parallel: int | None = None
    """Number of parallel trials; None: one per GPU, or without GPUs one per node."""

    def __call__(self, trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        """Yield each trial when it has ended. Raises Interrupted after a signal, when all trials have saved."""
        ray = connected(self.address)
        try:
            cores = cores_of_each(ray, self.parallel)
            task = ray.remote(_train).options(num_cpus=cores, num_gpus=gpus_of_each(ray, self.parallel))
            with Signals() as signals:
                waiting = {task.remote(str(trial.folder.absolute()), cores): trial for trial in trials}
                while waiting:
                    done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL)
                    if (number := signals.requested()) is not None:
                        _end(ray, list(waiting))
                        raise interrupted(number, len(waiting))
                    for reference in done:
                        trial = waiting.pop(reference)
                        yield trial, _outcome(ray, reference, trial)
        finally:
            ray.shutdown()


def _train(folder: str, cores: int) -> None:
    """Train a trial as a Ray task; its output goes to the trial's log."""
    with (
        open(Path(folder) / LOG, "a", encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            run_trial(Path(folder), cores=cores)
        except Interrupted as error:  # the state is saved
            print(error)


def _outcome(ray: Any, reference: Any, trial: Trial) -> Outcome:
    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        return Outcome("failed", str(error).strip().splitlines()[-1])
    return read_outcome(trial.folder) or Outcome("failed", f"its task was ended; see {trial.folder / LOG}")


def _end(ray: Any, references: Sequence[Any]) -> None:
    """Interrupt all tasks and wait until they have saved."""
    for reference in references:
        ray.cancel(reference)
    ray.wait(references, num_returns=len(references))
