"""Numbers for each image, its targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.data.labels.numbers import TARGET, Numbers, TargetScale
from vitrail.data.labels.sets import Labels
from vitrail.data.settings import Data
from vitrail.data.sources.indexed import GivenImages
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import BEST_CLASSES, check_rows
from vitrail.evaluation.metric import NUMBERS, Metric, metric_in_words
from vitrail.evaluation.number_scores import STORED, NumberScores, predicted_numbers, score_numbers
from vitrail.files import replacing_text
from vitrail.tasks.prediction import Prediction
from vitrail.tasks.task import PredictedColumns, Task, shown_names
from vitrail.terminal import TerminalPage, page, table, unreadable_lines
from vitrail.words import listing

if TYPE_CHECKING:
    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.npz import Npz
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.weights.card import Card

COLUMNS = ("target", "R2", "MAE", "RMSE", "MAE of the mean", "RMSE of the mean")


def _otherwise(data: Data) -> str:
    """Return what makes labels of classes of these numbers, as the end of a sentence; "" for nothing."""
    if data.labels_per_image == "numbers":
        return ", or data.labels_per_image to auto"
    return ", or name the column with its kind, such as grade:classes, in data.answers" if data.answers else ""


class NumberTask(Task[NumberScores]):
    """See the module."""

    name = "numbers"
    predicts = "numbers"
    probable = False
    unrejected = ", which have no probability"
    logged = (*NUMBERS, "loss", "count")

    def holds(self, labels: Labels) -> bool:
        """See `Task`."""
        return isinstance(labels, Numbers)

    def adapt(self, run: Any, labels: Labels) -> tuple[Any, dict[str, str]]:
        """See `Task`: R2, and no calibration."""
        if not run.objective.numbers:
            raise UsageError(
                f"the labels are numbers, which objective {run.objective.kind} cannot learn. Set objective.kind to "
                f"regression{_otherwise(run.data)}"
            )
        by_class = {"data.sampler": run.data.sampler != "uniform", "knn": run.knn, "fewshot": run.fewshot}
        if wrong := [name for name, asked in by_class.items() if asked]:
            raise UsageError(
                f"{listing(wrong, quoted=False)}: needs images with classes, and these have numbers. Leave it out"
            )
        metric, why = run.metric, {}
        if metric.name not in NUMBERS and type(metric) is Metric:
            why["metric.name"] = f"r2, the share of the variance that is explained: {metric.name} needs classes"
            run = replace(run, metric=replace(metric, name="r2"))
        if run.calibrate:
            why["calibrate"] = "no: numbers have no probabilities"
        return replace(run, calibrate=False), why

    def scale(self, run: Any, card: Card | None, labels: Labels, names: list[str]) -> TargetScale:
        """See `Task`."""
        assert isinstance(labels, Numbers)
        if not run.keep_head or card is None:
            return TargetScale.of(labels, names)
        assert card.scale is not None  # only a classifier of the same task is kept
        return card.scale

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
    ) -> NumberScores:
        """See `Task`."""
        return score_numbers(predict, images, class_names, _scale(card))

    def activated(self, logits: Tensor, card: Card) -> Tensor:
        """See `Task`: the numbers in the units of the data."""
        return _scale(card).original(logits)

    def outputs(self, activated: Tensor, card: Card) -> Tensor:
        """See `Task`."""
        return _scale(card).standardised(activated)

    def meaning(self, card: Card, *, inside: bool) -> dict[str, Any]:
        """See `Task`."""
        how = "" if inside else ": outputs * deviation + mean, with the scale in card,"
        return {"meaning": f"predicted numbers{how} in the units of the data"}

    def predictions(self, logits: Tensor, card: Card, top: int) -> Iterator[Prediction]:
        """See `Task`. Numbers are rounded to the digits of float32."""
        for row in predicted_numbers(logits, _scale(card)).tolist():
            found = {name: float(f"{value:.7g}") for name, value in zip(shown_names(card), row, strict=True)}
            yield Prediction("", [], [], numbers=found)

    def columns(self, logits: Tensor, card: Card, top: int, reject: float | None = None) -> PredictedColumns:
        """See `Task`: numbers."""
        return {"numbers": predicted_numbers(logits, _scale(card))}

    def settings(self, data: Data, card: Card) -> Data:
        """See `Task`. Columns are named as the card's targets, unless the settings name others."""
        data, names = replace(data, labels_per_image="numbers"), card.class_names
        named = any(one is not None for one in (data.label_column, data.label_columns, data.answers))
        if named or not names or names[0].startswith(TARGET):
            return data
        return replace(data, label_column=names[0]) if len(names) == 1 else replace(data, label_columns=tuple(names))

    def given(self, images: list[Any], labels: Sequence[Any], names: list[str], *, bands: bool) -> GivenImages:
        """See `Task`."""
        source = GivenImages(images, bands=bands)
        try:
            targets = np.array(labels, dtype=np.float64).reshape(len(images), len(names))
        except (TypeError, ValueError):
            raise DataError(f"labels must be {len(names)} numbers for each of the {len(images)} images") from None
        source.labels, source.class_names = Numbers(targets), names
        return source

    def read(self, file: Npz, class_names: Sequence[str]) -> NumberScores:
        """See `Task`."""
        arrays: dict[str, Any] = {field: file.read(name, "fi") for name, field in STORED.items()}
        check_rows(arrays, {"index": ("i", 1), "target": ("f", 2), "prediction": ("f", 2)})
        scale, width = file.read("scale", "f"), len(class_names)
        if any(arrays[name].shape[1] != width for name in ("target", "prediction")) or scale.shape != (2, width):
            raise ValueError(f"predictions are {arrays['prediction'].shape}, and there are {width} targets")
        mean, deviation = (tuple(row) for row in scale.tolist())
        return NumberScores(list(class_names), **arrays, scale=TargetScale(mean, deviation))

    def page(
        self, subject: str, found: NumberScores, notes: list[str], groups: Sequence[GroupAccuracy], temperature: float
    ) -> TerminalPage:
        """See `Task`."""
        rows = [(name, *(f"{value:.4g}" for value in values)) for name, *values in _rows(found)]
        return page(
            f"{subject}: R2 {found.r2:.4f}, MAE {found.mae:.4g}, RMSE {found.rmse:.4g}, {found.count:,} images",
            notes,
            table(
                COLUMNS, rows, "targets; the last two are errors of always predicting the mean of the training images"
            ),
            unreadable_lines(found.bad),
        )

    def as_json(self, found: NumberScores, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
        """See `Task`."""
        names = [name.replace(" ", "_").lower() for name in COLUMNS[1:]]
        return {
            **found.metrics(),
            "targets": [{"name": name, **dict(zip(names, values, strict=True))} for name, *values in _rows(found)],
            "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
        }

    def write(self, found: NumberScores, out: Path, *, raw: bool = False) -> None:
        """See `Task`: targets.csv."""
        with replacing_text(out / "targets.csv") as file:
            writer = SafeWriter(file, raw=raw)
            writer.writerow(COLUMNS)
            writer.writerows((name, *(f"{value:.7g}" for value in values)) for name, *values in _rows(found))

    def sentence(self, numbers: Mapping[str, float], classes: int) -> str:
        """See `Task`."""
        return f"{', '.join(metric_in_words(name, numbers[name]) for name in NUMBERS)}, loss {numbers['loss']:.4f}"


def _scale(card: Card) -> TargetScale:
    assert card.scale is not None  # that of a network that predicts numbers
    return card.scale


def _rows(found: NumberScores) -> list[tuple[Any, ...]]:
    """Return the values of each target, in the order of `COLUMNS`."""
    columns = (found.target_r2, found.target_mae, found.target_rmse, found.mean_mae, found.mean_rmse)
    return list(zip(found.class_names, *(column.tolist() for column in columns), strict=True))
