"""`predict` and `embed` with a folder as --out: results for a data set, part by part, by any number of processes."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import pyarrow as pa
    from torch import Tensor

    from vitrail.data.item import Listed
    from vitrail.evaluation.bulk import Answer, Bad, Job, State
    from vitrail.evaluation.classify import Predict
    from vitrail.verbs.network.features import Embedder
    from vitrail.weights.card import Card

log = logging.getLogger("vitrail")


@dataclass(frozen=True)
class Answered:
    """Progress of the results for a data set."""

    state: State
    merged: str | None = None
    exit_code: int = 0
    """1 if `strict` is set and an image could not be read."""


def is_bulk(out: str | Path | None) -> bool:
    """Return whether --out is a folder, which gets the results for a data set part by part."""
    return out is not None and (Path(out).suffix == "" or Path(out).is_dir())


def open_job(verb: str, model: str | Path, paths: tuple[str | Path, ...], out: str | Path, **settings: Any) -> Job:
    """Open the data and the folder for the results. Raises UsageError and DataError."""
    if len(paths) != 1:
        raise UsageError(f"{out} is a folder, for the results of one data set. Give one data set, or a file as --out")
    from vitrail.data.cache import refuse_within
    from vitrail.data.sources.open import find
    from vitrail.data.split import fingerprint
    from vitrail.evaluation.bulk import Job
    from vitrail.weights.load import weights_fingerprint

    folder = refuse_within(out, str(paths[0]))
    splits = find(str(paths[0])).splits
    about = {"verb": verb, "data": fingerprint(splits), "weights": weights_fingerprint(model), **settings}
    return Job(folder, splits, about)


def run(job: Job, answer: Answer, merge: str | Path | None, *, strict: bool = False) -> Answered:
    """Compute this process's share of a job. The process that finds it complete writes `merge`. Raises DataError."""
    from vitrail import world
    from vitrail.verbs.data.check import Line

    if merge is not None and Path(merge).suffix != ".parquet":
        raise UsageError(f"--merge {merge} is not valid: results are merged into a file that ends in .parquet")
    rank, size = world.share()
    log.info("process %d of %d: %d of %d parts", rank, size, len(job.parts[rank::size]), len(job.parts))
    state = job.run(answer, rank, size, Line("answered"))
    code = int(strict and bool(state.bad))
    if merge is None or not state.complete:
        return Answered(state, exit_code=code)
    job.merge(Path(merge))
    return Answered(state, str(merge), code)


def classes_of(card: Card, predict: Predict, top: int, loading: dict[str, Any]) -> Answer:
    """Return a function that computes the `top` most likely classes, best first, and their probabilities."""
    import numpy as np
    import pyarrow as pa

    from vitrail.data.images.ops import eval_transform

    names = np.array(list(card.class_names) or [str(number) for number in range(card.config.classes)])
    best = min(top, len(names))
    preprocess = card.preprocess
    loading = {**loading, "transform": eval_transform(preprocess), "image_size": preprocess.image_size}

    def ask(images: Tensor) -> np.ndarray:
        values, classes = predict(images).float().softmax(dim=1).topk(best, dim=1)
        return np.stack([values.cpu().numpy().astype(np.float64), classes.cpu().numpy()])

    def answer(source: Listed) -> tuple[dict[str, pa.Array], Bad]:
        columns, found, bad = _asked(source, ask, loading)
        values, classes = np.concatenate([*found, np.empty((2, 0, best))], axis=1)
        columns["classes"] = pa.FixedSizeListArray.from_arrays(pa.array(names[classes.astype(int)].ravel()), best)
        columns["probabilities"] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel(), pa.float32()), best)
        return columns, bad

    return answer


def features_of(embedder: Embedder) -> Answer:
    """Return a function that computes features, float32."""
    import numpy as np
    import pyarrow as pa

    def answer(source: Listed) -> tuple[dict[str, pa.Array], Bad]:
        columns, found, bad = _asked(source, lambda images: embedder.embed(images).cpu().numpy(), embedder.loading)
        features = np.concatenate([*found, np.empty((0, embedder.width), np.float32)])
        values = pa.array(features.ravel(), pa.float32())
        columns["features"] = pa.FixedSizeListArray.from_arrays(values, embedder.width)
        return columns, bad

    return answer


def _asked(
    source: Listed, ask: Callable[[Tensor], np.ndarray], loading: dict[str, Any]
) -> tuple[dict[str, pa.Array], list[np.ndarray], Bad]:
    """Return columns id and label, the result of `ask` for each batch, and the unreadable images."""
    import numpy as np
    import pyarrow as pa

    from vitrail.data.item import ids
    from vitrail.data.loading.loader import Loader

    found, index = [], [np.empty(0, np.int64)]
    with closing(Loader(source, shuffle=False, drop_last=False, **loading)) as loader:
        for batch in loader.epoch(0):
            found.append(ask(batch.images))
            index.append(batch.index.numpy())
    numbers = np.concatenate(index)
    names = [*source.class_names, None]  # an unknown label is -1
    labels = [names[label] for label in source.labels[numbers].tolist()]
    columns = {"id": pa.array(ids(source, numbers), pa.string()), "label": pa.array(labels, pa.string())}
    return columns, found, loader.bad


def show(result: Answered) -> str:
    """Return the progress as text for a terminal."""
    state = result.state
    if not state.complete:
        return (
            f"{state.done} of {state.parts} parts are done, {state.images:,} images. Other processes, or the same "
            f"command again, compute the other parts: {state.folder}"
        )
    unread = f", {len(state.bad):,} of them unreadable (listed in the markers)" if state.bad else ""
    merged = f"; merged into {result.merged}" if result.merged else ""
    return f"complete: {state.images:,} images in {state.parts} parts{unread}: {state.folder}{merged}"


def as_json(result: Answered) -> Any:
    """Return the progress as JSON values."""
    state = result.state
    return {
        "out": str(state.folder),
        "complete": state.complete,
        "parts": state.parts,
        "done": state.done,
        "images": state.images,
        "unreadable": [{"image": id, "reason": reason} for id, reason in state.bad],
        "merged": result.merged,
    }
