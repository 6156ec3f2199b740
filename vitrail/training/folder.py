"""The run folder: everything that a run writes, in one place. It never overwrites another run.

```
runs/<name>-<n>/
  config.yaml      the run with every decision; it repeats the run
  run.json         command, versions, commit, seed, data fingerprint, machine, decisions, result
  classes.json     class names in the order of the outputs
  split.json       the held-out images, if the data have no validation split
  metrics.jsonl    one JSON object per line: training, evaluations, skipped steps
  batch.png        the first augmented batch, at the size that the network sees at the end
  evaluation.npz   the best model's predictions for the validation images
  checkpoints/     to resume from
  model/best, model/last   weights + card
  events.out...    the same curves for TensorBoard, unless `track` leaves it out
```
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vitrail import world
from vitrail.disk import writing
from vitrail.errors import CheckpointError, UsageError
from vitrail.files import check_writable, json_text, open_regular, read_json, read_json_object, replacing
from vitrail.run_log import Dropped, fitting, log_lines
from vitrail.training.run import Run
from vitrail.training.trackers import TrackedRun, Trackers


class RunFolder:
    """Paths and writers of one run. `RunFolder.create` makes a new folder, `RunFolder.open` opens an existing one.

    Only the main process writes. Files are replaced atomically. A full disk loses a file, with a warning, and does not
    end the run, but the result says what was `lost`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = path / "model" / "best"
        self.last = path / "model" / "last"
        self.metrics = path / "metrics.jsonl"
        self.on_log: Callable[[dict[str, Any]], None] | None = None
        """Called with each line of metrics.jsonl."""
        self.lost: dict[str, str] = {}
        """What could not be written, and has not been written since -> the reason."""
        self._trackers: Trackers | None = None
        self._step = 0  # that of the newest line of metrics.jsonl
        self._warned = False

    @classmethod
    def create(cls, out: str | Path, name: str) -> RunFolder:
        """Make `out`/`name`-<n> with the next free number, the same for all processes of the run.

        Raises UsageError if the folder cannot be written.
        """
        return cls(world.gather(cls._make(Path(out), name))[0])

    @staticmethod
    @world.on_main
    def check(out: Path, resumed: RunFolder | None) -> None:
        """Raise UsageError if nothing can be written in `out`, or in the folder to resume, before data are opened."""
        if resumed is None:
            task = f"write a run folder in {out.resolve()}"
            with writing(out, UsageError, task=task):
                check_writable(out, folder=True)
        else:
            check_writable(resumed.path, UsageError, folder=True)

    @staticmethod
    @world.on_main
    def _make(out: Path, name: str) -> Path:
        if not name or re.search(r"[/\\\0]", name):
            raise UsageError(f"a run cannot be named {name!r}, which must be a folder name without slashes")
        with writing(out / name, UsageError, task=f"write a run folder in {out.resolve()}"):
            out.mkdir(parents=True, exist_ok=True)
            taken = re.compile(re.escape(name) + r"-(\d+)")
            numbers = [int(match[1]) for entry in os.scandir(out) if (match := taken.fullmatch(entry.name))]
            number = max(numbers, default=0) + 1
            while True:
                try:  # mkdir is atomic: of two runs that start together, only one gets the number
                    (out / f"{name}-{number}").mkdir()
                    break
                except FileExistsError:
                    number += 1
        return out / f"{name}-{number}"

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Return the run folder at `path`. Raises CheckpointError if there is none."""
        path = Path(path)
        if not (path / "run.json").is_file():
            what = "holds no run.json" if path.is_dir() else "does not exist"
            raise CheckpointError(f"{path} {what}: give the folder of an earlier run, such as runs/finetune-1")
        return cls(path)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in file `name`; {} if it is missing or cannot be read."""
        try:
            return read_json_object(self.path / name, CheckpointError)
        except CheckpointError:
            return {}

    def facts(self) -> dict[str, Any]:
        """Return what run.json says, without the entries that have another type than a run writes."""
        return fitting(self.read_json("run.json"))[0]

    def class_names(self) -> list[str]:
        """Return the class names in the order of the outputs; none if classes.json is missing or cannot be read."""
        try:
            value = read_json(self.path / "classes.json", CheckpointError)
        except CheckpointError:
            return []
        return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else []

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` to file `name`; numbers that are not finite become null."""
        self.write_bytes(name, (json_text(value, indent=2) + "\n").encode("utf-8"))

    def write_text(self, name: str, text: str) -> None:
        """Replace file `name` atomically."""
        self.write_bytes(name, text.encode("utf-8"))

    @world.on_main
    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace file `name` atomically."""
        with self.tolerating(name), replacing(self.path / name, folders=False) as partial:
            partial.write_bytes(data)
        if self._trackers is not None and name.endswith(".png"):
            self._trackers.each(lambda tracker: tracker.picture(name.removesuffix(".png"), data, self._step))

    @world.on_main
    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl, and send its numbers to the trackers as "<kind>/<name>"."""
        self._step = step
        line = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        try:
            with writing(self.metrics), open(self.metrics, "ab", opener=_without_waiting) as file:
                file.write((json_text(line) + "\n").encode("utf-8"))
        except OSError as error:
            self._warn("metrics.jsonl", error)
            self.lost["lines of metrics.jsonl"] = str(error)
        if self.on_log is not None:
            self.on_log(line)
        numbers = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if self._trackers is not None and numbers:
            self._trackers.each(lambda tracker: tracker.log(numbers, step))

    @world.main_alone("starting the trackers")
    @world.on_main
    def track(self, run: Run, step: int) -> list[str]:
        """Start the trackers of `run` at `step`. Return how a person sees the run there, as sentences."""
        self._step = step
        self._trackers = Trackers(run.track, TrackedRun.of(run, self.path, self.facts(), step))
        return self._trackers.seen

    def rewind(self, step: int) -> str:
        """Remove the lines of metrics.jsonl after `step`, because a resumed run writes them again.

        Return what is wrong with the file, if anything: lines that cannot be read are left out, and what is not a
        readable file is renamed, so that a new one can take its place.
        """
        dropped = Dropped()
        try:
            with (
                open_regular(self.metrics) as earlier,
                self.tolerating("metrics.jsonl"),
                replacing(self.metrics, folders=False) as partial,
                open(partial, "wb") as file,
            ):
                kept = (text for text, line in log_lines(earlier, dropped) if line["step"] <= step)
                file.writelines(text + b"\n" for text in kept)
        except OSError as error:
            if not os.path.lexists(self.metrics):
                return ""
            aside = self.metrics.with_name(f"metrics.jsonl.unreadable-{time.time_ns()}")
            with self.tolerating("metrics.jsonl"):
                os.replace(self.metrics, aside)
            return f"metrics.jsonl cannot be read ({error.strerror}). It is called {aside.name} now; a new file begins"
        return f"metrics.jsonl: {dropped}" if dropped.count else ""

    @contextmanager
    def tolerating(self, what: str) -> Iterator[None]:
        """Context in which a full or broken disk loses `what`, with a warning, and does not end the run."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._warn(what, error)
            self.lost[what] = str(error)
        else:
            self.lost.pop(what, None)

    def close(self) -> None:
        """Send the report of a finished run to the trackers, and close them."""
        if self._trackers is None:
            return
        finished, page = "result" in self.facts(), self.path / "report.html"
        if finished and page.is_file():
            self._trackers.each(lambda tracker: tracker.report(page))
        self._trackers.each(lambda tracker: tracker.close(finished=finished))
        self._trackers = None

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            print(f"warning: could not write {what} in {self.path}: {error}. Training continues.", file=sys.stderr)
        self._warned = True


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody reads is an OSError."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
