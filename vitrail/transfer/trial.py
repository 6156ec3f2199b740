"""One trial of a sweep: a run in a folder of its own, identified by what it computes and trained at most once.

```
<sweep>/dev-lr-0.003-seed-0-5f0c.../
  run.yaml       the run
  asked.json     its settings that must be used as they are
  log.txt        its output
  outcome.json   its outcome; written last
  run-1/         the run folder
```

`python -m vitrail.transfer.trial FOLDER` is the process that trains one trial (`vitrail.transfer.processes`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail.config import from_yaml, plain, to_yaml
from vitrail.data.roles import Splits
from vitrail.device import available_cores, choose_device, keep_freed_memory
from vitrail.disk import writing
from vitrail.errors import CheckpointError, UsageError, VitrailError
from vitrail.files import LOCK, json_text, locked, replacing_text
from vitrail.run_log import NUMBERS, fitting
from vitrail.training.checkpoints.checkpoint import latest_valid
from vitrail.training.checkpoints.state import identity
from vitrail.training.decide import decide, worker_count
from vitrail.training.facts import Facts
from vitrail.training.folder import RunFolder
from vitrail.training.guard import Diverged, Interrupted
from vitrail.training.loop import fit
from vitrail.training.processes import end_with_parent
from vitrail.training.run import Run

RUN, ASKED, LOG, OUTCOME = "run.yaml", "asked.json", "log.txt", "outcome.json"
NAME = "run"
ELSEWHERE = ("name", "out", "device", "workers", "worker_kind", "augment_on", "decode_on", "cache", "accumulate",
             "compile", "activation_checkpointing", "keep", "checkpoint_every")  # fmt: skip
"""Settings that say where and how a run is executed, not what it computes."""
Status = Literal["done", "diverged", "failed"]
_SHAPE = {"status": str, "reason": str, "run": str, "dev": NUMBERS, "test": NUMBERS, "steps": int, "seconds": float}
"""Field of `Outcome` -> its type in outcome.json, as `vitrail.run_log.FACTS` states types."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial."""

    status: Status
    """A diverged run would diverge again. A failed run (memory, disk, a kill) is tried again."""
    reason: str = ""
    run: str = ""
    """The run folder."""
    dev: dict[str, float] | None = None
    """Metrics of the last weights on the images to choose by: top1, top5, nll, count."""
    test: dict[str, float] | None = None
    """Metrics of the last weights on the test images."""
    steps: int = 0
    seconds: float = 0.0
    """Seconds of training."""


@dataclass(frozen=True)
class Trial:
    """A run of a sweep, and its folder."""

    key: str
    """A hash of what the trial computes: two trials with the same key are the same run."""
    run: Run
    folder: Path
    values: Mapping[str, Any]
    """The settings that the sweep varies, by their dotted names."""
    final: bool = False
    """Whether it trains on all images, and not only on those that are not used to choose by."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Settings that must be used as they are, by their dotted names -> who asks for them, as for `fit`."""

    @classmethod
    def of(
        cls,
        run: Run,
        key: str,
        sweep: Path,
        values: Mapping[str, Any],
        *,
        final: bool,
        asked: Mapping[str, str] | None = None,
    ) -> Trial:
        """Return the trial of `run` in the folder `sweep`."""
        name = f"{'final' if final else 'dev'}-lr-{run.optim.lr:g}-seed-{run.seed}-{key}"
        return cls(key, run, sweep / name, values, final, asked or {})

    def __str__(self) -> str:
        values = [f"{name.removeprefix('optim.')} {setting_text(value)}" for name, value in self.values.items()]
        return ", ".join([*values, *([f"final, seed {self.run.seed}"] if self.final else [])])

    def prepare(self) -> None:
        """Make the folder and write the run. Raises UsageError if the folder cannot be written."""
        with writing(self.folder, UsageError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / OUTCOME).unlink(missing_ok=True)  # left by a failure
            with replacing_text(self.folder / RUN) as file:
                file.write(to_yaml(self.run))
            write_json(self.folder / ASKED, dict(self.asked))


def setting_text(value: Any) -> str:
    """Return the value of a setting as text."""
    return f"{value:g}" if isinstance(value, float) else str(plain(value))


