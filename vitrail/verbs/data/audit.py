"""`vitrail data audit`: rank labels that are probably wrong, copies with different labels, and outliers."""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import numpy as np

from vitrail.device import Precision
from vitrail.ranges import Count, InputSize, Range, Seed, Threads, checked
from vitrail.terminal import ProgressLine, first_lines, page, table, unreadable_lines
from vitrail.verbs.data.outputs import as_json as as_json
from vitrail.verbs.data.outputs import output_files, write_rows
from vitrail.verbs.features import Embedder
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.data.item import IndexedSource
    from vitrail.evaluation.features import Features

log = logging.getLogger("vitrail")
Reason = Literal["label", "copy", "outlier"]
COLUMNS = ("split", "id", "reason", "score", "label", "suggested", "like")


@dataclass(frozen=True)
class Doubt:
    """One image that should be looked at."""

    split: str
    id: str
    reason: Reason
    """label: the label is probably wrong; copy: a copy has another label; outlier: no image is similar."""
    score: float
    """label: estimated probability that the label is wrong; copy: correlation of the pixels; outlier: mean cosine
    similarity to the nearest images."""
    label: str
    suggested: str
    """Class that the probe suggests, or the label of the copy; "" for an outlier."""
    like: str
    """The most similar image of the suggested class, the copy, or the nearest image."""


@one_line
@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    path: str
    split: str
    images: int
    """Number of images with a label."""
    accuracy: float
    """Share of these images whose label the probe predicts, which has not seen them."""
    wrong: float
    """Estimated number of wrong labels among the doubts with the reason "label"."""
    doubts: list[Doubt]
    """Probably wrong labels, then copies with different labels, then outliers; the worst of each first."""
    unreadable: list[tuple[str, str]]
    """(image, reason) of each image that could not be read."""
    written: list[str]
    """Files."""


