"""The run folder: everything that a run writes, in one place. It never overwrites another run.

```
runs/<name>-<n>/
  config.yaml      the run with every decision; it repeats the run
  run.json         command, versions, commit, seed, data fingerprint, machine, decisions, result
  classes.json     class names in the order of the outputs
  split.json       the held-out images, if the data have no validation split
  metrics.jsonl    one JSON object per line: training, evaluations, skipped steps
  batch.png        the first augmented batch, as the network saw it
  evaluation.npz   the best model's predictions for the validation images
  checkpoints/     to resume from
  model/best, model/last   weights + card
  events.out...    the same curves for TensorBoard
```
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vitrail import world
from vitrail.errors import CheckpointError, UsageError


class RunFolder:
    """Paths and writers of one run. `RunFolder.create` makes a new folder, `RunFolder.open` opens an existing one.

    Only the main process writes. Files are replaced atomically. A full disk loses a file, with a warning, and never
    ends the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = path / "model" / "best"
        self.last = path / "model" / "last"
        self.metrics = path / "metrics.jsonl"
        self._board: Any = None
        self._warned = False

    @classmethod
    def create(cls, out: str | Path, name: str) -> RunFolder:
        """Make `out`/`name`-<n> with the next free number, the same for all processes of the run.

        Raises UsageError if the folder cannot be written.
        """
        return cls(world.gather(cls._make(Path(out), name))[0])

    @staticmethod
    @world.on_main
    def _make(out: Path, name: str) -> Path:
        if not name or re.search(r"[/\\\0]", name):
            raise UsageError(f"a run cannot be named {name!r}, which must be a folder name without slashes")
        try:
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
        except OSError as error:
            raise UsageError(f"cannot write a run folder in {out.resolve()}: {error.strerror or error}") from error
        return out / f"{name}-{number}"

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Return the run folder at `path`. Raises CheckpointError if there is none."""
        path = Path(path)
        if not (path / "run.json").is_file():
            what = "holds no run.json" if path.is_dir() else "does not exist"
            raise CheckpointError(f"{path} {what}: give the folder of an earlier run, such as runs/train-1")
        return cls(path)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in file `name`; {} if it is missing or incomplete."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` to file `name`; numbers that are not finite become null."""
        self.write_text(name, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace file `name` atomically."""
        self.write_bytes(name, text.encode("utf-8"))

    @world.on_main
    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace file `name` atomically."""
        target = self.path / name
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._lost(name, error)

    @world.on_main
    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl, and its numbers to TensorBoard as "<kind>/<name>"."""
        line = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(plain(line), ensure_ascii=False) + "\n")
        except OSError as error:
            self._lost("metrics.jsonl", error)
        if self._board is not None:
            try:
                for name, value in values.items():
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        self._board.add_scalar(f"{kind}/{name}", value, step)
            except Exception as error:  # a tracker must never stop a run
                self._lost("TensorBoard events", error)
                self._board = None

    @world.main_alone("starting TensorBoard")
    @world.on_main
    def open_board(self, step: int) -> None:
        """Start TensorBoard events, and hide those that an earlier process wrote from `step` on; optional."""
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.path), purge_step=step or None)
        except Exception as error:  # a tracker must never stop a run
            self._lost("TensorBoard events", error)

    def rewind(self, step: int) -> None:
        """Remove the lines of metrics.jsonl after `step`, because a resumed run writes them again."""
        kept = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:  # incomplete because of a kill
                continue
            if line.get("step", 0) <= step:
                kept.append(text)
        self.write_text("metrics.jsonl", "".join(f"{text}\n" for text in kept))

    @contextmanager
    def tolerating(self, what: str) -> Iterator[None]:
        """Context in which a full or broken disk loses `what`, with a warning, and does not end the run."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._lost(what, error)

    def close(self) -> None:
        """Write buffered events and close."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _lost(self, what: str, error: Exception) -> None:
        if not self._warned:
            print(f"warning: could not write {what} in {self.path}: {error}. Training continues.", file=sys.stderr)
        self._warned = True


def plain(value: Any) -> Any:
    """Return `value` as JSON values: text for paths, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
