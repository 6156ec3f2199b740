"""Evaluation during training: log the numbers, save the best model, notice when it stops improving."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from vitrail import world
from vitrail.data.images.pixels import pixels_of
from vitrail.data.item import IndexedSource, role_of
from vitrail.data.loading.loader import Loader
from vitrail.data.roles import Splits
from vitrail.device import free_memory
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.evaluation.classify import BEST_CLASSES, Classification, Predict, predictor
from vitrail.evaluation.confidence import KeptLogits
from vitrail.evaluation.metric import Metric
from vitrail.evaluation.results import Results
from vitrail.import_path import import_path
from vitrail.objective.base import Objective
from vitrail.objective.self_supervised import SelfSupervised
from vitrail.tasks.catalog import save_results, task_of
from vitrail.tasks.task import Task
from vitrail.training.batches import evaluation_loader
from vitrail.training.checkpoints.flatten import nbytes
from vitrail.training.checkpoints.state import ROOM, RunStatus
from vitrail.training.classes import ClassChange
from vitrail.training.facts import CPU
from vitrail.training.floor import Floors, floors
from vitrail.training.folder import RunFolder
from vitrail.training.measures import FewShotProbe, KNNProbe, Measure, ObjectiveLoss, Rounds
from vitrail.training.optim.average import Swapped
from vitrail.training.run import Run
from vitrail.training.saved_network import SavedNetwork, copied_network, saved_network
from vitrail.weights.answer import Confidences
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence
from vitrail.weights.load import load, read_card
from vitrail.weights.reference import reference
from vitrail.weights.store import WEIGHTS, replace_header
from vitrail.words import shown

OUTPUTS = "evaluation.npz"
"""File of a run folder with the best model's outputs for the validation images."""
BEST = "the best model"
"""Its name in messages about a full disk."""
SHARES = {
    "colour": "colour {} right",
    "code": "code {} right",
    "agreement": "agreement {}",
    "entropy": "entropy {}",
    "use": "codes {} in use",
}
"""Metrics of learning without labels that are shares, and how they are written."""


class Accuracy(Measure):
    """Measure for learning from labels. `run.metric` chooses the best model; loss breaks ties (`Metric.tied`).

    With one label: top-1, top-5, loss. With several: mean average precision, F1, exact matches, loss, and the
    thresholds of the classes, which are chosen on the same images. With numbers: R2, MAE, RMSE, loss.
    """

    task: Task[Any]

    def __init__(self, model: nn.Module, run: Run, card: Card, change: ClassChange | None = None) -> None:
        self._model, self._run, self.task, self._change = model, run, task_of(card), change
        self._card = card.unchosen()  # they are chosen anew at each evaluation
        self._found: Results | None = None

    def __call__(self, images: Rounds) -> dict[str, float]:
        """See `Measure`."""
        found = measured(network_outputs(self._model, self._run), self._run, images, self._card, self.task)
        self._found = found.stored()
        return numbers_of(found, self._run.metric, self._change)

    def described(self, card: Card) -> Card:
        """See `Measure`."""
        return card if self._found is None else self.task.on_card(card, self._found)  # type: ignore[no-any-return]

    def rank(self, numbers: dict[str, float]) -> tuple[float, ...]:
        """See `Measure`."""
        metric = self._run.metric
        loss = numbers.get("nll", numbers.get("loss", 0.0))
        return (metric.rank(numbers[metric.key]), -loss) if metric.key in numbers else ()

    def choice(self, numbers: dict[str, float], highest: dict[str, float]) -> tuple[float, ...]:
        """See `Measure`."""
        rank = self.rank(numbers)
        return rank and (min(rank[0], self._run.metric.tied(highest)), *rank[1:])

    def best_writer(self, folder: RunFolder) -> Callable[[], object]:
        """See `Measure`."""
        return (
            super().best_writer(folder)
            if self._found is None
            else partial(save_results, folder.path / OUTPUTS, self._found)
        )


def measured(predict: Predict, run: Run, images: Any, card: Card, task: Task[Any]) -> Results:
    """Return the outputs of a network for `images`, as far as the run's metric needs them.

    card: That of the network, with its temperature, and with its thresholds if it predicts several labels; without
    thresholds, these are chosen on the images.
    """
    best = len(card.class_names) if run.metric.all_classes else BEST_CLASSES
    return task.measure(predict, images, card.class_names, card, temperature=card.temperature, best=best)  # type: ignore[no-any-return]