@checked
def audit(
    path: str | Path,
    *,
    weights: str | Path = "vitrail/tiny",
    split: str | None = None,
    folds: Annotated[int, Range(2, 100)] = 5,
    seed: Seed = 0,
    out: str | Path | None = None,
    sheet: str | Path | None = None,
    raw: bool = False,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> Audit:
    """Rank labels that are probably wrong, copies with different labels, and outliers. Nothing is changed.

    A linear probe on the features of a frozen network predicts the class of each image without having seen its label.
    How often a label that the probe disagrees with is wrong is estimated from all of them, and a label is listed if it
    is wrong with a probability of at least one in three. Look at them, remove the rows of correct images from the CSV
    file, and train without the others: `vitrail train DATA --data.exclude FILE`.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: A run, weights or a name on the hub, whose features are used. Best is a network that was not trained on
            these labels (default: vitrail/tiny, a small network that vitrail ships).
        split: Split to examine (default: the training split).
        folds: Number of parts of the images; each is judged by a probe trained on the others. With --data.group no
            group is in two of them.
        seed: Seed of the folds.
        out: Write all of them to this CSV file, which `--data.exclude` reads.
        sheet: Draw the first 60 in this PNG file, each beside an image of the suggested class.
    """
    compute = Compute(image_size, batch_size, workers, device, precision)
    from vitrail.data.copies.dedup import splits_to_clean
    from vitrail.data.groups import grouped_folds, groups_of
    from vitrail.data.item import Subset
    from vitrail.data.labels.sets import one_label
    from vitrail.data.roles import named_split
    from vitrail.data.sources.open import open_and_warn
    from vitrail.transfer.audit import folds_of

    files = output_files({".csv": (out,), ".png": (sheet,)}, [str(path)])
    settings = read_settings(reading, path, used=(*READ, "group"))
    found = open_and_warn(settings)
    name = splits_to_clean(found)[0] if split is None else named_split(found, split, str(path))
    images = found.splits[name]
    one_label(images.labels, "data audit")
    features = Embedder(weights, compute)(images)
    features.labelled("examined")  # before the images are read again
    known = features.labels >= 0
    labelled = Subset(images, features.index[known])
    if settings.group is None:
        fold = folds_of(features.labels[known], folds, seed)
    else:
        fold = grouped_folds(labelled, groups_of(labelled, settings), folds, seed)
    accuracy, labels = _labels(features, fold, compute)
    copies = _copies(str(path), name, images, compute.threads(alone=True))
    pairs = [*labels, *copies, *_outliers(features, compute)]
    doubts = [
        Doubt(name, images.id(one), reason, round(score, 4), _class(images, one), suggested, images.id(other))
        for reason, one, other, score, suggested in pairs
    ]
    if files[0] is not None:
        write_rows(files[0], COLUMNS, map(astuple, doubts), raw=raw)
    if files[1] is not None:
        _draw(files[1], images, doubts, pairs)
    count = int((features.labels >= 0).sum())
    written = [str(file) for file in files if file is not None]
    wrong = round(sum(doubt.score for doubt in doubts if doubt.reason == "label"), 1)
    return Audit(str(path), name, count, accuracy, wrong, doubts, features.bad, written)


Found = tuple[Reason, int, int, float, str]
"""Reason, image, image to compare it with, score, suggested class."""


def _labels(features: Features, fold: np.ndarray, compute: Compute) -> tuple[float, list[Found]]:
    """Return the accuracy of the probe, and images whose label is probably wrong."""
    from vitrail.evaluation.features import unit_rows
    from vitrail.transfer.audit import ABLE, out_of_fold, surest, suspects

    rows, labels = features.labelled("examined")
    index = features.index[features.labels >= 0]
    names = features.class_names
    probabilities = out_of_fold(rows, labels, len(names), fold, device=compute.place())
    if (sure := surest(probabilities, labels)) < ABLE:
        log.warning(
            "no label is listed: of the fifth of the images that the probe is surest of, it predicts only %.0f %% of "
            "the labels, so it cannot tell its errors from wrong labels. Use a network with better features (--from)",
            100 * sure,
        )
    found, unit = suspects(probabilities, labels), unit_rows(rows)
    doubts: list[Found] = []
    for row, suggested, wrong in zip(found.rows.tolist(), found.suggested.tolist(), found.wrong, strict=True):
        among = np.flatnonzero(labels == suggested)
        like = among[(unit[among] @ unit[row]).argmax()]
        doubts.append(("label", int(index[row]), int(index[like]), float(wrong), names[suggested]))
    return float((probabilities.argmax(axis=1) == labels).mean()), doubts


def _copies(path: str, split: str, images: IndexedSource, workers: int) -> list[Found]:
    """Return copies that have different labels."""
    from vitrail.data.copies.confirm import find_copies
    from vitrail.data.copies.dedup import HashedImages, HashedSplit
    from vitrail.data.copies.hashes import hashes_of

    hashes = hashes_of(images, workers=workers, progress=ProgressLine("hashed"))
    hashed = HashedImages([HashedSplit(path, split, images, hashes)])
    pairs = find_copies(hashed, None, workers=workers, progress=ProgressLine("compared"))
    score = np.where(pairs.exact, 1.0, pairs.correlation)
    labels = np.asarray(images.labels)  # one for each image: `audit` refuses others
    one, two = labels[pairs.left], labels[pairs.right]
    differ = np.flatnonzero(pairs.copy & (one != two) & (one >= 0) & (two >= 0))
    order = differ[np.argsort(-score[differ], kind="stable")]
    return [
        ("copy", left, right, float(score[place]), _class(images, right))
        for place, left, right in zip(order, pairs.left[order].tolist(), pairs.right[order].tolist(), strict=True)
    ]


def _outliers(features: Features, compute: Compute) -> list[Found]:
    """Return images that are similar to no other."""
    from vitrail.transfer.audit import outliers

    rows, nearest, similarity = outliers(features.features, compute.place())
    index = features.index
    return [("outlier", int(index[row]), int(index[nearest[row]]), float(similarity[row]), "") for row in rows.tolist()]


def _class(images: IndexedSource, index: int) -> str:
    from vitrail.data.labels.sets import label_text

    return label_text(images.labels, index, images.class_names)


def _draw(file: Path, images: IndexedSource, doubts: list[Doubt], pairs: list[Found]) -> None:
    from vitrail.data.contact_sheet import Frame, write_contact_sheet

    frames = []
    for doubt, (_, one, other, _, _) in zip(doubts, pairs, strict=True):
        how = {"label": f"rather {doubt.suggested}", "copy": f"copy: {doubt.suggested}", "outlier": "outlier; nearest"}
        lines = (doubt.id, f"labelled {doubt.label}", f"{how[doubt.reason]} ({doubt.score:.2f})")
        frames.append(Frame(((images, one), (images, other)), lines))
    title = f"{len(doubts):,} images to look at; beside each: an image of the suggested class, its copy or its nearest"
    write_contact_sheet(file, title, frames)


def show(result: Audit) -> Any:
    """Return the result as tables for a terminal."""
    from collections import Counter

    counts = Counter(doubt.reason for doubt in result.doubts)
    lines = []
    for doubt in result.doubts:
        how = {"label": f"rather {doubt.suggested}", "copy": f"{doubt.like} is {doubt.suggested}", "outlier": "outlier"}
        lines.append(f"{doubt.id}, labelled {doubt.label}: {how[doubt.reason]} ({doubt.score:.2f})")
    row = (result.split or "all", result.images, f"{100 * result.accuracy:.1f} %")
    estimate = (
        f"by the audit's own estimate, {result.wrong:.0f} of the {counts['label']:,} doubtful labels are wrong; labels "
        "that are wrong with a probability below one in three are not listed"
    )
    return page(
        table(
            ("split", "images", "probe's accuracy", "doubtful", "copies with two labels", "outliers"),
            [(*row, *(counts[reason] for reason in ("label", "copy", "outlier")))],
        ),
        [estimate] if counts["label"] else [],
        first_lines(lines),
        unreadable_lines(result.unreadable),
        [f"written to {file}" for file in result.written],
    )
