"""Predictions or features for a data set of any size: one result file per input shard, and a marker when it is done.

```
FOLDER/
    job.json                     data, weights and settings; the folder rejects a job with other values
    00000-train-0000.parquet     one row per image: id, label and the result
    00000-train-0000.done.json   images, rows, size and sha256 of that file, and the unreadable images
    complete.json                written when all parts are done and hold every image once
```

Processes divide the parts by number and do not communicate. A part gets its name when it is complete, and its marker
afterwards. A killed run may leave a part without a marker; the next run computes that part again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitrail.data.item import Listed, View, ids
from vitrail.errors import DataError, UsageError
from vitrail.files import replacing

JOB, COMPLETE = "job.json", "complete.json"
CHUNK = 8192
"""Images per part if the data set has no shards."""

Bad = list[tuple[str, str]]
"""(id, reason) of images that cannot be read."""
Answer = Callable[[Listed], tuple[dict[str, pa.Array], Bad]]
"""Images -> columns of the readable images in their order, with a column "id", and the unreadable images."""


class Part(NamedTuple):
    """Images whose results go to one file."""

    name: str
    source: Listed
    indices: np.ndarray

    @property
    def images(self) -> View:
        """Return the images of this part as a source."""
        return View(self.source, self.indices)


def parts(splits: dict[str, Listed]) -> list[Part]:
    """Return the parts of a data set: its shards, or pieces of `CHUNK` images if it has none."""
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
    """Progress of a job."""

    folder: Path
    parts: int
    done: int
    images: int
    """Number of images in the parts that are done."""
    bad: Bad
    """Unreadable images in the parts that are done."""

    @property
    def complete(self) -> bool:
        """Return whether all parts are done."""
        return self.done == self.parts


class Job:
    """The parts of one data set with their results in one folder. `about` holds the facts that identify the job.

    Raises UsageError if the folder holds another job or other files, DataError if it cannot be written.
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
                    raise UsageError(f"{folder} holds other files ({', '.join(strangers[:3])}). Choose a new folder")
                with replacing(written) as partial:
                    partial.write_text(json.dumps(about, indent=1))
            there = json.loads(written.read_text())
        except OSError as error:
            raise DataError(f"cannot write in {folder}: {error.strerror or error}") from error
        if wrong := [name for name in {**there, **about} if there.get(name) != about.get(name)]:
            lines = "".join(f"\n  {name}: {there.get(name)!r} there, {about.get(name)!r} now" for name in wrong)
            raise UsageError(f"{folder} holds the results of another job. Choose a new folder. Differences:{lines}")

    def run(self, answer: Answer, rank: int, size: int, tell: Callable[[int, int], None] | None = None) -> State:
        """Compute the unfinished parts with number % size == rank, and return the progress of the job.

        `tell(images done, total images)` is called after each part of this process.
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
        """Return the marker of a part; None if the part is not done or its file has another size."""
        try:
            facts = dict(json.loads(self._path(part, "done.json").read_text()))
            return facts if self._path(part, "parquet").stat().st_size == facts["bytes"] else None
        except (OSError, ValueError, KeyError):
            return None

    def state(self) -> State:
        """Return the progress of the job, from its markers."""
        markers = [marker for part in self.parts if (marker := self.marker(part)) is not None]
        bad = [(str(id), str(reason)) for marker in markers for id, reason in marker["bad"]]
        return State(self.folder, len(self.parts), len(markers), sum(m["images"] for m in markers), bad)

    def check(self) -> None:
        """Check that every image has one result or one reason why it is unreadable, and write complete.json.

        Raises DataError with the name of a part that is missing, has changed, or does not hold its images.
        """
        if (self.folder / COMPLETE).exists():
            return
        for part in self.parts:
            self._check_part(part)
        state = self.state()
        with replacing(self.folder / COMPLETE) as partial:
            partial.write_text(json.dumps({"images": state.images, "unreadable": len(state.bad), "parts": state.parts}))

    def tables(self) -> Iterator[pa.Table]:
        """Yield the results of each part, in the order of the data. Raises DataError if a part is not done."""
        for part in self.parts:
            if self.marker(part) is None:
                raise DataError(f"{self._path(part, 'parquet')} is not done. Run the same command again")
            yield pq.read_table(self._path(part, "parquet"))

    def merge(self, target: Path) -> None:
        """Write the results of all parts to one .parquet, in the order of the data. One part at a time is in memory."""
        writer: pq.ParquetWriter | None = None
        with replacing(target) as partial:
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
            raise DataError(f"{file} is not done. Run the same command again")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != marker["sha256"]:
                raise DataError(f"{file} has changed since it was written. Remove it and run the same command again")
        unread = {id for id, _ in marker["bad"]}
        answered = pq.read_table(file, columns=["id"])["id"].to_pylist()
        if answered != [id for id in ids(part.source, part.indices) if id not in unread]:
            raise DataError(f"{file} does not hold each image of its part once. Remove it and run the command again")

    def _write(self, part: Part, columns: dict[str, pa.Array], bad: Bad) -> None:
        file = self._path(part, "parquet")
        try:
            with replacing(file) as partial:
                pq.write_table(pa.table(columns), partial)
                with partial.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                size = partial.stat().st_size
            facts = {"images": len(part.indices), "rows": len(columns["id"]), "bad": bad}
            with replacing(self._path(part, "done.json")) as partial:
                partial.write_text(json.dumps({**facts, "bytes": size, "sha256": digest}))
        except OSError as error:
            raise DataError(f"cannot write {file}: {error.strerror or error}") from error

    def _path(self, part: Part, suffix: str) -> Path:
        return self.folder / f"{part.name}.{suffix}"
