"""`vitrail data next`: choose which unlabelled images to label next."""

from __future__ import annotations

import logging
import os
from dataclasses import astuple, dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from vitrail.device import Precision
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.exports.kinds import find_program
from vitrail.ranges import Count, Threads, checked
from vitrail.terminal import first_lines, page, table, unreadable_lines
from vitrail.training.recorded import recorded_run
from vitrail.transfer.next_images import By, Coverage, choose_images
from vitrail.verbs.data.outputs import as_json as as_json
from vitrail.verbs.data.outputs import output_files, write_rows
from vitrail.verbs.features import Embedder
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import read_settings
from vitrail.words import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.data.item import IndexedSource
    from vitrail.data.roles import Splits
    from vitrail.data.settings import Data

log = logging.getLogger("vitrail")
COLUMNS = ("split", "id", "uncertainty", "class", "probability", "second", "similarity")


@dataclass(frozen=True)
class ChosenImage:
    """One image to label."""

    split: str
    id: str
    uncertainty: float
    """1 for the least sure: 1 minus the gap between the two most probable classes, or for several labels 1 minus the
    distance of the label that is nearest to its threshold."""
    best: str
    """Most probable class."""
    probability: float
    second: str
    """Second most probable class."""
    similarity: float | None
    """Cosine similarity to the nearest image that has a label or was chosen before; None if it was not computed."""


@one_line
@dataclass(frozen=True)
class NextImages:
    """The images to label next."""

    path: str
    split: str
    images: int
    """Number of images without a label that could be read."""
    labelled: int
    """Number of images with a label that the choice keeps away from."""
    choices: list[ChosenImage]
    """In the order in which to label them."""
    unreadable: list[tuple[str, str]]
    """(image, reason) of each image that could not be read."""
    written: list[str]
    """Files."""


