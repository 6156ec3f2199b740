"""Predictions that an interrupted call has finished, so that the next call continues where it stopped.

`.answers.csv.part` beside answers.csv is JSON lines: first the key of the call (its network and settings), then a row
for each file, or tile of a file, in order. It is deleted when answers.csv is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vitrail.data.images.tiles import TileBox
from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.evaluation.predict import Prediction, Row, Unreadable
from vitrail.files import lock


class PartialPredictions:
    """The finished rows of earlier calls for `out` with the same `key`, up to the first file that differs.

    `files` are the files of the rows, in order. `finished` is the number of rows that are already predicted. Raises
    UsageError if the partial file cannot be written or another process is writing it.
    """

    def __init__(self, out: Path, key: Any, files: Iterable[Path]) -> None:
        self.path = out.with_name(f".{out.name}.part")
        self.finished = 0
        head = (json.dumps(key, sort_keys=True) + "\n").encode()
        with writing(self.path, UsageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = file = open(self.path, "a+b")  # noqa: SIM115 - open, and so locked, until `close`
            try:
                lock(file, wait=False)
            except BlockingIOError as error:
                raise UsageError(f"another process is writing {out}: wait for it, or choose another file") from error
            file.seek(0)
            whole = len(head) if file.readline(len(head)) == head else 0
            for line, path in zip(file if whole else (), files, strict=False):
                row = _read(line)
                if row is None or row.path != str(path):
                    break
                whole += len(line)
                self.finished += 1
            file.truncate(whole)  # removes an incomplete last row, or the rows of another call
            if not whole:
                file.write(head)
            file.flush()

    def rows(self, predict: Callable[[int], Iterable[Row]]) -> Iterator[Row]:
        """Yield the finished rows, then those of `predict(finished)`, each after it is written to the partial file."""
        with open(self.path, "rb") as file:
            for line in islice(file, 1, None):
                row = _read(line)
                assert row is not None
                yield row
        with open(self.path, "a", encoding="utf-8", buffering=1) as file:
            for row in predict(self.finished):
                file.write(json.dumps(row) + "\n")
                yield row

    def close(self) -> None:
        """Delete the partial file, because all rows are in their final file."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def _read(line: bytes) -> Row | None:
    """Return a row of the partial file; None if the line is incomplete."""
    try:
        path, first, *more = json.loads(line)
        row = Unreadable(path, first, *more) if isinstance(first, str) else Prediction(path, first, *more)
        if isinstance(row, Prediction) and row.box is not None:
            row = row._replace(box=TileBox(*row.box))
    except (ValueError, TypeError):
        return None
    return row if line.endswith(b"\n") else None