def numbers_of(found: Results, metric: Metric, change: ClassChange | None = None) -> dict[str, float]:
    """Return the numbers to log, with that of the metric, and the accuracy on old and on new classes.

    Raises UsageError if a user's metric returns no number.
    """
    value = metric.measured(found)
    if not isinstance(value, Real):
        raise UsageError(f"{import_path(type(metric))}.value returned {shown(value)}; it must return a number")
    of_parts = (
        change.accuracy(found.class_count, found.class_correct) if change and isinstance(found, Classification) else {}
    )
    return {**found.metrics(), **of_parts, metric.key: float(value)}


def network_outputs(model: nn.Module, run: Run, *, features: bool = False) -> Predict:
    """Return the function images -> logits, or with `features` images -> the input of the classifier."""
    return predictor(model, precision=run.precision, features=features)


@dataclass
class Validation:
    """Evaluates `model`, or its average, during training and saves the best model in the run folder.

    `model` is the network without the parts of an objective that only predict.
    `loader` has the validation images; without them the newest model counts as the best. Raises UsageError for early
    stopping or probes without validation images.
    """

    model: nn.Module
    average: Swapped
    loader: Loader | None
    card: Card
    run: Run
    base: BaseWeights | None = None
    """Weights that hold the frozen part of the network; the run folder then holds the tuned part only."""
    train: IndexedSource | None = None
    """The training images, from which the probes `run.fewshot` and `run.knn` take theirs."""
    objective: Objective | None = None
    """The objective, if the network learns without labels."""
    on_evaluate: Callable[[int, dict[str, float]], None] | None = None
    """Called by the main process with step and numbers of each evaluation."""
    change: ClassChange | None = None
    """What the run makes of the classes of its weights."""

    def __post_init__(self) -> None:
        if self.run.early_stop is not None and self.loader is None:
            raise UsageError(
                f"early_stop is {self.run.early_stop}. It is a number of evaluations, at least 1, and needs validation "
                "images (--data.validation, or --data.holdout above 0)."
            )
        self.measure: Measure = Accuracy(self.model, self.run, self.card, self.change)
        if isinstance(self.objective, SelfSupervised):
            self.measure = ObjectiveLoss(self.objective, self.run)
        self.saved = saved_network(self.model)
        self._writer = ThreadPoolExecutor(1, "models")
        self._writing: list[Future[None]] = []
        if not self.saved.has_features and (self.run.knn is not None or self.run.fewshot is not None):
            raise UsageError("knn and fewshot need the features of a network of vitrail, not of one given in Python")
        self.probes: list[FewShotProbe | KNNProbe] = []
        asked: dict[str, Any] = {"fewshot": FewShotProbe, "knn": KNNProbe}
        for name, probe in asked.items():
            if getattr(self.run, name) is not None:
                if self.loader is None or self.train is None:
                    raise UsageError(
                        f"{name} is measured on validation images: set --data.validation, or --data.holdout above 0"
                    )
                self.probes.append(probe(self.run, self.train))

    def in_words(self, numbers: dict[str, float]) -> str:
        """Return the numbers of an evaluation as a phrase."""
        return evaluation_in_words(numbers, self.measure.task, len(self.card.class_names))

    def __call__(self, status: RunStatus, folder: RunFolder, check: Callable[[], None]) -> dict[str, float]:
        """Evaluate after `status.step` steps, log the numbers, update `status`, and return the numbers.

        `check` is called once in each round (see `Rounds`). It may raise to end the evaluation; nothing changes then.
        """
        with self.average.swapped():
            numbers = {} if self.loader is None else self.measure(Rounds(self.loader, check))
            probed = self._probed(check, status, folder)
            improved, better = self._compared(numbers, status)
            if better:
                status.best = {"step": status.step, **numbers}
                self._save_best(status, folder)
        status.stale = 0 if improved else status.stale + 1
        known, status.evaluated = 0 < status.step == status.evaluated, status.step
        if world.is_main() and not known:  # else a resumed run has its lines
            if numbers:
                folder.log("validation", status.step, **numbers)
                self.measure.write_newest(folder)
            for kind, found in probed.items():
                folder.log(kind, status.step, **found)
            if self.on_evaluate is not None:
                self.on_evaluate(status.step, numbers)
        return {**numbers, **{name: value for found in probed.values() for name, value in found.items()}}

    def _compared(self, numbers: dict[str, float], status: RunStatus) -> tuple[bool, bool]:
        """Return whether an evaluation has the highest rank so far, which `status` then knows, and whether it is of
        the best model. Without validation images, the newest model is the best."""
        if not numbers or not _is_finite(numbers):
            return False, not numbers
        newest, best = {"step": status.step, **numbers}, status.best if "count" in status.best else {}
        highest = status.highest or best  # older checkpoints do not have it
        improved = self.measure.rank(newest)[:1] > self.measure.rank(highest)[:1]
        status.highest = newest if improved else highest
        return improved, self.measure.choice(newest, status.highest) > self.measure.choice(best, status.highest)

    def forget_lost(self, status: RunStatus, folder: RunFolder) -> str:
        """Forget the best model of a resumed run if the one in its folder is of a later step than `status`.

        It was saved after the checkpoint from which the run goes on, and has replaced the one that `status` knows. All
        processes call it. Return what to say, if anything.
        """
        kept = world.from_main("reading the best model", lambda: _step_of(folder.best))
        if kept is None or kept <= status.step:
            return ""
        status.best = status.highest = {}
        return f"the best model in {folder.path} is that of step {kept}, which is trained again: another one is chosen"

    def save_last(self, status: RunStatus, folder: RunFolder) -> None:
        """Save the newest model, whether it is the best or not, while training goes on."""
        card = self._signed(status, folder, {})

        def write(network: SavedNetwork) -> None:
            with folder.tolerating("the last model"):
                network.save(folder.last, card, self.base)

        with self.average.swapped():
            self._keep(write)

    def _keep(self, write: Callable[[SavedNetwork], None]) -> None:
        """Call `write` with a copy of the network as it is now, in the main process, while training goes on.

        Without memory for a copy, training waits. There is at most one copy of each kind, of the best and the last.
        """
        if not world.is_main():
            return
        while len(self._writing) > 1 or (self._writing and self._writing[0].done()):
            self._writing.pop(0).result()
        if nbytes(self.model.state_dict()) * ROOM < free_memory(CPU):
            self._writing.append(self._writer.submit(write, saved_network(copied_network(self.model))))
        else:
            write(self.saved)

    def written(self) -> None:
        """Return when the models that are being written are complete; raise what went wrong in writing them."""
        with world.main_alone("writing the models"):
            while self._writing:
                self._writing.pop(0).result()

    @property
    def until_written(self) -> Callable[[], object]:
        """Return a function that returns when the models that are being written now are complete, in any thread."""
        return partial(wait, list(self._writing))

    @world.main_alone("signing the models")
    @world.on_main
    def sign(self, folder: RunFolder, confidence: Confidence | Confidences | None = None) -> None:
        """Complete the cards of the finished models.

        They get their outputs for a fixed image, for `vitrail weights verify`. The best model gets its confidence, and
        so does the last one if both are of one step.
        """
        best = None
        for place in (folder.best, folder.last):
            if not (place / WEIGHTS).is_file() or not self.saved.has_card:
                continue
            with folder.tolerating("the model's reference outputs"):
                model = load(place)
                assert model.card is not None  # it comes with every file
                best = model.card.provenance.get("step") if place == folder.best else best
                found = confidence if model.card.provenance.get("step") == best else None
                card = replace(model.card.with_confidence(found), reference=reference(model))
                replace_header(place, card=card)

    def follow_base(self, folder: RunFolder) -> None:
        """Let the models that are kept refer to the base where it is now."""
        for place in (folder.best, folder.last):
            if self.base is not None and (place / WEIGHTS).is_file():
                with folder.tolerating("the new place of the base model"):
                    replace_header(place, base=self.base)

    def tests(self, splits: Splits) -> bool:
        """Return whether there are test images to evaluate at the end."""
        if self.measure.task is None or splits.test is None:
            return False
        return role_of(str(splits.held_out.get("validation"))) != "test"

    def test(self, splits: Splits, folder: RunFolder, check: Callable[[], None]) -> dict[str, float] | None:
        """Return the best model's numbers on the test images.

        None without labels, without test images, if the test images already served as validation images, or if the
        best model could not be written.
        """
        task = self.measure.task
        if task is None or splits.test is None or not self.tests(splits):
            return None
        if world.any_(BEST in folder.lost):
            return None
        with closing(evaluation_loader(self.run, splits.test)) as loader:
            best, card = self.saved.best(folder, self.card), self.saved.best_card(folder, self.card)
            outputs, images = network_outputs(best, self.run), Rounds(loader, check)
            found = measured(outputs, self.run, images, card, task)
            return numbers_of(found, self.run.metric, self.change)

    def floors(self, splits: Splits, status: RunStatus, test: dict[str, float] | None) -> Floors:
        """Return what a classifier must beat on the test images, if the network was tested, else on validation images.

        There are none for a network that does not learn one class for each image.
        """
        measured = splits.validation if test is None else splits.test
        if measured is None or "balanced_accuracy" not in (test or status.best):
            return Floors({})
        pixels = pixels_of(self.card.preprocess.bands)
        compute = partial(floors, splits.train, measured, seconds=status.elapsed, pixels=pixels)
        return world.from_main("measuring what a linear classifier reaches", compute)

    def calibrated(
        self, folder: RunFolder, status: RunStatus, check: Callable[[], None]
    ) -> Confidence | Confidences | None:
        """Return the confidence of the best model on the validation images, and write its outputs for them anew.

        None if calibration is off, for a network that learns without labels or is not vitrail's, without validation
        images, and if the best model could not be written or its outputs are not finite.
        """
        task = self.measure.task
        if not self.run.calibrate or self.loader is None or task is None or not self.saved.has_card:
            return None
        if world.any_(BEST in folder.lost):
            return None
        outputs = network_outputs(self.saved.best(folder, self.card), self.run)
        card = self.saved.best_card(folder, self.card).with_confidence(None)
        logits = KeptLogits(outputs, Rounds(self.loader, check), len(self.loader.source))
        before = measured(logits, self.run, logits, card, task)
        numbers = before.metrics()
        if not math.isfinite(numbers.get("nll", numbers.get("loss", math.nan))):
            return None
        card = card.with_confidence(task.fitted(card, *logits.rows()))
        outputs, images = logits.again()
        found = measured(outputs, self.run, images, card, task)
        confidence = task.confidence(found, card.temperature)
        if world.is_main() and confidence is not None:
            folder.log("calibration", status.step, **confidence.logged())
            with folder.tolerating("the best model's outputs"):
                save_results(folder.path / OUTPUTS, found.stored())
        return confidence

    def close(self) -> None:
        """End the threads of the loaders, and the one that writes models when it has written them."""
        self._writer.shutdown()
        if self.loader is not None:
            self.loader.close()
        for probe in self.probes:
            probe.loader.close()

    def _probed(self, check: Callable[[], None], status: RunStatus, folder: RunFolder) -> dict[str, dict[str, float]]:
        """Return kind -> numbers for each probe; a probe of non-finite features has none, and its error is logged."""
        found: dict[str, dict[str, float]] = {}
        for probe in self.probes:
            assert self.loader is not None
            try:
                embed = network_outputs(self.model, self.run, features=True)
                found[probe.kind] = probe(embed, Rounds(self.loader, check), check)
            except DataError as error:
                folder.log(probe.kind, status.step, error=str(error))
        return found

    def _save_best(self, status: RunStatus, folder: RunFolder) -> None:
        numbers = {f"validation {name}": value for name, value in status.best.items() if name != "step"}
        card, write_outputs = self._signed(status, folder, numbers), self.measure.best_writer(folder)

        def write(network: SavedNetwork) -> None:
            with folder.tolerating(BEST):
                network.save(folder.best, card, self.base)
            with folder.tolerating("the best model's outputs"):
                write_outputs()

        self._keep(write)

    def _signed(self, status: RunStatus, folder: RunFolder, metrics: dict[str, float]) -> Card:
        """Return the card with the origin of these weights."""
        provenance = {**self.card.provenance, "step": status.step, "run": folder.path.name}
        return self.measure.described(replace(self.card, metrics=metrics, provenance=provenance))


