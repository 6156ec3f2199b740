"""A long measurement that survives interruptions: it is cut into cells, and each finished cell is a line of a log."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import record

Cell = dict[str, Any]


def arguments(doc: str | None, log: Path) -> argparse.ArgumentParser:
    """Return a parser with the flags that every measurement of cells has, for `begin`."""
    parser = record.arguments(doc)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--log", type=Path, default=log, help="file of finished runs")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="start no run after this time")
    return parser


class Cells:
    """The finished cells of a log, and a budget of minutes for the others.

    The key of a cell holds every setting that its result depends on, so that results of other settings are never
    reused. Once the budget is spent, the cell in progress is finished and no other is started.
    """

    def __init__(self, log: Path | None, minutes: float | None = None) -> None:
        self.log, self.missing = log, 0
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.done: dict[str, Cell] = {}
        for line in log.read_text().splitlines() if log and log.exists() else ():
            if line:
                row = json.loads(line)
                self.done[_name(row["key"])] = row["result"]

    @classmethod
    def begin(cls, options: argparse.Namespace, threads: int | None = 1) -> Cells:
        """Return the cells of the flags of `arguments`. A quick measurement has one seed and a log of its own.

        threads: Of each child process, unless `--threads` is given (None: all).
        """
        if options.quick:
            options.seeds, options.log = [0], Path(tempfile.mkdtemp()) / "log.jsonl"
        if threads := options.threads or threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        return cls(options.log, options.stop_after)

    def say_missing(self) -> None:
        """Say how many runs are missing, if there are any."""
        if self.missing:
            print(f"{self.missing} runs are missing: the same command continues", file=sys.stderr)

    def find(self, **key: Any) -> Cell | None:
        """Return the result of a finished cell; None for any other."""
        return self.done.get(_name(key))

    def train(self, compute: Callable[[Path], Cell], **key: Any) -> Cell | None:
        """Do the same as `get` for a cell that trains in a folder, with `vitrail ... --resume=auto`.

        The folder is removed when the cell is finished. After an interruption, the same cell of the same log gets the
        same folder.
        """
        name = hashlib.sha256(f"{self.log and self.log.resolve()} {_name(key)}".encode()).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"vitrail-cell-{name}"

        def computed() -> Cell:
            place.mkdir(exist_ok=True)
            found = compute(place)
            shutil.rmtree(place)
            return found

        return self.get(computed, **key)

    def get(self, compute: Callable[[], Cell], **key: Any) -> Cell | None:
        """Return the result of a cell, from the log or computed and logged; None if the budget is spent."""
        if (name := _name(key)) in self.done:
            return self.done[name]
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.missing += 1
            return None
        result = self.done[name] = compute()
        print({**key, **result}, file=sys.stderr, flush=True)
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a") as file:
                file.write(json.dumps({"key": key, "result": result}) + "\n")
        return result


def _name(key: Cell) -> str:
    """Return a text in which 2 and 2.0 are equal, so that a default value equals the same value typed."""
    same = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in key.items()
    }
    return json.dumps(same, sort_keys=True)
