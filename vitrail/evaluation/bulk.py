"""Predictions or features for a data set of any size: one result file per input shard, and a marker when it is done.

```
FOLDER/
    job.json                     data, weights and settings; the folder rejects a job with other values
    00000-train-0000.parquet     one row per image: id, split (if there are splits), label and the result
    00000-train-0000.done.json   images, rows, size and sha256 of that file, and the unreadable images
    complete.json                written when all parts are done and hold every image once
```

Processes divide the parts by number and do not communicate. A part gets its name when it is complete, and its marker
afterwards. A killed run may leave a part without a marker; the next run computes that part again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.cache import pa, pq
from vitrail.data.item import IndexedSource, Subset, ids
from vitrail.data.sources.folder import Located
from vitrail.disk import writing
from vitrail.errors import DataError, UsageError
from vitrail.files import read_json_object, refuse_other_files, replacing, sha256, write_once
from vitrail.words import as_text

JOB, COMPLETE = "job.json", "complete.json"
CHUNK = 8192
"""Images per part if the data set has no shards."""
GROUP = 16 * 2**20
"""Bytes of results that are in memory before they are written, as one row group of the file."""

UnreadableImages = list[tuple[str, str]]
"""(id, reason) of images that cannot be read."""
ResultColumns = Mapping[str, pa.Array]
"""Results for some images: columns of one length, one of them "id"."""
ComputeColumns = Callable[[IndexedSource, Callable[[ResultColumns], None]], UnreadableImages]
"""Images, and a function that receives their results -> the unreadable images.

