"""`predict` and `embed` with a folder as --out: results for a data set, part by part, by any number of processes."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitrail.errors import DataError, UsageError
from vitrail.files import check_writable
from vitrail.terminal import ProgressLine, unreadable_json
from vitrail.verbs.network import fingerprint_of, with_answers
from vitrail.words import as_text, counted, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import pyarrow as pa
    from torch import Tensor

    from vitrail.data.item import IndexedSource
    from vitrail.data.loading.loader import Loader
    from vitrail.data.settings import Data
    from vitrail.evaluation.ahead import Computed
    from vitrail.evaluation.bulk import ComputeColumns, Job, ResultColumns, State, UnreadableImages
    from vitrail.evaluation.classify import Predict
    from vitrail.verbs.features import Embedder, Tokens
    from vitrail.verbs.flags.compute import Compute
    from vitrail.verbs.flags.keywords import NetworksLike
    from vitrail.weights.card import Card

    Arrays = dict[str, np.ndarray]
    Columns = dict[str, pa.Array]

log = logging.getLogger("vitrail")
T = TypeVar("T")


@one_line
@dataclass(frozen=True)
class BulkProgress:
    """How much of a data set has results."""

    state: State
    merged: str | None = None
    """The file into which all results were merged."""
    exit_code: int = 0
    """1 if `strict` is set and an image could not be read."""

    @property
    def out(self) -> str:
        """The folder of the results."""
        return str(self.state.folder)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """(image, reason) of each image that could not be read."""
        return self.state.bad

    @property
    def summary(self) -> str:
        """The progress as text for a terminal."""
        return show(self)


def is_bulk(out: str | Path | None) -> bool:
    """Return whether --out is a folder, which gets the results for a data set part by part."""
    return out is not None and (Path(out).suffix == "" or Path(out).is_dir())


def open_job(
    verb: str,
    model: NetworksLike,
    paths: tuple[str | Path, ...],
    out: str | Path,
    data: Data,
    card: Card,
    **settings: Any,
) -> Job:
    """Open the data, for a network with this `card`, and the folder for the results.

    Raises UsageError and DataError.
    """
    if len(paths) != 1:
        raise UsageError(f"{out} is a folder, for the results of one data set. Give one data set, or a file as --out")
    from vitrail.data.cache import refuse_within
    from vitrail.data.sources.open import open_to_predict
    from vitrail.data.split import fingerprint
    from vitrail.evaluation.bulk import Job

    folder = refuse_within(out, str(paths[0]))
    splits = open_to_predict(with_answers(data, card)).splits
    about = {"verb": verb, "data": fingerprint(splits), "weights": fingerprint_of(model), **settings}
    return Job(folder, splits, about, data.path)


def run_job(
    job: Job, compute: ComputeColumns, merge: str | Path | None, *, strict: bool = False, on: OnWorkers | None = None
) -> BulkProgress:
    """Compute this process's share of a job, or all of it `on` the workers of a Ray cluster if that has an address.

    The process that finds it complete writes `merge`. Raises DataError.
    """
    from vitrail import world

    if (taken := _taken.get()) is not None:  # this process is a worker, which is told the parts to compute
        taken.append((job, compute))
        return BulkProgress(job.state())
    if merge is not None:
        if Path(merge).suffix != ".parquet":
            raise UsageError(f"--merge {merge} is not valid: results are merged into a file that ends in .parquet")
        check_writable(Path(merge), DataError)
    rank, size = world.share()
    if on is not None and on.address is not None:
        state = on(job, ProgressLine("computed"))
    else:
        if size > 1:
            mine = len(job.parts[rank::size])
            log.info("process %d of %d computes %d of %s", rank + 1, size, mine, counted(len(job.parts), "part"))
        state = job.run(compute, rank, size, ProgressLine("computed"))
    nothing = state.complete and len(state.bad) >= state.images  # as for a file of results
    code = int(bool(state.bad) and (strict or nothing))
    if merge is None or not state.complete:
        return BulkProgress(state, exit_code=code)
    job.merge(Path(merge))
    return BulkProgress(state, str(merge), code)


@dataclass(frozen=True)
class OnWorkers:
    """Computes the parts of a job by workers of the Ray cluster at `address`, through Ray Data.

    Each worker calls the verb with the `arguments` of this call, but for its job's parts, which Ray hands out one by
    one. If a worker or its machine is lost, another one computes its part. All machines must find the model, the images
    and the folder at the same paths.
    """

    verb: Callable[..., object]
    arguments: dict[str, Any]
    """Its local variables when it has been called."""
    subjects: str
    """Name of the variable with its images."""
    address: str | None
    """None: no cluster; then this process computes its share."""

    def __call__(self, job: Job, progress: Callable[[int, int], None]) -> State:
        """Return the progress of the job when all parts that it lacked have been computed."""
        from vitrail.transfer.ray_cluster import connected, cores_of_each, gpus_of_each

        lacking = [{"part": number} for number, part in enumerate(job.parts) if job.marker(part) is None]
        if not lacking:
            return job.checked()
        assert self.address is not None
        ray = connected(self.address)
        try:
            from ray.data import DataContext, from_items

            DataContext.get_current().enable_progress_bars = False
            cores, gpus = cores_of_each(ray), gpus_of_each(ray)
            most = max(1, int(ray.cluster_resources().get("CPU", 1)) // cores)
            computed = from_items(lacking, override_num_blocks=len(lacking)).map_batches(
                _Worker,
                fn_constructor_args=(self.verb, self.absolute(), self.subjects),
                batch_size=1,
                concurrency=(1, most),
                num_cpus=cores,
                num_gpus=gpus,
            )
            done, total = 0, sum(len(job.parts[row["part"]].indices) for row in lacking)
            for row in computed.iter_rows():
                done += len(job.parts[row["part"]].indices)
                progress(done, total)
        finally:
            ray.shutdown()
        return job.checked()

    def absolute(self) -> dict[str, Any]:
        """Return the arguments with absolute paths of files that exist: workers run in other folders."""

        def placed(value: Any) -> Any:
            return os.path.abspath(value) if isinstance(value, str | Path) and os.path.exists(value) else value

        images = tuple(placed(one) for one in self.arguments[self.subjects])
        model = self.arguments["model"]
        model = placed(model) if isinstance(model, str | Path) else tuple(map(placed, model))
        names = {"model": model, "out": os.path.abspath(self.arguments["out"])}
        return {**self.arguments, **names, self.subjects: images, "ray": None, "merge": None}


class _Worker:
    """A process of Ray Data that computes parts of a job. It opens the network and the images once."""

    def __init__(self, verb: Callable[..., object], arguments: dict[str, Any], subjects: str) -> None:
        options = {name: value for name, value in arguments.items() if name not in ("model", subjects, "reading")}
        token = _taken.set([])
        verb(arguments["model"], *arguments[subjects], **options, **arguments["reading"])
        taken = _taken.get()
        assert taken is not None
        ((self._job, self._compute),) = taken
        _taken.reset(token)

    def __call__(self, rows: Arrays) -> Arrays:
        """Compute the parts with the numbers in "part", and return these."""
        for number in rows["part"].tolist():
            self._job.finish(self._job.parts[number], self._compute)
        return rows


_taken: ContextVar[list[tuple[Job, ComputeColumns]] | None] = ContextVar("taken", default=None)
"""In a worker: the job that its verb has prepared."""


def predicted_columns(
    card: Card, predict: Predict, top: int, compute: Compute, reject: float | None = None
) -> ComputeColumns:
    """Return a function that computes what a network predicts: the columns of `vitrail.tasks.task.Task.columns`."""
    import torch

    from vitrail.data.images.ops import eval_transform
    from vitrail.evaluation.ahead import Computed
    from vitrail.evaluation.confidence import calibrated
    from vitrail.tasks.catalog import task_of

    transform, size = eval_transform(card.preprocess), card.preprocess.size

    def columns(logits: Tensor) -> dict[str, pa.Array]:
        return {name: _column(values) for name, values in task_of(card).columns(logits, card, top, reject).items()}

    found = Computed(calibrated(predict, card.temperature), columns, compute.precision)
    return _computed(
        found, columns(torch.empty(0, card.config.classes)), lambda source: compute.loader(source, transform, size)
    )


def feature_columns(embedder: Embedder) -> ComputeColumns:
    """Return a function that computes features, float32."""
    import numpy as np

    nothing = {"features": np.empty((0, embedder.width), np.float32)}
    return _computed(embedder.features.then(_all_lists), _all_lists(nothing), embedder.loader)


def token_columns(embedder: Embedder, ask: Tokens) -> ComputeColumns:
    """Return a function that computes tokens with `ask`: lists [rows][columns][width] and [prefix][width]."""
    nothing = {name: array[:0] for name, array in ask(embedder.blank()).items()}
    return _computed(ask.then(_all_lists), _all_lists(nothing), embedder.loader)


def _all_lists(found: Arrays) -> dict[str, pa.Array]:
    return {name: _column(array) for name, array in found.items()}


def _column(rows: np.ndarray | list[list[str]]) -> pa.Array:
    """Return an array [n, a, b, ...] as a column of n lists of a lists of b values, all lists of fixed length."""
    import pyarrow as pa

    if isinstance(rows, list):
        return pa.array(rows, pa.list_(pa.string()))
    column = pa.array(rows.reshape(-1))
    for length in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def _computed(
    columns: Computed[Any, Columns], nothing: Columns, loader: Callable[[IndexedSource], Loader]
) -> ComputeColumns:
    """Return a function that computes id, label and `columns` of images, batch by batch.

    nothing: The columns of no image.
    """
    import numpy as np
    import pyarrow as pa

    from vitrail.data.item import ids
    from vitrail.data.labels.sets import Answers, Labels, LabelSets, names_of_text, stored_texts
    from vitrail.data.loading.prefetch import LostImages

    def texts(labels: Labels, class_names: Sequence[str]) -> pa.Array:
        each = map(names_of_text, stored_texts(labels, class_names))
        kind = pa.list_(pa.string()) if isinstance(labels, LabelSets) else pa.string()
        return pa.array([[*map(as_text, one)] if isinstance(one, list) else as_text(one) or None for one in each], kind)

    def compute(source: IndexedSource, receive: Callable[[ResultColumns], None]) -> UnreadableImages:
        def send(index: np.ndarray, found: Columns) -> None:
            labels = source.labels[index]
            if isinstance(labels, Answers):
                given = {f"{name}.label": texts(*part) for name, part in labels.parts.items()}
            else:
                given = {"label": texts(labels, source.class_names)}
            receive({"id": pa.array(map(as_text, ids(source, index)), pa.string()), **given, **found})

        send(np.empty(0, np.int64), nothing)
        with closing(loader(source)) as images:
            for batch, found in columns.over(images.epoch(0)):
                send(batch.index.numpy(), found)
        reasons = dict(zip(images.bad_index, (reason for _, reason in images.bad), strict=True))
        lost = LostImages(len(source))
        for number in range(len(source)):
            lost.see(source.id(number), reasons.get(number))
        return images.bad

    return compute


def show(result: BulkProgress) -> str:
    """Return the progress as text for a terminal."""
    state = result.state
    if not state.complete:
        return (
            f"{state.done} of {counted(state.parts, 'part')} done, {counted(state.images, 'image')}. Other processes, "
            f"or the same command again, compute the other parts: {state.folder}"
        )
    unread = f", {len(state.bad):,} of them unreadable (listed in the .done.json files)" if state.bad else ""
    merged = f"; merged into {result.merged}" if result.merged else ""
    return (
        f"complete: {counted(state.images, 'image')} in {counted(state.parts, 'part')}{unread}: {state.folder}{merged}"
    )


def as_json(result: BulkProgress) -> Any:
    """Return the progress as JSON values."""
    state = result.state
    return {
        "out": result.out,
        "complete": state.complete,
        "parts": state.parts,
        "done": state.done,
        "images": state.images,
        "unreadable": unreadable_json(result.unreadable),
        "merged": result.merged,
    }
