"""Predictions as they come, kept beside the file they are for: a call that was killed is gone on from.

`.answers.csv.part` beside answers.csv is JSON lines: the key of the call (which network, what of it), then a row for
each file in its order. It goes when answers.csv is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vitrail.errors import UsageError
from vitrail.evaluation.predict import Prediction, Row, Unreadable, as_text
from vitrail.files import lock


class Journal:
    """The rows that earlier calls for `out` have left, as far as `key` and `files` are the same; and their sequel.

    `files` are the files asked for, in order. `kept` is how many of them need no prediction. Raises UsageError where
    it cannot be written.
    """

    def __init__(self, out: Path, key: Any, files: Iterable[Path]) -> None:
        self.path = out.with_name(f".{out.name}.part")
        self.kept = 0
        head = (json.dumps(key, sort_keys=True) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = file = open(self.path, "a+b")  # noqa: SIM115 - open, and so locked, until `close`
            lock(file, wait=False)
            file.seek(0)
            whole = len(head) if file.readline(len(head)) == head else 0
            for line, path in zip(file if whole else (), files, strict=False):
                row = _read(line)
                if row is None or row.path != as_text(path):
                    break
                whole += len(line)
                self.kept += 1
            file.truncate(whole)  # what was torn by the kill, or is of another call
            if not whole:
                file.write(head)
            file.flush()
        except BlockingIOError as error:
            raise UsageError(f"another process is writing {out}: wait for it, or give another file") from error
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error

    def rows(self, predict: Callable[[int], Iterable[Row]]) -> Iterator[Row]:
        """Yield the rows that are kept, then those of `predict(kept)`, each once it is kept as well."""
        with open(self.path, "rb") as file:
            for line in islice(file, 1, None):
                row = _read(line)
                assert row is not None
                yield row
        with open(self.path, "a", encoding="utf-8", buffering=1) as file:
            for row in predict(self.kept):
                file.write(json.dumps(row) + "\n")
                yield row

    def close(self) -> None:
        """Remove it: everything is where it belongs."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def _read(line: bytes) -> Row | None:
    """A row of the file; None for one that was torn."""
    try:
        path, first, second = json.loads(line)
    except (ValueError, TypeError):
        return None
    if not line.endswith(b"\n"):
        return None
    return Unreadable(path, first, second) if isinstance(first, str) else Prediction(path, first, second)
