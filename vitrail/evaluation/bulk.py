"""Answers for a data set of any size, part by part: one file per input shard, and a marker once it is whole.

```
FOLDER/
    job.json                     data, weights and settings; another job is refused
    00000-train-0000.parquet     one row per image: id, label and the answer
    00000-train-0000.done.json   images, rows, size and sha256 of that file, and what could not be read
    complete.json                once all parts are there and hold every image once
```

Processes share the parts by number and say nothing to one another. A part appears under its name when it is whole, its
marker after it; a run that was killed leaves parts without a marker, which the next one makes again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitrail.data.item import Listed, View, ids
from vitrail.errors import DataError, UsageError

JOB, COMPLETE = "job.json", "complete.json"
CHUNK = 8192
"""Images of a part where the data set has no shards."""

Bad = list[tuple[str, str]]
"""(id, reason) of images that cannot be read."""
Answer = Callable[[Listed], tuple[dict[str, pa.Array], Bad]]
"""Images -> columns of those that can be read, in their order, "id" among them, and the others."""


class Part(NamedTuple):
    """Images that are answered together."""

    name: str
    source: Listed
    indices: np.ndarray

    @property
    def images(self) -> View:
        """The images as a source of their own."""
        return View(self.source, self.indices)


def parts(splits: dict[str, Listed]) -> list[Part]:
    """Cut the splits of a data set into parts: its shards, or pieces of `CHUNK` images."""
    found: list[Part] = []
    for split, source in splits.items():
        shards = getattr(source, "parts", None)
        pieces = _pieces(source, split) if shards is None else shards()
        found += [Part(f"{len(found) + n:05d}-{name}", source, indices) for n, (name, indices) in enumerate(pieces)]
    return found


def _pieces(source: Listed, split: str) -> list[tuple[str, np.ndarray]]:
    begins = range(0, len(source), CHUNK)
    return [(split or "all", np.arange(begin, min(begin + CHUNK, len(source)))) for begin in begins]


@dataclass(frozen=True)
class State:
    """How far a job is."""

    folder: Path
    parts: int
    done: int
    images: int
    """Images in the parts that are done."""
    bad: Bad
    """Of those, what could not be read."""

    @property
    def complete(self) -> bool:
        """Are all parts done?"""
        return self.done == self.parts


class Job:
    """The parts of one data set, answered in one way, in one folder; `about` is what another job differs in.

    Raises UsageError for a folder that holds another job, DataError where it cannot be written.
    """

    def __init__(self, folder: Path, splits: dict[str, Listed], about: dict[str, Any]) -> None:
        self.folder = folder
        self.parts = parts(splits)
        about = {**about, "parts": len(self.parts), "images": sum(len(source) for source in splits.values())}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = folder / JOB
            if not written.exists():
                if strangers := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
                    raise UsageError(f"{folder} holds other files ({', '.join(strangers[:3])}): choose a new folder")
                with _replacing(written) as partial:
                    partial.write_text(json.dumps(about, indent=1))
            there = json.loads(written.read_text())
        except OSError as error:
            raise DataError(f"cannot write in {folder}: {error.strerror or error}") from error
        if wrong := [name for name in {**there, **about} if there.get(name) != about.get(name)]:
            lines = "".join(f"\n  {name}: {there.get(name)!r} there, {about.get(name)!r} now" for name in wrong)
            raise UsageError(f"{folder} holds answers to another question; choose a new folder:{lines}")

    def run(self, answer: Answer, rank: int, size: int, tell: Callable[[int, int], None] | None = None) -> State:
        """Answer the parts with number % size == rank that are not done, and return how far the job is.

        `tell(images done, images in all)` hears of the progress of this process.
        """
        mine = self.parts[rank::size]
        done, total = 0, sum(len(part.indices) for part in mine)
        for part in mine:
            if self.marker(part) is None:
                self._write(part, *answer(part.images))
            done += len(part.indices)
            if tell is not None:
                tell(done, total)
        state = self.state()
        if state.complete:
            self.check()
        return state

    def marker(self, part: Part) -> dict[str, Any] | None:
        """Return what the marker of a part says, None where it is not done or its file has another size."""
        try:
            facts = dict(json.loads(self._path(part, "done.json").read_text()))
            return facts if self._path(part, "parquet").stat().st_size == facts["bytes"] else None
        except (OSError, ValueError, KeyError):
            return None

    def state(self) -> State:
        """Return how far the job is, by its markers."""
        markers = [marker for part in self.parts if (marker := self.marker(part)) is not None]
        bad = [(str(id), str(reason)) for marker in markers for id, reason in marker["bad"]]
        return State(self.folder, len(self.parts), len(markers), sum(m["images"] for m in markers), bad)

    def check(self) -> None:
        """Look whether every image has one answer, or a reason why not, and note it in complete.json.

        Raises DataError naming the part that is missing, has changed, or holds other images than it should.
        """
        if (self.folder / COMPLETE).exists():
            return
        for part in self.parts:
            self._check_part(part)
        state = self.state()
        with _replacing(self.folder / COMPLETE) as partial:
            partial.write_text(json.dumps({"images": state.images, "unreadable": len(state.bad), "parts": state.parts}))

    def tables(self) -> Iterator[pa.Table]:
        """Yield the answers of each part, in the order of the data. Raises DataError where one is not done."""
        for part in self.parts:
            if self.marker(part) is None:
                raise DataError(f"{self._path(part, 'parquet')} is not done: run the same command again")
            yield pq.read_table(self._path(part, "parquet"))

    def merge(self, target: Path) -> None:
        """Write the answers of all parts to one .parquet, in the order of the data, a part in memory at a time."""
        writer: pq.ParquetWriter | None = None
        with _replacing(target) as partial:
            try:
                for table in self.tables():
                    writer = writer or pq.ParquetWriter(partial, table.schema)
                    writer.write_table(table)
            finally:
                if writer is not None:
                    writer.close()

    def _check_part(self, part: Part) -> None:
        file, marker = self._path(part, "parquet"), self.marker(part)
        if marker is None:
            raise DataError(f"{file} is not done: run the same command again")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != marker["sha256"]:
                raise DataError(f"{file} has changed since it was written: remove it and run the same command again")
        unread = {id for id, _ in marker["bad"]}
        answered = pq.read_table(file, columns=["id"])["id"].to_pylist()
        if answered != [id for id in ids(part.source, part.indices) if id not in unread]:
            raise DataError(f"{file} does not hold each image of its part once: remove it and run the command again")

    def _write(self, part: Part, columns: dict[str, pa.Array], bad: Bad) -> None:
        file = self._path(part, "parquet")
        try:
            with _replacing(file) as partial:
                pq.write_table(pa.table(columns), partial)
                with partial.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                size = partial.stat().st_size
            facts = {"images": len(part.indices), "rows": len(columns["id"]), "bad": bad}
            with _replacing(self._path(part, "done.json")) as partial:
                partial.write_text(json.dumps({**facts, "bytes": size, "sha256": digest}))
        except OSError as error:
            raise DataError(f"cannot write {file}: {error.strerror or error}") from error

    def _path(self, part: Part, suffix: str) -> Path:
        return self.folder / f"{part.name}.{suffix}"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`, which it takes, durably, on leaving; on an error it is removed."""
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