@checked
def next_images(
    path: str | Path,
    *,
    weights: str | Path | None = None,
    count: Count = 100,
    by: By = "both",
    split: str | None = None,
    out: str | Path | None = None,
    sheet: str | Path | None = None,
    raw: bool = False,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> NextImages:
    """Choose which unlabelled images to label next. Nothing is changed.

    The network predicts all of them. Those that it is least sure about are candidates; among them those are chosen that
    differ most from the images with a label, which are the training images of the run and the labelled images of the
    split, and from each other. The same images and network give the same choice.

    Args:
        path: The images, in any form that `vitrail train` takes, or a folder of images without class folders.
        weights: A run, or other weights with a classifier, that was trained on the images labelled so far.
        count: Number of images to choose.
        by: The rule to choose by. uncertainty: the least sure images; coverage: the images that differ most from those
            with a label, whatever the network predicts; both: uncertainty, then coverage.
        split: Split to choose from (default: the first split with unlabelled images, else the training split; of a
            split whose images all have labels, all images are used as if they had none).
        out: Write the choice to this CSV file.
        sheet: Draw the first 60 in this PNG file.
    """
    compute = Compute(None, batch_size, workers, device, precision)
    if weights is None:
        raise UsageError(f"no network is given, which predicts the images: vitrail data next {path} --from RUN")
    from vitrail.data.item import Subset

    files = output_files({".csv": (out,), ".png": (sheet,)}, [str(path)])
    embedder = _classifier(weights, compute)
    card = embedder.network.card
    names = list(card.class_names) or [str(number) for number in range(card.config.classes)]
    name, source, near = _images(read_settings(reading, path), split)
    trained = _trained_on(weights)
    if trained is not None:
        source = _without(source, trained, str(path))
        near.append(trained.train)
    found = _predicted(embedder, compute, source)
    pool = found.index

    def features(rows: np.ndarray) -> np.ndarray:
        parts: list[np.ndarray] = []
        index, _ = embedder.each_batch(Subset(source, pool[rows]), embedder.array, parts.append)
        if len(index) < len(rows):
            raise DataError(f"{len(rows) - len(index)} images can no longer be read. Run the command again")
        return np.concatenate(parts)

    def cover(coverage: Coverage) -> None:
        for images in near:
            embedder.each_batch(images, embedder.array, coverage.cover)

    rows, similarity = choose_images(found.unsure, count, by, features, cover)
    choices = [
        ChosenImage(
            name,
            source.id(int(pool[row])),
            round(float(found.unsure[row]), 4),
            names[found.classes[row, 0]],
            round(float(found.shares[row, 0]), 4),
            names[found.classes[row, -1]],
            round(nearest, 4) if np.isfinite(nearest) else None,
        )
        for row, nearest in zip(rows.tolist(), similarity.tolist(), strict=True)
    ]
    if files[0] is not None:
        write_rows(files[0], COLUMNS, map(astuple, choices), raw=raw)
    if files[1] is not None:
        _draw(files[1], source, pool[rows], choices)
    written = [str(file) for file in files if file is not None]
    covered = 0 if by == "uncertainty" else sum(map(len, near))
    return NextImages(str(path), name, len(pool), covered, choices, found.bad, written)


def _classifier(weights: str | Path, compute: Compute) -> Embedder:
    """Return the network at `weights`. Raises UsageError unless it is one that predicts classes."""
    from vitrail.tasks.catalog import task_of

    if find_program(weights) is not None:
        raise UsageError(f"{weights} is an exported program, and its features are needed, too: --from RUN")
    embedder = Embedder(weights, compute)
    card = embedder.network.card
    task = task_of(card)
    if not card.config.classes or not task.probable:
        what = "has no classifier" if task.probable else f"predicts {task.predicts}{task.unrejected}"
        raise UsageError(f"{weights} {what}. Give a network that predicts classes: --from RUN")
    return embedder


def _images(data: Data, split: str | None) -> tuple[str, IndexedSource, list[IndexedSource]]:
    """Return the split to choose from, its unlabelled images, and its images with a label, if there are some.

    If all have labels, all are returned as unlabelled.
    """
    from vitrail.data.copies.dedup import splits_to_clean
    from vitrail.data.item import Subset
    from vitrail.data.labels.sets import known
    from vitrail.data.roles import named_split
    from vitrail.data.sources.open import open_and_warn

    found, path = open_and_warn(data, labels=False), data.path
    unlabelled = [name for name, source in found.splits.items() if not known(source.labels).all()]
    name = [*unlabelled, splits_to_clean(found)[0]][0] if split is None else named_split(found, split, path)
    source = found.splits[name]
    has = known(source.labels)
    if has.all():
        log.warning("all %d images of %s have labels: they are used as if they had none", len(source), path)
        return name, source, []
    return name, Subset(source, np.flatnonzero(~has)), [Subset(source, np.flatnonzero(has))] if has.any() else []


def _trained_on(weights: str | Path) -> Splits | None:
    """Return the images of the run at `weights`; None, with a warning, if they are not known."""
    from vitrail.data.sources.open import open_data

    try:
        if (run := recorded_run(weights)) is None:
            raise DataError(f"there is no {Path(weights) / 'config.yaml'}")
        return open_data(run.data, seed=run.seed, labels=False)
    except (VitrailError, OSError) as error:
        log.warning("the training images of %s are not known, so images like them may be chosen: %s", weights, error)
        return None


def _without(source: IndexedSource, trained: Splits, path: str) -> IndexedSource:
    """Return the images that are no files of the run, which have a label already. Raises DataError if none is left."""
    from vitrail.data.item import Subset

    parts = [part for part in (trained.train, trained.validation, trained.test) if part is not None]
    labelled = {file for part in parts for file in map(_file, repeat(part), range(len(part))) if file}
    rows = [row for row in range(len(source)) if _file(source, row) not in labelled]
    if not rows:
        raise DataError(f"all {len(source):,} images of {path} are images of the run: there is nothing left to label")
    return source if len(rows) == len(source) else Subset(source, np.array(rows))


def _file(source: IndexedSource, row: int) -> str:
    """Return the real path of an image; "" if it is not a separate file."""
    from vitrail.data.sources.folder import file_of

    file = file_of(source, row)
    return "" if file is None else os.path.realpath(file)


@dataclass(frozen=True)
class _Predicted:
    """What a network says about the readable images of a source. Only this stays in memory."""

    index: np.ndarray
    """int64 [N]."""
    classes: np.ndarray
    """int64 [N, 2]: the most probable classes."""
    shares: np.ndarray
    """float32 [N, 2]: their probabilities."""
    unsure: np.ndarray
    """float64 [N]: see `vitrail.transfer.next_images.uncertainty`."""
    bad: list[tuple[str, str]]
    """The unreadable images."""


def _predicted(embedder: Embedder, compute: Compute, source: IndexedSource) -> _Predicted:
    """Return what the network says about the readable images of a source."""
    from vitrail.evaluation.ahead import Computed
    from vitrail.tasks.catalog import task_of
    from vitrail.transfer.next_images import uncertainty

    card = embedder.network.card
    logits = Computed(compute.predictor(embedder.network), lambda found: found.float(), compute.precision)
    parts: list[tuple[np.ndarray, ...]] = []

    def receive(logits: Tensor) -> None:
        shares = task_of(card).activated(logits, card)
        values, classes = shares.topk(min(2, shares.shape[1]), dim=1)
        parts.append((classes.numpy(), values.numpy(), uncertainty(shares.numpy(), card.thresholds)))

    index, bad = embedder.each_batch(source, logits, receive)
    classes, shares, unsure = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _Predicted(index, classes, shares, unsure, bad)


def _draw(file: Path, source: IndexedSource, rows: np.ndarray, choices: list[ChosenImage]) -> None:
    from vitrail.data.contact_sheet import Frame, write_contact_sheet

    frames = [
        Frame(((source, row),), (one.id, f"{one.best} {one.probability:.0%}", f"or {one.second}"))
        for row, one in zip(rows.tolist(), choices, strict=True)
    ]
    write_contact_sheet(file, f"{len(choices):,} images to label next, with the two most probable classes", frames)


def show(result: NextImages) -> Any:
    """Return the result as a table for a terminal."""
    lines = [f"{one.id}: {one.best} {one.probability:.0%}, or {one.second}" for one in result.choices]
    row = (result.split or "all", result.images, result.labelled, len(result.choices))
    return page(
        table(("split", "unlabelled images", "kept away from", "to label next"), [row]),
        first_lines(lines),
        unreadable_lines(result.unreadable),
        [f"written to {file}" for file in result.written],
    )
