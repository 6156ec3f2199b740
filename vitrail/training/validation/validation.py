"""Looking at held-out images while training goes on: log, keep the best model, notice when it stops improving."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail import world
from vitrail.data.item import Listed, role_of
from vitrail.data.loading.loader import Loader
from vitrail.data.sources.open import Splits
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import (
    Classification,
    Precision,
    Predict,
    classify,
    predictor,
    save_classification,
)
from vitrail.model.build import build
from vitrail.training.batches import evaluation_loader
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.folder import RunFolder
from vitrail.training.optim.average import Swapped
from vitrail.training.run import Run
from vitrail.training.validation.fewshot import TrainingFewShot
from vitrail.training.validation.knn import TrainingKNN
from vitrail.training.validation.rounds import Rounds
from vitrail.weights.base import Base
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.reference import reference
from vitrail.weights.store import WEIGHTS, save_model

SHARES = {
    "colour": "colour {} right",
    "code": "code {} right",
    "agreement": "agreement {}",
    "entropy": "entropy {}",
    "use": "codes {} in use",
}
"""Metrics of learning without labels that are shares, in words."""


@dataclass
class Validation:
    """Evaluates `model`, as averaged where there is an average, and keeps the best in the run folder.

    `loader` holds the validation images; without one, the newest model counts as the best. Raises UsageError
    where early stopping is asked for and there is nothing to decide it by.
    """

    model: nn.Module
    average: Swapped
    loader: Loader | None
    card: Card
    run: Run
    base: Base | None = None
    """Where what does not learn is kept; the run folder then holds the rest."""
    train: Listed | None = None
    """The training images, where shots of `run.fewshot` and neighbours of `run.knn` come from."""

    def __post_init__(self) -> None:
        if self.run.early_stop is not None and (self.loader is None or self.run.early_stop < 1):
            raise UsageError(
                f"early_stop is {self.run.early_stop}: it counts evaluations, at least 1, and needs validation "
                "images (data.validation, or data.holdout above 0)"
            )
        self.found: Classification | None = None
        self.probes: list[TrainingFewShot | TrainingKNN] = []
        asked: dict[str, Any] = {"fewshot": TrainingFewShot, "knn": TrainingKNN}
        for name, probe in asked.items():
            if getattr(self.run, name) is not None:
                if self.loader is None or self.train is None:
                    raise UsageError(
                        f"{name} is measured on validation images: set data.validation, or data.holdout above 0"
                    )
                self.probes.append(probe(self.run, self.train))

    def __call__(self, status: RunStatus, folder: RunFolder, check: Callable[[], None]) -> dict[str, float]:
        """Evaluate after `status.step` steps, log it, and bring `status` up to date; returns the numbers.

        `check` is called once in each round (see `Rounds`). It may raise to end the evaluation; nothing changes then.
        """
        with self.average.swapped():
            numbers = {} if self.loader is None else self.measure(Rounds(self.loader, check))
            probed = self._probed(check, status, folder)
            order, best = self.order({"step": status.step, **numbers} if numbers else {}), self.order(status.best)
            improved = _is_finite(numbers) and order[:1] > best[:1]
            if _is_finite(numbers) and (not status.best or not numbers or order > best):
                status.best = {"step": status.step, **numbers}
                self._keep_best(status, folder)
        status.stale = 0 if improved else status.stale + 1
        status.evaluated = status.step
        if world.is_main() and numbers:
            folder.log("validation", status.step, **numbers)
            self.write(folder)
        if world.is_main():
            for kind, found in probed.items():
                folder.log(kind, status.step, **found)
        return {**numbers, **{name: value for found in probed.values() for name, value in found.items()}}

    def measure(self, loader: Rounds) -> dict[str, float]:
        """Return what the network as it is comes to on the images of `loader`, all processes together."""
        self.found = self._classify(self.model, loader)
        return self.found.metrics()

    def order(self, numbers: dict[str, float]) -> tuple[float, ...]:
        """What the best model is chosen by, the larger the better: top-1, then loss; without labels, loss.

        `numbers` are those of an evaluation and its step; {} where there was none.
        """
        if "top1" in numbers:
            return numbers["top1"], -numbers["nll"]
        return (-numbers["loss"],) if "loss" in numbers else ()

    def write(self, folder: RunFolder) -> None:
        """Write what shows the newest evaluation into the run folder; nothing by default. The main process alone."""

    def save(self, place: Path, card: Card) -> None:
        """Write the network into a model folder."""
        save_model(place, self.model, card, self.base)

    def save_last(self, status: RunStatus, folder: RunFolder) -> None:
        """Keep the newest model, whether it is the best or not."""
        with self.average.swapped(), world.main_alone("keeping the newest model"):
            if world.is_main():
                with folder.tolerating("the last model"):
                    self.save(folder.last, self._signed(status, folder, {}))

    @world.main_alone("signing the models")
    @world.on_main
    def sign(self, folder: RunFolder) -> None:
        """Put what the finished models answer to a fixed image on their cards, for `vitrail weights verify`."""
        for place in (folder.best, folder.last):
            if not (place / WEIGHTS).is_file():
                continue
            with folder.tolerating("the model's reference outputs"):
                model = load(place)
                assert model.card is not None  # it comes with every file
                save_model(place, model, replace(model.card, reference=reference(model)), self.base)

    def test(self, splits: Splits, folder: RunFolder, check: Callable[[], None]) -> dict[str, float] | None:
        """Return the best model's numbers on the test images.

        None where there are none, or where they already served as validation: they are not looked at twice.
        """
        if splits.test is None or role_of(str(splits.held_out.get("validation"))) == "test":
            return None
        with closing(evaluation_loader(self.run, splits.test)) as loader:
            return self._classify(self._best(folder), Rounds(loader, check)).metrics()

    def close(self) -> None:
        """End the loader's threads."""
        if self.loader is not None:
            self.loader.close()
        for probe in self.probes:
            probe.close()

    def _best(self, folder: RunFolder) -> nn.Module:
        """Return the best model, which the main process alone reads: a folder may be one that only it sees."""
        with world.main_alone("reading the best model"):
            best = load(folder.path) if world.is_main() else build(self.card.config)
        best = best.to(next(self.model.parameters()).device)
        for tensor in best.state_dict().values():
            world.from_main_(tensor)
        return best

    def _classify(self, model: nn.Module, loader: Rounds) -> Classification:
        return classify(self._predictor(model), loader, self.card.class_names)

    def _probed(self, check: Callable[[], None], status: RunStatus, folder: RunFolder) -> dict[str, dict[str, float]]:
        """Kind of line -> numbers, of each probe of the features that was asked for; what is not finite has none, which
        is logged."""
        found: dict[str, dict[str, float]] = {}
        for probe in self.probes:
            assert self.loader is not None
            try:
                embed = self._predictor(self.model, features=True)
                found[probe.kind] = probe(embed, Rounds(self.loader, check), check)
            except DataError as error:
                folder.log(probe.kind, status.step, error=str(error))
        return found

    def _predictor(self, model: nn.Module, *, features: bool = False) -> Predict:
        """Return images -> logits, or with `features` images -> the input of the classifier."""
        precision: Precision = "bf16" if self.run.precision == "bf16" else "float32"
        return predictor(model, precision=precision, features=features)

    @world.main_alone("keeping the best model")
    @world.on_main
    def _keep_best(self, status: RunStatus, folder: RunFolder) -> None:
        numbers = {f"validation {name}": value for name, value in status.best.items() if name != "step"}
        with folder.tolerating("the best model"):
            self.save(folder.best, self._signed(status, folder, numbers))
            if self.found is not None:
                partial = folder.path / ".evaluation.npz"
                save_classification(partial, self.found)
                partial.replace(folder.path / "evaluation.npz")

    def _signed(self, status: RunStatus, folder: RunFolder, metrics: dict[str, float]) -> Card:
        """Return the card with how these weights came to be."""
        provenance = {**self.card.provenance, "step": status.step, "run": folder.path.name}
        return replace(self.card, metrics=metrics, provenance=provenance)


def describe(numbers: dict[str, float]) -> str:
    """Write the numbers of an evaluation as one phrase."""
    if not numbers:
        return "no validation images"
    on = f"on {numbers['count']:.0f} images"
    probed = [name for name in numbers if name.endswith("-shot") or name == "knn"]
    shots = "".join(f", {name.replace('knn', 'kNN')} {numbers[name]:.2%}" for name in probed)
    if "top1" in numbers:
        classified = f"validation top-1 {numbers['top1']:.2%}, top-5 {numbers['top5']:.2%}, loss {numbers['nll']:.4f}"
        return f"{classified} {on}{shots}"
    shares = "".join(f", {words.format(f'{numbers[name]:.2%}')}" for name, words in SHARES.items() if name in numbers)
    return f"validation loss {numbers['loss']:.4f}{shares} {on}{shots}"


def _is_finite(numbers: dict[str, float]) -> bool:
    return all(math.isfinite(value) for value in numbers.values())
