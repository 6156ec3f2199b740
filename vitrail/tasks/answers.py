"""Several answers for each image: other tasks side by side, each for its part of a network's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail import world
from vitrail.data.labels.numbers import Numbers, TargetScale
from vitrail.data.labels.sets import BETWEEN, Answers, Labels, LabelSets, Named, classes_of_answers, known
from vitrail.data.loading.loader import Batch
from vitrail.data.settings import Data
from vitrail.data.sources.indexed import GivenImages
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.answers import AnswerResults
from vitrail.evaluation.classify import BEST_CLASSES
from vitrail.evaluation.confidence import KeptBatches
from vitrail.evaluation.metric import NUMBERS, OF_CLASSES, OF_LABELS, SCORE, Metric
from vitrail.import_path import import_path
from vitrail.objective.answers import weights_of
from vitrail.objective.base import Head
from vitrail.objective.settings import SeveralAnswers, Supervised
from vitrail.tasks.prediction import Prediction
from vitrail.tasks.task import PredictedColumns, Task
from vitrail.terminal import TerminalPage, page, table, unreadable_lines
from vitrail.weights.answer import Confidences
from vitrail.words import counted, listing, shown

if TYPE_CHECKING:
    from vitrail.data.benchmarks.imagenet_labels import AnswerKey
    from vitrail.data.npz import Npz
    from vitrail.evaluation.classify import Batches, Predict
    from vitrail.evaluation.groups import GroupAccuracy
    from vitrail.weights.card import Card


class _One(NamedTuple):
    """One answer of a network."""

    name: str
    task: Task[Any]
    card: Card
    """That of a network with this answer alone."""
    outputs: slice
    columns: slice
    """Its columns in rows of labels."""

    def labels(self, rows: Tensor) -> Tensor:
        """Return its labels from rows [batch, width], as a batch with this answer alone has them."""
        own = rows[:, self.columns]
        if self.task.name == "classes":
            return own[:, 0].long()
        return own.to(torch.int8) if self.task.name == "labels" else own

    def calibrated(self, logits: Tensor) -> Tensor:
        """Return its outputs, divided by its temperature."""
        return logits[:, self.outputs] / self.card.temperature


class AnswersTask(Task[AnswerResults]):
    """See the module. `parts` are the other tasks."""

    name = "answers"
    predicts = "several answers"
    probable = False
    unrejected = ", of which each has its own probability"
    logged = (SCORE, "loss", "count")

    def __init__(self, parts: Sequence[Task[Any]]) -> None:
        self._parts = {task.name: task for task in parts}

    def _each(self, card: Card) -> Iterator[_One]:
        own, end = card.of_answers(), 0
        for answer in card.answers:
            begin, end = end, end + (1 if answer.task == "classes" else answer.outputs)
            outputs, alone = own[answer.name]
            yield _One(answer.name, self._parts[answer.task], alone, outputs, slice(begin, end))

    def holds(self, labels: Labels) -> bool:
        """See `Task`."""
        return isinstance(labels, Answers)

    def adapt(self, run: Any, labels: Labels) -> tuple[Any, dict[str, str]]:
        """See `Task`: the objective of several answers with the weight of each, and their mean score."""
        assert isinstance(labels, Answers)
        _refuse(run)
        objective, why = run.objective, {}
        if isinstance(objective, Supervised) and replace(objective, smoothing=0.0) == Supervised():
            objective = SeveralAnswers(smoothing=objective.smoothing)
            why["objective.kind"] = "answers: data.answers names several columns"
        if not isinstance(objective, SeveralAnswers):
            raise UsageError(
                f"data.answers names several columns, which objective {objective.kind} with these settings cannot "
                "learn. Set objective.kind to answers, which has the settings answer_weights, smoothing and number_loss"
            )
        weights = weights_of(objective, list(labels.parts))
        if not objective.answer_weights:
            objective = replace(
                objective, answer_weights=tuple(f"{name}={weight:g}" for name, weight in weights.items())
            )
        metric, (changed, reason) = run.metric, _metric(run.metric, labels)
        told = []
        for head in self.heads(labels):
            kind = f"{head.outputs} {head.kind}" if head.kind != "numbers" else "a number"
            lacking = len(labels) - round(head.share * len(labels))
            without = f", {counted(lacking, 'training image')} without it" if lacking else ""
            told.append(f"{head.name}: {kind}, weight {weights[head.name]:g}{without}")
        why |= {"answers": "; ".join(told)} | ({"metric.name": reason} if changed != metric else {})
        return replace(run, objective=objective, metric=changed), why

    def heads(self, labels: Labels) -> list[Head]:
        """See `Task`."""
        assert isinstance(labels, Answers)
        found = []
        for name, (own, names) in labels.parts.items():
            there = known(own)
            if not there.any() or (len(names) < 2 and isinstance(own, np.ndarray)):
                what = "no training image has it" if not there.any() else f"the only class is {names[0]!r}"
                raise DataError(
                    f"there is nothing to learn of the answer {name!r}: {what}. Leave it out of data.answers"
                )
            kind: Any = next(task.name for task in self._parts.values() if task.holds(own))
            scale = TargetScale.of(own, names) if isinstance(own, Numbers) else None
            found.append(Head(name, kind, len(names), float(there.mean()), scale))
        return found

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
    ) -> AnswerResults:
        """See `Task`. Each answer has the temperature of its own card. The outputs of all images are kept in memory."""

        def launch(batch: Any) -> Tensor:
            outputs = predict(batch.images)
            if batch.labels.shape[1:] != (each[-1].columns.stop,) or outputs.shape[1] != card.config.classes:
                kinds = ", ".join(f"{one.name} ({one.task.predicts})" for one in each)
                raise DataError(f"the model's answers are {kinds}, and the labels of these images are of other kinds")
            return outputs

        each = [*self._each(card)]
        kept = [(batch, outputs.float().cpu()) for batch, outputs in ahead(images.epoch(0), launch)]
        parts, temperatures = dict[str, Any](), {}
        for one in each:
            batches = [Batch(found[:, one.outputs], one.labels(batch.labels), batch.index) for batch, found in kept]
            if world.any_(any(_known(batch.labels).any() for batch in batches)):
                own, rows, degree = one.card, KeptBatches(batches, images.bad), one.card.temperature
                found = one.task.measure(lambda x: x, rows, own.class_names, own, temperature=degree, best=best)
                parts[one.name], temperatures[one.name] = found, degree
        if not parts:
            raise DataError("no image has a known answer, so nothing can be measured")
        return AnswerResults(list(class_names), parts, temperatures, next(iter(parts.values())).bad)

    def fitted(self, card: Card, logits: np.ndarray, labels: np.ndarray) -> Confidences:
        """See `Task`: a temperature for each answer that has probabilities."""
        found = Confidences()
        for one in self._each(card):
            if one.task.probable:
                truth = one.labels(torch.from_numpy(labels)).numpy()
                fitted = one.task.fitted(one.card, np.ascontiguousarray(logits[:, one.outputs]), truth)
                found[one.name] = fitted  # type: ignore[assignment]  # no answer has answers
        return found

    def activated(self, logits: Tensor, card: Card) -> Tensor:
        """See `Task`: those of all answers side by side."""
        each = [one.task.activated(logits[:, one.outputs], one.card) for one in self._each(card)]
        return torch.cat(each, dim=1)

    def outputs(self, activated: Tensor, card: Card) -> Tensor:
        """See `Task`."""
        return torch.cat([one.task.outputs(activated[:, one.outputs], one.card) for one in self._each(card)], dim=1)

    def meaning(self, card: Card, *, inside: bool) -> dict[str, Any]:
        """See `Task`: of each answer, with its first output and the one behind its last."""
        each = {}
        for one in self._each(card):
            place = {"outputs": [one.outputs.start, one.outputs.stop], "class_names": one.card.class_names}
            each[one.name] = {**place, **one.task.meaning(one.card, inside=inside)}
        return {"meaning": "several answers side by side", "answers": each}

    def predictions(self, logits: Tensor, card: Card, top: int) -> Iterator[Prediction]:
        """See `Task`: one of each answer."""
        each = [*self._each(card)]
        rows = [one.task.predictions(one.calibrated(logits), one.card, top) for one in each]
        for row in zip(*rows, strict=True):
            yield Prediction("", [], [], answers=dict(zip((one.name for one in each), row, strict=True)))

    def columns(self, logits: Tensor, card: Card, top: int, reject: float | None = None) -> PredictedColumns:
        """See `Task`: those of each answer, as "NAME.classes"."""
        found: PredictedColumns = {}
        for one in self._each(card):
            own = one.task.columns(one.calibrated(logits), one.card, top)
            found |= {f"{one.name}.{name}": values for name, values in own.items()}
        return found

    def settings(self, data: Data, card: Card) -> Data:
        """See `Task`. The columns are the card's, unless the settings name others."""
        named = tuple(f"{answer.name}:{answer.task}" for answer in card.answers)
        return replace(data, answers=data.answers or named, labels_per_image="auto")

    def given(self, images: list[Any], labels: Sequence[Any], names: list[str], *, bands: bool) -> GivenImages:
        """See `Task`. A label is a mapping: answer -> class, list of labels, or number. It may lack answers."""
        own, parts = classes_of_answers(names), {}
        if wrong := [one for one in labels if not isinstance(one, Mapping) or not one.keys() <= own.keys()]:
            raise DataError(
                f"a label is {shown(wrong[0])}. Give a dictionary for each image, with the keys {listing(list(own))}"
            )
        for name, classes in own.items():
            task = self._parts["numbers" if name in names else "classes"]  # an output has the name of its number
            found = task.given(images, [one.get(name) for one in labels], classes, bands=bands)
            parts[name] = Named(found.labels, classes)
        source = GivenImages(images, bands=bands)
        source.labels, source.class_names = Answers(parts), names
        return source

    def on_card(self, card: Card, found: AnswerResults) -> Card:
        """See `Task`."""
        own = card.of_answers()
        return card.with_answers(
            {name: self._parts[part.task].on_card(own[name][1], part) for name, part in found.parts.items()}
        )

    def confidence(self, found: AnswerResults, temperature: float) -> Confidences:
        """See `Task`: that of each answer, with its own temperature."""
        confidences = Confidences()
        for name, part in found.parts.items():
            if (one := self._parts[part.task].confidence(part, found.temperatures[name])) is not None:
                confidences[name] = one  # type: ignore[assignment]  # no answer has answers
        return confidences

    def read(self, file: Npz, class_names: Sequence[str]) -> AnswerResults:
        """See `Task`."""
        own, parts, temperatures = classes_of_answers(class_names), {}, {}
        for number, (name, task) in enumerate(file.read("answers", "U").tolist()):
            parts[name] = self._parts[task].read(_Part(file, f"{number}."), own[name])  # type: ignore[arg-type]
            temperatures[name] = float(file.read(f"{number}.temperature", "f")[0])
        if not parts:
            raise ValueError("there is no answer")
        return AnswerResults(list(class_names), parts, temperatures)

    def page(
        self, subject: str, found: AnswerResults, notes: list[str], groups: Sequence[GroupAccuracy], temperature: float
    ) -> TerminalPage:
        """See `Task`: a table of all answers, then the page of each."""
        rows = [
            (name, self._parts[part.task].predicts, part.in_words(), f"{part.count:,}")
            for name, part in found.parts.items()
        ]
        whole = page(
            f"{subject}: mean score {found.score:.2%} of {counted(len(rows), 'answer')}, {found.count:,} images",
            notes,
            table(("answer", "predicts", "result", "images that have it"), rows),
            unreadable_lines(found.bad),
        )
        for name, part in found.parts.items():
            own = replace(part, bad=[])  # type: ignore[type-var]  # each is a dataclass
            alone = self._parts[part.task].page(f"answer {name}", own, [], [], found.temperatures[name])
            whole.parts.extend(alone.parts)
        return whole

    def as_json(self, found: AnswerResults, groups: Sequence[GroupAccuracy], temperature: float) -> dict[str, Any]:
        """See `Task`."""
        each = {
            name: {"task": part.task, **self._parts[part.task].as_json(part, [], found.temperatures[name])}
            for name, part in found.parts.items()
        }
        bad = [{"id": id_, "reason": reason} for id_, reason in found.bad]
        return {SCORE: found.score, "loss": found.loss, "count": found.count, "answers": each, "bad": bad}

    def write(self, found: AnswerResults, out: Path, *, raw: bool = False) -> None:
        """See `Task`: a folder for each answer."""
        for number, part in enumerate(found.parts.values(), 1):
            folder = out / f"answer-{number}"
            folder.mkdir(exist_ok=True)
            self._parts[part.task].write(part, folder, raw=raw)

    def sentence(self, numbers: Mapping[str, float], classes: int) -> str:
        """See `Task`."""
        each: dict[str, dict[str, float]] = {}
        for key, value in numbers.items():
            name, dot, short = key.rpartition(".")
            if dot:
                each.setdefault(name, {})[short] = value
        said = [f"mean score {numbers[SCORE]:.2%}"]
        for name, own in each.items():
            task = next((task for task in self._parts.values() if own.keys() <= {*task.logged}), None)
            if task is not None:
                said.append(f"{name}{BETWEEN}{task.sentence(own, 1)}")
        return "; ".join(said)

    def own(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """See `Task`."""
        logged = {name for task in self._parts.values() for name in task.logged}
        more = super().own(numbers)
        return {key: value for key, value in more.items() if "." not in key or key.rpartition(".")[2] not in logged}


class _Part:
    """The arrays of one answer in a file of results, as an `Npz` of its own."""

    def __init__(self, file: Npz, prefix: str) -> None:
        self._file, self._prefix = file, prefix
        self.headers = {name.removeprefix(prefix) for name in file.headers if name.startswith(prefix)}

    def read(self, name: str, kinds: str = "fiub") -> np.ndarray:
        """See `Npz`."""
        return self._file.read(f"{self._prefix}{name}", kinds)


def _refuse(run: Any) -> None:
    """Raise UsageError for settings that need one class for each image."""
    by_class = {
        "data.sampler": run.data.sampler != "uniform",
        "data.fold": run.data.fold is not None,
        "augment.mixup": run.augment.mixup,
        "augment.cutmix": run.augment.cutmix,
        "teacher": run.teacher is not None,
        "keep_head": run.keep_head,
        "probe_head": run.probe_head,
        "knn": run.knn,
        "fewshot": run.fewshot,
    }
    if wrong := [name for name, asked in by_class.items() if asked]:
        raise UsageError(
            f"{listing(wrong, quoted=False)}: not possible with several answers for an image (data.answers). Leave it "
            "out, or name a single column"
        )


def _metric(metric: Metric, labels: Answers) -> tuple[Metric, str]:
    """Return the metric for these answers, and why it is another one. Raises UsageError for one of another kind."""
    own = type(metric) is not Metric
    if metric.answer is None:
        if own or metric.name not in ("top1", SCORE):
            what = f"the metric is {import_path(type(metric))}" if own else f"metric.name is {metric.name}"
            raise UsageError(
                f"{what}, a number of one answer. Name the answer in metric.answer: {listing(list(labels.parts))}"
            )
        return replace(metric, name="score"), "score, the mean of top-1, mAP and R2 (at least 0) of the answers"
    if metric.answer not in labels.parts:
        raise UsageError(
            f"metric.answer is {metric.answer!r}, which is no answer. Valid are {listing(list(labels.parts))}"
        )
    if own:
        return metric, ""
    of = labels.parts[metric.answer].labels
    valid = NUMBERS if isinstance(of, Numbers) else OF_LABELS if isinstance(of, LabelSets) else OF_CLASSES
    if metric.name in ("top1", SCORE):
        return replace(metric, name=valid[0]), f"{valid[0]}, which suits the answer {metric.answer!r}"  # type: ignore[arg-type]
    if metric.name not in valid:
        raise UsageError(f"metric.name is {metric.name}, and of {metric.answer!r} there are {listing(valid, 9)}")
    return metric, ""


def _known(labels: Tensor) -> Tensor:
    """Return which labels of one answer are known, bool [batch]."""
    first = labels if labels.ndim == 1 else labels[:, 0]
    return first.isfinite() if first.is_floating_point() else first >= 0
