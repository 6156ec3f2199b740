"""One trial of a sweep: a run in a folder of its own, known by what it computes, trained at most once.

```
<sweep>/dev-lr-0.003-seed-0-5f0c.../
  run.yaml       the run
  log.txt        what it said
  outcome.json   what came of it; written last
  run-1/         the run folder
```
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitrail.config import from_yaml, plain, to_yaml
from vitrail.data.sources.open import Splits
from vitrail.errors import CheckpointError, UsageError, VitrailError
from vitrail.training.checkpoints.checkpoint import latest_valid
from vitrail.training.checkpoints.state import identity
from vitrail.training.folder import RunFolder
from vitrail.training.guard import Diverged, Interrupted
from vitrail.training.loop import fit
from vitrail.training.resolve import available_cores, choose_device, resolve
from vitrail.training.run import Run

RUN, LOG, OUTCOME = "run.yaml", "log.txt", "outcome.json"
NAME = "run"
ELSEWHERE = ("name", "out", "device", "workers", "cache", "accumulate", "compile", "activation_checkpointing", "keep",
             "checkpoint_every", "wide_branches")  # fmt: skip
"""Settings that say where a run is and how it is carried out, not what it computes."""


@dataclass(frozen=True)
class Outcome:
    """What came of a trial."""

    status: Literal["done", "diverged", "failed"]
    """diverged: it would again; failed: for a reason outside of it (memory, disk, a kill), so it may be tried again."""
    reason: str = ""
    run: str = ""
    """The run folder."""
    dev: dict[str, float] | None = None
    """Numbers on the images to choose by, with the last weights: top1, top5, nll, count."""
    test: dict[str, float] | None = None
    """Numbers on the test images, with the last weights."""
    steps: int = 0
    seconds: float = 0.0
    """Of training."""


@dataclass(frozen=True)
class Trial:
    """A run of a sweep, and where it is."""

    key: str
    """A hash of what it computes: two trials with the same key are the same run."""
    run: Run
    folder: Path
    values: Mapping[str, Any]
    """The settings that the sweep varies, by dotted name."""
    final: bool = False
    """Is it trained on everything, rather than on all but the images to choose by?"""

    @classmethod
    def of(cls, run: Run, key: str, sweep: Path, values: Mapping[str, Any], *, final: bool) -> Trial:
        """Return the trial of `run` in the folder `sweep`."""
        name = f"{'final' if final else 'dev'}-lr-{run.optim.lr:g}-seed-{run.seed}-{key}"
        return cls(key, run, sweep / name, values, final)

    def __str__(self) -> str:
        values = [f"{name.removeprefix('optim.')} {shown(value)}" for name, value in self.values.items()]
        return ", ".join([*values, *([f"final, seed {self.run.seed}"] if self.final else [])])

    def prepare(self) -> None:
        """Make the folder and write the run. Raises UsageError where that cannot be done."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / OUTCOME).unlink(missing_ok=True)  # of a failure
        except OSError as error:
            raise UsageError(f"cannot write in {self.folder}: {error.strerror or error}") from error
        RunFolder(self.folder).write_text(RUN, to_yaml(self.run))


def shown(value: Any) -> str:
    """Write the value of a setting."""
    return f"{value:g}" if isinstance(value, float) else str(plain(value))


def trial_key(run: Run, splits: Splits, weights: str) -> str:
    """Return a hash of all that decides what `run` computes; 12 hex digits.

    That is its data by their fingerprint, its weights by theirs (`weights`), and every setting, with what it leaves
    open decided. Raises UsageError and DataError where the settings cannot work.
    """
    known = "float32" if run.precision == "auto" else run.precision
    resolved = resolve(
        replace(run, device="cpu", workers=0, cache="no", accumulate=1, precision=known),
        splits.train,
        splits.class_names,
    )
    settings = {name: value for name, value in plain(resolved.run).items() if name not in ELSEWHERE}
    settings |= {"precision": run.precision, "weights": weights, "model": ""}  # of the model, its config counts
    settings["data"] = {name: value for name, value in settings["data"].items() if name != "path"}
    what = identity(resolved.run, resolved.config, splits.class_names, splits.fingerprint)
    text = json.dumps([what, settings], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def finished(folder: Path) -> Outcome | None:
    """Return the outcome of a trial that need not be trained any more; None while it does."""
    found = read_outcome(folder)
    return None if found is None or found.status == "failed" else found


def read_outcome(folder: Path) -> Outcome | None:
    """Return what is written of a trial, a failure too; None where there is nothing."""
    try:
        return Outcome(**RunFolder(folder).read_json(OUTCOME))
    except TypeError:  # empty, torn or of another version
        return None


def run_trial(folder: Path, *, device: str | None = None, cores: int | None = None) -> Outcome:
    """Train the trial in `folder`, or go on with it, and write what came of it.

    device: In place of the run's own. cores: What this process may use of the machine; None: all.

    Raises Interrupted after a signal, once the state is saved. Errors of training are an outcome.
    """
    run = replace(from_yaml(folder / RUN, Run()), out=str(folder), name=NAME)
    run = run if device is None else replace(run, device=device)
    if run.workers is None and cores is not None and cores < available_cores():
        run = replace(run, workers=min(16, cores) if choose_device(run.device).type == "cuda" else max(1, cores // 4))
    with _alone(folder):
        if (found := finished(folder)) is not None:
            return found
        outcome = _attempt(run, folder)
        RunFolder(folder).write_json(OUTCOME, asdict(outcome))
        if outcome.status == "done":  # they were to resume from, and are most of the space
            shutil.rmtree(Path(outcome.run) / "checkpoints", ignore_errors=True)
    return outcome


def here(trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
    """Train one trial after another in this process."""
    for trial in trials:
        yield trial, run_trial(trial.folder)


def _attempt(run: Run, folder: Path) -> Outcome:
    began = _interrupted(folder)
    try:
        result = fit(run, resume=began)
    except Interrupted:
        raise
    except Diverged as error:
        return Outcome("diverged", str(error), str(_newest(folder)))
    except VitrailError as error:
        return Outcome("failed", str(error), str(_newest(folder)))
    if not result.best:
        return Outcome("diverged", "the last weights give no finite loss", str(result.folder))
    dev = {name: value for name, value in result.best.items() if name != "step"}
    return Outcome("done", "", str(result.folder), dev or None, result.test, result.steps, result.seconds)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the trial for this process, waiting for one that still has it.

    It may be another sweep's in the same folder, or the child of a sweep that was killed, which is saving.
    """
    with open(folder / ".lock", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _interrupted(folder: Path) -> Path | None:
    """Return the run folder to go on in; None where there is nothing to go on from.

    A run that was killed before its first checkpoint left nothing of use, and is removed.
    """
    for path in _runs(folder):
        try:
            if (path / "run.json").is_file() and latest_valid(path / "checkpoints") is not None:
                return path
        except CheckpointError as error:
            print(f"starting anew: {error}")
            continue
        shutil.rmtree(path, ignore_errors=True)
    return None


def _runs(folder: Path) -> list[Path]:
    """The run folders of a trial, the newest first."""
    return sorted(folder.glob(f"{NAME}-*"), key=lambda path: (len(path.name), path.name), reverse=True)


def _newest(folder: Path) -> Path:
    return next(iter(_runs(folder)), folder)
