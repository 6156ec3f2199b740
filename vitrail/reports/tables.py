"""The tables of a report: classes, confusions, the particulars of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.evaluation.classify import Classification
from vitrail.evaluation.confidence import SHOWN, counts_at
from vitrail.evaluation.label_scores import LabelCalibration, LabelScores
from vitrail.evaluation.number_scores import NumberScores
from vitrail.reports.run_record import RunRecord

MOST_CLASSES = 200
"""Maximum number of rows in a table of classes."""
MOST_CONFUSIONS = 15
TUNED = {
    "attention": "attention layers and classifier only",
    "attention+positions": "attention layers, positions and classifier only",
    "ffn": "MLPs and classifier only",
    "head": "classifier only",
    "lora": "low-rank updates (LoRA) and classifier only",
}
"""What `Run.tune` means, in words."""


def network_in_words(record: RunRecord) -> str:
    """Return what was trained, as the start of a sentence: "A Vision Transformer (B/16) trained from scratch"."""
    run = record.run
    if run is None:
        return "A network"
    if run.weights:
        only = "" if run.tune == "all" else f" ({TUNED[run.tune]})"
        return f"A network fine-tuned{only} from {run.weights}"
    changes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in run.vit.changes().items())
    if run.model is None:
        return "A network given in Python"
    kind = "Vision Transformer" if "/" in run.model else "ResNet"
    return f"A {kind} ({run.model}{' with ' if changes else ''}{changes}) trained from scratch"


@dataclass(frozen=True)
class Confusion:
    """Images of one class that were predicted as another."""

    true: str
    predicted: str
    images: int
    share: float
    """Of the images of the true class."""


def most_confused(evaluation: Classification) -> list[Confusion]:
    """Return the most frequent confusions, the largest first."""
    wrong, names = _mistakes(evaluation), evaluation.class_names
    total = evaluation.confusion.sum(axis=1)
    cells = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSIONS]
    places = [divmod(int(cell), len(wrong)) for cell in cells]
    return [
        Confusion(names[true], names[predicted], int(wrong[true, predicted]), wrong[true, predicted] / total[true])
        for true, predicted in places
        if wrong[true, predicted]
    ]


@dataclass(frozen=True)
class ClassRow:
    """One class in the table of all classes."""

    name: str
    images: int
    right: int
    confused_with: str | None
    """The class that its images are most often mistaken for."""


def weakest_classes(evaluation: Classification) -> list[ClassRow]:
    """Return the classes, the lowest accuracy first and classes without images last."""
    accuracy, wrong, names = evaluation.class_accuracy, _mistakes(evaluation), evaluation.class_names
    order = np.argsort(np.where(np.isnan(accuracy), 2.0, accuracy), kind="stable")
    images, right = evaluation.class_count, evaluation.class_correct
    return [
        ClassRow(names[k], int(images[k]), int(right[k]), names[int(wrong[k].argmax())] if wrong[k].any() else None)
        for k in order[:MOST_CLASSES].tolist()
    ]


def rejections(evaluation: Classification) -> list[tuple[float, int, int]]:
    """Return (confidence, images named, wrong among these) for some smallest confidences."""
    rows = zip((0.0, *SHOWN), *counts_at(evaluation, (0.0, *SHOWN)), strict=True)
    return [row for row in rows if row[1]]


@dataclass(frozen=True)
class ScoredLabel:
    """One label in the table of all labels. Shares are NaN if no image has the label."""

    name: str
    images: int
    average_precision: float
    precision: float
    recall: float
    f1: float
    threshold: float
    ece: float


def weakest_labels(scores: LabelScores, calibrated: LabelCalibration) -> list[ScoredLabel]:
    """Return the labels, the lowest average precision first and labels without images last."""
    shares = (scores.average_precision, scores.precision, scores.recall, scores.class_f1, scores.thresholds)
    columns = zip(scores.class_count.tolist(), *(one.tolist() for one in (*shares, calibrated.ece)), strict=True)
    rows = [ScoredLabel(name, *values) for name, values in zip(scores.class_names, columns, strict=True)]
    order = np.argsort(np.nan_to_num(scores.average_precision, nan=2.0), kind="stable")
    return [rows[label] for label in order[:MOST_CLASSES].tolist()]


def wrong_beside(scores: LabelScores) -> list[Confusion]:
    """Return the labels that are most often wrongly predicted for images that have another label."""
    truth, names = scores.truth[:, scores.paired], [scores.class_names[label] for label in scores.paired.tolist()]
    wrong = truth.T.astype(np.float32) @ (scores.predicted[scores.known][:, scores.paired] & ~truth)
    without = scores.class_count[scores.paired][:, None] - scores.cooccurrence
    cells = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSIONS]
    places = [divmod(int(cell), len(names)) for cell in cells]
    return [
        Confusion(names[true], names[label], int(wrong[true, label]), wrong[true, label] / without[true, label])
        for true, label in places
        if wrong[true, label]
    ]


def targets(found: NumberScores) -> list[tuple[str, float, float, float, float, float]]:
    """Return (name, R2, MAE, RMSE, and MAE and RMSE of predicting the mean) of each target."""
    columns = (found.target_r2, found.target_mae, found.target_rmse, found.mean_mae, found.mean_rmse)
    return list(zip(found.class_names, *(column.tolist() for column in columns), strict=True))


def _mistakes(evaluation: Classification) -> np.ndarray:
    """int64 [K, K]: the confusion matrix without its diagonal."""
    wrong = evaluation.confusion.copy()
    np.fill_diagonal(wrong, 0)
    return wrong


def particulars(record: RunRecord) -> list[tuple[str, Any]]:
    """Return name and value of everything that is known about time, data, machine and versions."""
    known, data = record.facts, record.data_facts
    rows: list[tuple[str, Any]] = [(name, known.get(name)) for name in ("started", "ended")]
    rows += [("resumed", f"{one.get('at')} at step {one.get('step')}") for one in known.get("resumed", [])]
    rows += [(f"{name} images", f"{count:,}") for name, count in data.get("images", {}).items()]
    rows += [("data fingerprint", data.get("fingerprint")), ("seed", known.get("seed"))]
    rows += [("source commit", known.get("commit"))]
    rows += [(name.replace("_gib", " (GiB)"), str(value)) for name, value in known.get("machine", {}).items()]
    rows += known.get("versions", {}).items()
    return [(name, value) for name, value in rows if value not in (None, "")]


def data_problems(record: RunRecord) -> list[str]:
    """Return notes about the data and the images that could not be read."""
    unreadable = {line["image"]: line["reason"] for line in record.metrics if "image" in line}
    problems = [str(note) for note in record.data_facts.get("notes", [])]
    problems += [f"training image {name}: {reason}" for name, reason in unreadable.items()]
    if record.results is not None:
        problems += [f"validation image {name}: {reason}" for name, reason in record.results.bad]
    return problems