It receives columns of the same names and types again and again, for the readable images in their order, and first of
all columns of no image: a part without a readable image has the same columns as the others."""


class ResultPart(NamedTuple):
    """Images whose results go to one file."""

    name: str
    source: IndexedSource
    indices: np.ndarray
    split: str | None = None
    """The split that the images are in; None if the data set has no splits."""


def parts(splits: dict[str, IndexedSource], path: str | Path | None = None) -> list[ResultPart]:
    """Return the parts of a data set: its shards, or pieces of `CHUNK` images if it has none.

    path: The data set as the user named it, which the ids of images are relative to (default: ids as in the splits).
    """
    every: list[ResultPart] = []
    for split, source in splits.items():
        begins = range(0, len(source), CHUNK)
        pieces = [(split or "all", np.arange(begin, min(begin + CHUNK, len(source)))) for begin in begins]
        if (shards := getattr(source, "parts", None)) is not None:
            pieces = shards()
        shown = source if path is None else Located(source, split if len(splits) > 1 else "", path)
        for name, indices in pieces:
            every.append(ResultPart(f"{len(every):05d}-{name}", shown, indices, split if len(splits) > 1 else None))
    return every


@dataclass(frozen=True)
class State:
    """Progress of a job."""

    folder: Path
    parts: int
    done: int
    images: int
    """Number of images in the parts that are done."""
    bad: UnreadableImages
    """Unreadable images in the parts that are done."""

    @property
    def complete(self) -> bool:
        """Return whether all parts are done."""
        return self.done == self.parts


class Job:
    """The parts of one data set with their results in one folder. `about` holds the facts that identify the job.

    path: See `parts`.

    Raises UsageError if the folder holds another job or other files, DataError if it cannot be written.
    """

    def __init__(
        self, folder: Path, splits: dict[str, IndexedSource], about: dict[str, Any], path: str | Path | None = None
    ) -> None:
        self.folder = folder
        self.parts = parts(splits, path)
        if len(splits) > 1:
            about = {**about, "splits": list(splits)}
        about = {**about, "parts": len(self.parts), "images": sum(len(source) for source in splits.values())}
        written = folder / JOB
        with writing(folder, DataError):
            folder.mkdir(parents=True, exist_ok=True)
            if not written.exists():
                # another process may begin the same job between these lines
                refuse_other_files(folder, lambda name: name.startswith(".") or written.exists(), UsageError)
                write_once(written, json.dumps(about, indent=1))
        there = read_json_object(written, DataError)
        if wrong := [name for name in {**there, **about} if there.get(name) != about.get(name)]:
            lines = "".join(f"\n  {name}: {there.get(name)!r} there, {about.get(name)!r} now" for name in wrong)
            raise UsageError(f"{folder} holds the results of another job. Choose a new folder. Differences:{lines}")

    @property
    def images(self) -> int:
        """Return the number of images of the data set."""
        return sum(len(part.indices) for part in self.parts)

    def run(
        self, compute: ComputeColumns, rank: int, size: int, progress: Callable[[int, int], None] | None = None
    ) -> State:
        """Compute the unfinished parts with number % size == rank, and return the progress of the job.

        `progress(images done, total images)` is called after each part of this process.
        """
        mine = self.parts[rank::size]
        done, total = 0, sum(len(part.indices) for part in mine)
        for part in mine:
            self.finish(part, compute)
            done += len(part.indices)
            if progress is not None:
                progress(done, total)
        return self.checked()

    def finish(self, part: ResultPart, compute: ComputeColumns) -> None:
        """Compute a part unless it is done."""
        if self.marker(part) is None:
            self._write(part, compute)

    def checked(self) -> State:
        """Return the progress of the job, after a check of a complete one."""
        state = self.state()
        if state.complete:
            self.check()
        return state

    def marker(self, part: ResultPart) -> dict[str, Any] | None:
        """Return the marker of a part; None if the part is not done or its file has another size."""
        try:
            facts = read_json_object(self._path(part, "done.json"), DataError)
            return facts if self._path(part, "parquet").stat().st_size == facts["bytes"] else None
        except (DataError, OSError, KeyError):
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
            partial.write_text(
                json.dumps({"images": state.images, "unreadable": len(state.bad), "parts": state.parts}), "utf-8"
            )

    def merge(self, target: Path) -> None:
        """Write the results of all parts to one .parquet, in the order of the data. One row group is in memory.

        Raises DataError if a part is not done.
        """
        files = [self._finished(part)[0] for part in self.parts]
        with replacing(target) as partial, pq.ParquetWriter(partial, pq.read_schema(files[0])) as writer:
            for file in files:
                with pq.ParquetFile(file) as part:
                    for group in range(part.num_row_groups):
                        writer.write_table(part.read_row_group(group))

    def _finished(self, part: ResultPart) -> tuple[Path, dict[str, Any]]:
        """Return file and marker of a part. Raises DataError if it is not done."""
        file, marker = self._path(part, "parquet"), self.marker(part)
        if marker is None:
            raise DataError(f"{file} is not done. Run the same command again")
        return file, marker

    def _check_part(self, part: ResultPart) -> None:
        file, marker = self._finished(part)
        if sha256(file) != marker["sha256"]:
            raise DataError(f"{file} has changed since it was written. Remove it and run the same command again")
        unread = {id for id, _ in marker["bad"]}
        answered = pq.read_table(file, columns=["id"])["id"].to_pylist()
        if answered != [as_text(id) for id in ids(part.source, part.indices) if id not in unread]:
            raise DataError(f"{file} does not hold each image of its part once. Remove it and run the command again")

    def _write(self, part: ResultPart, compute: ComputeColumns) -> None:
        file = self._path(part, "parquet")
        with writing(file, DataError):
            with replacing(file) as partial:
                with closing(_Rows(partial, part.split)) as rows:
                    bad = compute(Subset(part.source, part.indices), rows.add)
                written = {"bytes": partial.stat().st_size, "sha256": sha256(partial)}
            facts = {"images": len(part.indices), "rows": rows.count, "bad": bad, **written}
            with replacing(self._path(part, "done.json")) as partial:
                partial.write_text(json.dumps(facts), "utf-8")

    def _path(self, part: ResultPart, suffix: str) -> Path:
        return self.folder / f"{part.name}.{suffix}"


class _Rows:
    """A .parquet file that grows by rows, the split behind the ids, and is written in groups of about `GROUP` bytes."""

    def __init__(self, path: Path, split: str | None) -> None:
        self.count = 0
        self._path, self._split = path, split
        self._tables: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None

    def add(self, columns: ResultColumns) -> None:
        if self._split is not None:
            ids = columns["id"]
            columns = {"id": ids, "split": pa.array([self._split] * len(ids), pa.string()), **columns}
        table = pa.table(dict(columns))
        self.count += len(table)
        self._tables.append(table)
        if sum(table.nbytes for table in self._tables) >= GROUP:
            self._flush()

    def _flush(self) -> None:
        group = pa.concat_tables(self._tables).combine_chunks()
        self._tables = []
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, group.schema)
        self._writer.write_table(group)

    def close(self) -> None:
        """Write the other rows and the end of the file."""
        if self._tables:
            self._flush()
        if self._writer is not None:
            self._writer.close()