def trial_key(run: Run, splits: Splits, weights: str) -> str:
    """Return a hash of everything that decides what `run` computes; 12 hexadecimal digits.

    It covers the fingerprint of the data, the fingerprint `weights` of the weights, and every setting, with automatic
    settings as `decide` leaves them. Raises UsageError and DataError for settings that cannot work.
    """
    known = "float32" if run.precision == "auto" else run.precision
    anywhere = replace(run, device="cpu", workers=0, cache="no", accumulate=1, precision=known)
    decision = decide(anywhere, Facts.of(anywhere, splits.train, splits.class_names))
    settings = {name: value for name, value in plain(decision.run).items() if name not in ELSEWHERE}
    settings |= {"precision": run.precision, "weights": weights, "model": ""}  # the config identifies the model
    settings["data"] = {name: value for name, value in settings["data"].items() if name != "path"}
    run_identity = identity(decision.run, decision.config, splits.class_names, splits.fingerprint)
    text = json.dumps([run_identity, settings], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replace the JSON file `path`. Raises UsageError if it cannot be written: without it the work is not recorded."""
    with replacing_text(path, UsageError) as file:
        file.write(json_text(value, indent=2) + "\n")


def finished(folder: Path) -> Outcome | None:
    """Return the outcome of a trial that is finished; None if it must be trained (again)."""
    outcome = read_outcome(folder)
    return None if outcome is None or outcome.status == "failed" else outcome


def read_outcome(folder: Path) -> Outcome | None:
    """Return the recorded outcome of a trial, which may be a failure; None if there is none, or if it is damaged.

    Its run folder is looked for in `folder`, because a sweep may have been moved.
    """
    values, wrong = fitting(RunFolder(folder).read_json(OUTCOME), _SHAPE)
    try:
        outcome = Outcome(**values)
    except TypeError:  # empty, incomplete or of another version
        return None
    if wrong or outcome.status not in get_args(Status):
        return None
    here = folder / Path(outcome.run).name
    return replace(outcome, run=str(here)) if here.is_dir() else outcome


def run_trial(folder: Path, *, device: str | None = None, cores: int | None = None) -> Outcome:
    """Train or resume the trial in `folder`, and write and return its outcome.

    device: replaces the run's device. cores: number of cores that this process may use; None: all.

    Raises Interrupted after a signal, when the state is saved. Errors of training become the outcome.
    """
    run = replace(from_yaml(folder / RUN, Run(), imports=True), out=str(folder), name=NAME)
    run = run if device is None else replace(run, device=device)
    if run.workers is None and cores is not None and cores < available_cores():
        run = replace(run, workers=worker_count(run, choose_device(run.device), cores))
    # waits for a process of another sweep that trains it, or of a killed sweep that still saves
    with locked(folder / LOCK, UsageError, None, keep=True):
        if (outcome := finished(folder)) is not None:
            return outcome
        outcome = _attempt(run, folder)
        write_json(folder / OUTCOME, asdict(outcome))
        if outcome.status == "done":  # only needed to resume, and most of the disk space
            shutil.rmtree(Path(outcome.run) / "checkpoints", ignore_errors=True)
    return outcome


def here(trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
    """Train one trial after another in this process."""
    for trial in trials:
        try:
            outcome = run_trial(trial.folder)
        except Interrupted as error:
            what = f"stopped in {trial.folder.name}, which is saved. Repeat the command to continue."
            raise Interrupted(what, error.signum) from None
        yield trial, outcome


def _attempt(run: Run, folder: Path) -> Outcome:
    try:
        result = fit(run, resume=_resumable(folder), asked=RunFolder(folder).read_json(ASKED))
    except Interrupted:
        raise
    except VitrailError as error:
        newest = next(iter(_runs(folder)), folder)
        return Outcome("diverged" if isinstance(error, Diverged) else "failed", str(error), str(newest))
    if not result.best:
        return Outcome("diverged", "the loss of the last weights is not finite", str(result.folder))
    if result.lost:
        return Outcome("failed", result.summary, str(result.folder))
    dev = {name: value for name, value in result.best.items() if name != "step"}
    return Outcome("done", "", str(result.folder), dev or None, result.test, result.steps, result.seconds)


def _resumable(folder: Path) -> Path | None:
    """Return the run folder to resume; None if there is none.

    A run that was killed before its first checkpoint is removed.
    """
    for path in _runs(folder):
        try:
            if (path / "run.json").is_file() and latest_valid(path / "checkpoints") is not None:
                return path
        except CheckpointError as error:
            print(f"starting again from the beginning: {error}")
            continue
        shutil.rmtree(path, ignore_errors=True)
    return None


def _runs(folder: Path) -> list[Path]:
    """Return the run folders of a trial, newest first."""
    return sorted(folder.glob(f"{NAME}-*"), key=lambda path: (len(path.name), path.name), reverse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a trial and return the exit code: 0 if there is an outcome, also a failure; 143 if it was terminated."""
    parser = argparse.ArgumentParser(prog="python -m vitrail.transfer.trial")
    parser.add_argument("folder", type=Path, help="folder of the trial")
    parser.add_argument("--device", help="device in place of the run's own")
    parser.add_argument("--cores", type=int, help="number of cores that this process may use")
    arguments = parser.parse_args(argv)
    end_with_parent()
    keep_freed_memory()
    try:
        run_trial(arguments.folder, device=arguments.device, cores=arguments.cores)
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
