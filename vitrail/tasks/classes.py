"""One class for each image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.data.item import IndexedSource
from vitrail.data.labels.sets import Labels, one_label
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import UsageError
from vitrail.evaluation.calibration import before_scaling, calibration, draw_reliability, write_bins
from vitrail.evaluation.classify import BEST_CLASSES, NUMBERS, STORED, Classification, check_rows, classify, has_top5
from vitrail.evaluation.confidence import SHOWN, counts_at
from vitrail.evaluation.metric import OF_CLASSES, Metric
from vitrail.evaluation.ranked import Ranked, ranked
from vitrail.files import replacing_text
from vitrail.tasks.prediction import Prediction
from vitrail.tasks.task import PredictedColumns, Task, before, refuse_classes, shown_names
from vitrail.terminal import TerminalPage, page, table, unreadable_lines
from vitrail.weights.confidence import THRESHOLDS, Confidence
from vitrail.words import listing

if TYPE_CHECKING:
    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.npz import Npz
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.weights.card import Card

WORST = 15
"""Maximum number of classes and confusions shown on a terminal; --json shows all."""
OLD, NEW = "old_top1", "new_top1"
"""Numbers of a network that got other classes: accuracy on those that it knew before, and on new and merged ones."""


class ClassTask(Task[Classification]):
    """See the module."""

    name = "classes"
    predicts = "one class"
    logged = ("top1", "top5", "nll", "count", "balanced_accuracy", "macro_f1", OLD, NEW)

    def holds(self, labels: Labels) -> bool:
        """See `Task`."""
        return isinstance(labels, np.ndarray)

    def adapt(self, run: Any, labels: Labels) -> tuple[Any, dict[str, str]]:
        """See `Task`. Nothing changes."""
        refuse_classes(run)
        if run.metric.name not in OF_CLASSES and type(run.metric) is Metric:
            raise UsageError(
                f"metric.name is {run.metric.name}, which needs images with other labels, and these have one class "
                f"each. Valid are {listing(OF_CLASSES, quoted=False)}. For several labels set data.labels_per_image to "
                "'several'"
            )
        return run, {}

    def measure(
        self,
        predict: Predict,
        images: Batches,
        class_names: Sequence[str],
        card: Card,
        *,
        temperature: float,
        best: int = BEST_CLASSES,
        key: AnswerKey | None = None,
    ) -> Classification:
        """See `Task`."""
        return classify(predict, images, class_names, key, best, temperature)

    def activated(self, logits: Tensor, card: Card) -> Tensor:
        """See `Task`: the softmax."""
        return (logits / card.temperature).softmax(dim=1)

    def outputs(self, activated: Tensor, card: Card) -> Tensor:
        """See `Task`."""
        return card.temperature * activated.log()

    def meaning(self, card: Card, *, inside: bool) -> dict[str, Any]:
        """See `Task`."""
        return meaning_of_probabilities("softmax", card, "", inside=inside)

    def predictions(self, logits: Tensor, card: Card, top: int) -> Iterator[Prediction]:
        """See `Task`: the best classes."""
        names, found = shown_names(card), ranked(logits, top)
        for classes, shares in zip(found.classes.tolist(), found.probabilities.tolist(), strict=True):
            yield Prediction("", [names[number] for number in classes], shares)

    def columns(self, logits: Tensor, card: Card, top: int, reject: float | None = None) -> PredictedColumns:
        """See `Task`: classes, probabilities and rejected."""
        return ranked_columns(ranked(logits, top), card, top, reject)

    def images(self, source: IndexedSource, who: str) -> IndexedSource:
        """See `Task`."""
        one_label(source.labels, f"{who}, which predicts one class,")
        return source

    def confidence(self, found: Classification, temperature: float) -> Confidence:
        """See `Task`."""
        named, wrong = counts_at(found, THRESHOLDS)
        ece = calibration(found).ece
        return Confidence(temperature, found.count, before_scaling(found).ece, ece, named, wrong)

    def read(self, file: Npz, class_names: Sequence[str]) -> Classification:
        """See `Task`."""
        there = {name: field for name, field in STORED.items() if name != "brier" or name in file.headers}
        arrays: dict[str, Any] = {field: file.read(name) for name, field in there.items()}
        uncalibrated = file.read("uncalibrated") if "uncalibrated" in file.headers else None
        arrays.setdefault("brier", np.full(len(arrays["index"]), np.nan))  # absent in earlier versions
        check_rows(arrays, NUMBERS)
        if uncalibrated is not None:
            check_rows({"index": arrays["index"], "uncalibrated": uncalibrated}, {"uncalibrated": ("f", 1)})
        if arrays["top"].shape != arrays["probability"].shape or not arrays["top"].shape[1]:
            raise ValueError(f"classes are {arrays['top'].shape} and probabilities {arrays['probability'].shape}")
        arrays["top"] = arrays["top"].astype(np.int64)
        for name in ("label", "top"):
            if arrays[name].size and not -1 <= arrays[name].min() <= arrays[name].max() < len(class_names):
                raise ValueError(f"{name} names class {arrays[name].max()}, and there are {len(class_names)} classes")
        return Classification(list(class_names), **arrays, uncalibrated=uncalibrated)

    def page(
        self,
        subject: str,
        found: Classification,
        notes: list[str],
        groups: Sequence[GroupAccuracy],
        temperature: float,
    ) -> TerminalPage:
        """See `Task`."""
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
            f"every class counts equally: balanced accuracy {found.balanced_accuracy:.2%}, "
            f"macro F1 {found.macro_f1:.2%}",
            f"calibration: ECE {calibrated.ece:.2%}{before(before_scaling(found).ece, temperature)}, "
            f"mean confidence {calibrated.confidence:.2%}, Brier score {calibrated.brier:.4f}",
            notes,
            table(("class", "images", "right"), worst, "worst classes"),
            table(
                ("at least", "images that get a class", "wrong among these"),
                rejections,
                "if a class needs a confidence",
            ),
            table(("group", "classes", "images", "top-1", *["top-5"] * five, "class mean"), means, "groups"),
            table(("class", "taken for", "images"), _confusions(found)[:WORST], "most confused"),
            unreadable_lines(found.bad),
        )

    def as_json(self, found: Classification, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
        """See `Task`: numbers, every class, the confusion matrix (rows are true classes)."""
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
            "rejection": [
                dict(zip(("confidence", "coverage", "risk"), row, strict=True)) for row in _rejections(found)
            ],
            "groups": [asdict(group) for group in groups],
            "classes": [
                {"name": name, "count": int(count), "correct": int(right), "f1": None if f1 != f1 else float(f1)}
                for name, count, right, f1 in classes
            ],
            "confusion": found.confusion.tolist(),
            "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
        }

    def write(self, found: Classification, out: Path, *, raw: bool = False) -> None:
        """See `Task`: reliability.png, calibration.csv and classes.csv."""
        calibrated = calibration(found)
        write_bins(out / "calibration.csv", calibrated)
        draw_reliability(calibrated, out / "reliability.png")
        with replacing_text(out / "classes.csv") as file:
            writer = SafeWriter(file, raw=raw)
            writer.writerow(("class", "images", "right", "f1"))
            scores = ["" if f1 != f1 else f"{f1:.6f}" for f1 in found.class_f1.tolist()]
            writer.writerows(zip(found.class_names, found.class_count, found.class_correct, scores, strict=True))

    def sentence(self, numbers: Mapping[str, float], classes: int) -> str:
        """See `Task`."""
        five = f", top-5 {numbers['top5']:.2%}" if has_top5(classes) else ""
        parts = {OLD: "old classes", NEW: "new classes"}
        of_parts = [f"{words} {numbers[name]:.2%}" for name, words in parts.items() if name in numbers]
        split = f" ({', '.join(of_parts)})" * bool(of_parts)
        usual = f"top-1 {numbers['top1']:.2%}{split}{five}, loss {numbers['nll']:.4f}"
        if "balanced_accuracy" not in numbers:
            return usual
        return f"{usual}, balanced accuracy {numbers['balanced_accuracy']:.2%}, macro F1 {numbers['macro_f1']:.2%}"


def meaning_of_probabilities(function: str, card: Card, named: str, *, inside: bool) -> dict[str, Any]:
    """Return `Task.meaning` for probabilities by this function of the outputs; `named` says what is predicted."""
    if inside:
        return {"meaning": f"probabilities of class_names, {function} and temperature included{named}"}
    meaning = f"{function}(logits / temperature) are the probabilities of class_names{named}"
    return {"meaning": meaning, "function": function, "temperature": card.temperature}


def ranked_columns(found: Ranked, card: Card, top: int, reject: float | None) -> PredictedColumns:
    """Return the columns of ranked classes, and with `reject` whether the best class is less probable."""
    names, probabilities = np.array(shown_names(card)), found.probabilities
    columns: PredictedColumns = {"classes": names[found.classes[:, :top]], "probabilities": probabilities[:, :top]}
    return columns if reject is None else {**columns, "rejected": probabilities[:, 0] < reject}


def _rejections(found: Classification) -> list[tuple[float, float, float]]:
    """Return (confidence, coverage, risk) for some smallest confidences at which a class is still named."""
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