def _step_of(place: Path) -> int | None:
    """Return the step of a model that a run has saved; None without one, or without a card that says it."""
    try:
        step = read_card(place).provenance.get("step")
    except (VitrailError, OSError):
        return None
    return step if isinstance(step, int) else None


def evaluation_in_words(numbers: dict[str, float], task: Task[Any] | None, classes: int) -> str:
    """Return the numbers of an evaluation as a phrase.

    task: What the network learns to predict; None for a network that learns without labels. classes: Number of classes
    or targets.
    """
    if not numbers:
        return "no validation images"
    on = f"on {numbers['count']:.0f} images"
    probed = [name for name in numbers if name.endswith("-shot") or name == "knn"]
    shots = "".join(f", {name.replace('knn', 'kNN')} {numbers[name]:.2%}" for name in probed)
    if task is not None:
        of_probes = {*probed, *(f"{name} std" for name in probed)}
        own = {name: value for name, value in task.own(numbers).items() if name not in of_probes}
        more = "".join(f", {name} {value:.4f}" for name, value in own.items())
        return f"validation {task.sentence(numbers, classes)}{more} {on}{shots}"
    shares = "".join(f", {words.format(f'{numbers[name]:.2%}')}" for name, words in SHARES.items() if name in numbers)
    return f"validation loss {numbers['loss']:.4f}{shares} {on}{shots}"


def _is_finite(numbers: dict[str, float]) -> bool:
    return all(math.isfinite(value) for value in numbers.values())
