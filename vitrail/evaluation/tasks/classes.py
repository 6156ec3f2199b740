"""The results of `vitrail evaluate` for a network that predicts one class: tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vitrail.verbs.network.label_results import before
from vitrail.terminal import page, table, unreadable_lines

if TYPE_CHECKING:
    from vitrail.evaluation.classify import Classification
    from vitrail.evaluation.groups import GroupAccuracy

WORST = 15
"""Maximum number of classes and confusions shown on a terminal; --json shows all."""


def show(
    subject: str, found: Classification, notes: list[str], groups: Sequence[GroupAccuracy], temperature: float
) -> Any:
    """Return the results as tables for a terminal; `subject` says of what on which images."""
    from vitrail.evaluation.calibration import before_scaling, calibration
    from vitrail.evaluation.classify import has_top5

    calibrated, five = calibration(found), has_top5(len(found.class_names))
    rows = sorted(zip(found.class_names, found.class_count, found.class_accuracy, strict=True), key=_by_accuracy)
    worst = [(name, count, f"{accuracy:.1%}") for name, count, accuracy in rows if count][:WORST]
    rejections = [(f"{sure:.2f}", f"{named:.1%}", f"{wrong:.1%}") for sure, named, wrong in _rejections(found)]
    means = [
        (one.name, one.classes, one.count, f"{one.top1:.1%}", *[f"{one.top5:.1%}"] * five, f"{one.class_mean:.1%}")
        for one in groups
    ]
    return page(
        f"{subject}: top-1 {found.top1:.2%}, {f'top-5 {found.top5:.2%}, ' * five}loss {found.nll:.4f}, "
        f"{found.count:,} images",
        f"every class counts equally: balanced accuracy {found.balanced_accuracy:.2%}, macro F1 {found.macro_f1:.2%}",
        f"calibration: ECE {calibrated.ece:.2%}{before(before_scaling(found).ece, temperature)}, "
        f"mean confidence {calibrated.confidence:.2%}, Brier score {calibrated.brier:.4f}",
        notes,
        table(("class", "images", "right"), worst, "worst classes"),
        table(
            ("at least", "images that get a class", "wrong among these"), rejections, "if a class needs a confidence"
        ),
        table(("group", "classes", "images", "top-1", *["top-5"] * five, "class mean"), means, "groups"),
        table(("class", "taken for", "images"), _confusions(found)[:WORST], "most confused"),
        unreadable_lines(found.bad),
    )


def _rejections(found: Classification) -> list[tuple[float, float, float]]:
    """Return (confidence, coverage, risk) for some smallest confidences at which a class is still named."""
    from vitrail.evaluation.confidence import SHOWN, counts_at

    rows = zip(SHOWN, *counts_at(found, SHOWN), strict=True)
    return [(confidence, named / found.count, wrong / named) for confidence, named, wrong in rows if named]


def _by_accuracy(row: tuple[str, int, float]) -> tuple[float, str]:
    return float(row[2]), row[0]


def _confusions(found: Classification) -> list[tuple[str, str, int]]:
    """Return (class, taken for, images) for every mistake that was made, the most frequent first."""
    counts = found.confusion.copy()
    counts[range(len(counts)), range(len(counts))] = 0
    pairs = [(int(counts[i, j]), int(i), int(j)) for i, j in zip(*counts.nonzero(), strict=True)]
    pairs.sort(key=lambda pair: (-pair[0], pair[1:]))
    return [(found.class_names[i], found.class_names[j], count) for count, i, j in pairs]


def as_json(found: Classification, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
    """Return the results as JSON values: numbers, every class, the confusion matrix (rows are true classes)."""
    from vitrail.evaluation.calibration import before_scaling, calibration

    calibrated = calibration(found)
    classes = zip(found.class_names, found.class_count, found.class_correct, found.class_f1, strict=True)
    return {
        **found.metrics(),
        "ece": calibrated.ece,
        "ece_before": before_scaling(found).ece,
        "temperature": temperature,
        "brier": calibrated.brier,
        "confidence": calibrated.confidence,
        "calibration": list(calibrated.rows()),
        "rejection": [dict(zip(("confidence", "coverage", "risk"), row, strict=True)) for row in _rejections(found)],
        "groups": [asdict(group) for group in groups],
        "classes": [
            {"name": name, "count": int(count), "correct": int(right), "f1": None if f1 != f1 else float(f1)}
            for name, count, right, f1 in classes
        ],
        "confusion": found.confusion.tolist(),
        "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
    }
