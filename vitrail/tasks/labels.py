"""A set of labels for each image, which may be empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.masks import Masks
from vitrail.data.labels.sets import Labels, LabelSets, summary
from vitrail.data.settings import Data
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import UsageError
from vitrail.evaluation.calibration import draw_reliability, write_bins
from vitrail.evaluation.classify import BEST_CLASSES, check_rows
from vitrail.evaluation.label_scores import STORED, LabelScores, label_calibration, labels_before_scaling, score_labels
from vitrail.evaluation.metric import NUMBERS, OF_LABELS, ONE_LABEL, TITLES, Metric
from vitrail.evaluation.ranked import ranked
from vitrail.files import replacing_text
from vitrail.objective.settings import Supervised
from vitrail.tasks.classes import meaning_of_probabilities, ranked_columns
from vitrail.tasks.prediction import Prediction
from vitrail.tasks.task import PredictedColumns, Task, before, refuse_classes, shown_names
from vitrail.terminal import TerminalPage, page, table, unreadable_lines
from vitrail.weights.confidence import Confidence
from vitrail.words import listing

if TYPE_CHECKING:
    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.npz import Npz
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.weights.card import Card

WORST = 15
"""Maximum number of labels shown on a terminal; --json shows all."""
SHOWN = ("label", "images", "AP", "precision", "recall", "F1", "threshold")
COLUMNS = (
    "class",
    "images",
    "predicted",
    "right",
    "average precision",
    "precision",
    "recall",
    "F1",
    "threshold",
    "ECE",
)
ROWS = {"index": ("i", 1), "target": ("i", 2), "probability": ("f", 2), "loss": ("f", 1)}
"""See `vitrail.evaluation.classify.NUMBERS`."""


class LabelTask(Task[LabelScores]):
    """See the module."""

    name = "labels"
    predicts = "several labels"
    unrejected = " for an image, or none: each label has its own threshold"
    logged = (*TITLES, "nll", "count")

    def holds(self, labels: Labels) -> bool:
        """See `Task`."""
        return isinstance(labels, LabelSets) and not isinstance(labels, Masks)

    def adapt(self, run: Any, labels: Labels) -> tuple[Any, dict[str, str]]:
        """See `Task`: sigmoid instead of softmax, and mean average precision."""
        refuse_classes(run)
        assert isinstance(labels, LabelSets)
        metric, objective = run.metric, run.objective
        why = {"labels": f"several: {summary(labels)}"}
        by_class: dict[str, object] = {"data.sampler": run.data.sampler}
        if isinstance(objective, Supervised):
            by_class["objective.class_weights"] = objective.class_weights
            by_class["objective.logit_adjustment"] = objective.logit_adjustment
        for name, asked in by_class.items():
            if asked not in ("uniform", "none", 0):
                raise UsageError(
                    f"{name} is {asked}, which counts images by their one class, and these images have several "
                    "labels. Leave it out; objective.loss asymmetric gives more weight to the labels that an image has"
                )
        if isinstance(objective, Supervised) and objective.loss == "softmax":
            why["objective.loss"] = "sigmoid: an image may have several labels or none, which softmax cannot express"
            run = replace(run, objective=replace(objective, loss="sigmoid"))
        if metric.name in (*ONE_LABEL, *NUMBERS) and type(metric) is Metric:
            why["metric.name"] = f"map, mean average precision: {metric.name} needs one label for each image"
            run = replace(run, metric=replace(metric, name="map"))
        if run.metric.name not in OF_LABELS and type(metric) is Metric:
            raise UsageError(
                f"metric.name is {metric.name}, which needs images with other labels, and these have several labels "
                f"each. Valid are {listing(OF_LABELS, quoted=False)}"
            )
        return run, why

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
    ) -> LabelScores:
        """See `Task`. If the card has no thresholds, they are chosen on these images."""
        return score_labels(predict, images, class_names, card.thresholds or None, temperature)

    def activated(self, logits: Tensor, card: Card) -> Tensor:
        """See `Task`: the sigmoid."""
        return (logits / card.temperature).sigmoid()

    def outputs(self, activated: Tensor, card: Card) -> Tensor:
        """See `Task`."""
        return card.temperature * activated.logit()

    def meaning(self, card: Card, *, inside: bool) -> dict[str, Any]:
        """See `Task`."""
        named = "; a class is predicted from its value of thresholds in card"
        return meaning_of_probabilities("sigmoid", card, named, inside=inside)

    def predictions(self, logits: Tensor, card: Card, top: int) -> Iterator[Prediction]:
        """See `Task`: the best classes, and the labels that reach their thresholds."""
        names, found = shown_names(card), ranked(logits, top, card.thresholds)
        assert found.predicted is not None
        rows = (found.classes.tolist(), found.probabilities.tolist(), found.predicted.tolist())
        for numbers, shares, predicted in zip(*rows, strict=True):
            classes = [names[number] for number in numbers]
            labels = list(compress(zip(classes, shares, strict=True), predicted))
            yield Prediction("", classes[:top], shares[:top], labels)

    def columns(self, logits: Tensor, card: Card, top: int, reject: float | None = None) -> PredictedColumns:
        """See `Task`: classes, probabilities and labels."""
        names, found = np.array(shown_names(card)), ranked(logits, top, card.thresholds)
        assert found.predicted is not None
        rows = zip(names[found.classes], found.predicted, strict=True)
        labels = [classes[predicted].tolist() for classes, predicted in rows]
        return {**ranked_columns(found, card, top, reject), "labels": labels}

    def settings(self, data: Data, card: Card) -> Data:
        """See `Task`."""
        return replace(data, labels_per_image="several")

    def images(self, source: IndexedSource, who: str) -> IndexedSource:
        """See `Task`."""
        return Subset(source, several=True)

    def confidence(self, found: LabelScores, temperature: float) -> Confidence:
        """See `Task`."""
        return Confidence(temperature, found.count, labels_before_scaling(found), label_calibration(found).mean_ece)

    def on_card(self, card: Card, found: LabelScores) -> Card:
        """See `Task`: with the thresholds of the classes."""
        return replace(card, thresholds=found.thresholds.tolist())

    def read(self, file: Npz, class_names: Sequence[str]) -> LabelScores:
        """See `Task`."""
        arrays: dict[str, Any] = {field: file.read(name) for name, field in STORED.items()}
        temperature = file.read("temperature", "f") if "temperature" in file.headers else np.ones(1)
        check_rows(arrays, ROWS)
        if arrays["thresholds"].dtype.kind != "f" or arrays["thresholds"].shape != (len(class_names),):
            raise ValueError(f"thresholds are {arrays['thresholds'].shape}, and there are {len(class_names)} classes")
        if temperature.shape != (1,) or not 0 < temperature[0] < np.inf:
            raise ValueError(f"the temperature is {temperature}")
        shape = (len(arrays["index"]), len(class_names))
        if arrays["target"].shape != shape or arrays["probability"].shape != shape:
            raise ValueError(
                f"probabilities are {arrays['probability'].shape}, and there are {len(class_names)} classes"
            )
        return LabelScores(list(class_names), **arrays, temperature=float(temperature[0]))

    def page(
        self, subject: str, found: LabelScores, notes: list[str], groups: Sequence[GroupAccuracy], temperature: float
    ) -> TerminalPage:
        """See `Task`."""
        calibrated = label_calibration(found)
        ranked = sorted(_rows(found), key=lambda row: (row[2][0], row[0]))
        worst = [(name, counts[0], *map(_percent, shares[:5])) for name, counts, shares in ranked if counts[0]][:WORST]
        return page(
            f"{subject}: mAP {found.map:.2%} (a random ranking has {found.chance:.2%}), "
            f"F1 {found.micro_f1:.2%} (micro), {found.macro_f1:.2%} (macro), exact match {found.exact:.2%}, "
            f"loss {found.nll:.4f}, {found.count:,} images",
            f"calibration of each label: ECE {calibrated.mean_ece:.2%}"
            f"{before(labels_before_scaling(found), found.temperature)} (mean over labels), "
            f"Brier score {calibrated.mean_brier:.4f}",
            notes,
            table(SHOWN, worst, "labels with the lowest average precision (AP)"),
            unreadable_lines(found.bad),
        )

    def as_json(self, found: LabelScores, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
        """See `Task`: numbers, every label, and how many images have each pair of labels.

        Of very many labels, pairs are those of the labels that most images have ("paired").
        """
        calibrated = label_calibration(found)
        names = [name.replace(" ", "_").lower() for name in COLUMNS[1:]]
        return {
            **found.metrics(),
            "chance_map": found.chance,
            "ece": calibrated.mean_ece,
            "ece_before": labels_before_scaling(found),
            "temperature": found.temperature,
            "brier": calibrated.mean_brier,
            "calibration": list(calibrated.together.rows()),
            "classes": [
                {"name": name, **dict(zip(names, (*counts, *shares), strict=True))}
                for name, counts, shares in _rows(found)
            ],
            "paired": _paired(found),
            "cooccurrence": found.cooccurrence.tolist(),
            "predicted_together": found.predicted_together.tolist(),
            "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
        }

    def write(self, found: LabelScores, out: Path, *, raw: bool = False) -> None:
        """See `Task`: reliability.png, calibration.csv, classes.csv and cooccurrence.csv."""
        together = label_calibration(found).together
        write_bins(out / "calibration.csv", together)
        draw_reliability(together, out / "reliability.png", labels=True)
        with replacing_text(out / "classes.csv") as file:
            writer = SafeWriter(file, raw=raw)
            writer.writerow(COLUMNS)
            for name, counts, shares in _rows(found):
                writer.writerow((name, *counts, *("" if share != share else f"{share:.6f}" for share in shares)))
        with replacing_text(out / "cooccurrence.csv") as file:
            writer = SafeWriter(file, raw=raw)
            writer.writerow(("class", *_paired(found)))
            writer.writerows(
                (name, *row) for name, row in zip(_paired(found), found.cooccurrence.tolist(), strict=True)
            )

    def sentence(self, numbers: Mapping[str, float], classes: int) -> str:
        """See `Task`."""
        named = ", ".join(f"{title} {numbers[name]:.2%}" for name, title in TITLES.items() if name in numbers)
        return f"{named}, loss {numbers['nll']:.4f}"


def _rows(found: LabelScores) -> list[tuple[str, tuple[int, int, int], tuple[float, ...]]]:
    """Return (name, counts, shares) of each label, in the order of `COLUMNS`."""
    counts = zip(found.class_count.tolist(), found.class_predicted.tolist(), found.class_correct.tolist(), strict=True)
    columns = (found.average_precision, found.precision, found.recall, found.class_f1, found.thresholds)
    shares = zip(*(column.tolist() for column in (*columns, label_calibration(found).ece)), strict=True)
    return list(zip(found.class_names, counts, shares, strict=True))


def _percent(share: float) -> str:
    return "" if share != share else f"{share:.1%}"


def _paired(found: LabelScores) -> list[str]:
    return [found.class_names[label] for label in found.paired.tolist()]
