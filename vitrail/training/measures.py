"""Measures on held-out images: the objective's own loss, and probes of the features.

The masks and crops of validation images are those of one step number that training never reaches. So the task is the
same in every evaluation and for any number of processes, and losses can be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail import world
from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.sets import one_label
from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.split import subset
from vitrail.device import autocast_dtype, choose_device
from vitrail.errors import UsageError
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.classify import Predict
from vitrail.evaluation.features import collect
from vitrail.evaluation.fewshot import ShotSelection, fewshot
from vitrail.evaluation.knn import knn
from vitrail.model.build import eval_mode
from vitrail.objective.base import Prepared
from vitrail.objective.masks import VALIDATION
from vitrail.objective.self_supervised import SelfSupervised
from vitrail.tasks.task import Task
from vitrail.training.batches import SHOWN_ROWS, columns_picture, evaluation_loader
from vitrail.training.folder import RunFolder
from vitrail.training.run import Run
from vitrail.weights.card import Card

SEEN = "seen.png"
"""Picture of input, mask, prediction and target of some validation images at the newest evaluation."""
MOST = 20_000
"""Largest number of training images for kNN, which limits memory and time. Classes keep their proportions."""


class Measure(ABC):
    """How a network is measured on validation images, and how the best model is chosen."""

    task: Task[Any] | None = None
    """What the network learns to predict; None without labels."""

    @abstractmethod
    def __call__(self, images: Rounds) -> dict[str, float]:
        """Return the numbers of the network on these images, all processes together."""

    @abstractmethod
    def rank(self, numbers: dict[str, float]) -> tuple[float, ...]:
        """Return the rank of a model, larger is better, from the numbers of an evaluation and its step."""

    def choice(self, numbers: dict[str, float], highest: dict[str, float]) -> tuple[float, ...]:
        """Return the rank by which the best model is chosen, given the numbers of the highest `rank` so far."""
        return self.rank(numbers)

    def write_newest(self, folder: RunFolder) -> None:  # noqa: B027  # optional
        """Write a picture of the newest evaluation, if any, into the run folder. Only the main process calls it."""

    def best_writer(self, folder: RunFolder) -> Callable[[], object]:
        """Return the function that writes the newest predictions, if any, into the run folder as the best model's."""
        return lambda: None

    def described(self, card: Card) -> Card:
        """Return the card of the network with what the newest evaluation decided. Default: nothing."""
        return card


class ObjectiveLoss(Measure):
    """Measure for learning without labels: the objective's loss, its metrics and "count".

    The model with the lowest loss is the best. If losses of different steps cannot be compared (`chosen_by_loss`), the
    newest model is the best.
    """

    def __init__(self, objective: SelfSupervised, run: Run) -> None:
        self._objective = objective
        self._half = autocast_dtype(run.precision)
        self._picture: bytes | None = None

    def __call__(self, images: Rounds) -> dict[str, float]:
        """See `Measure`. Also draws the first images."""
        with eval_mode(self._objective), torch.no_grad():
            sums = self._sums(images)
        totals: dict[str, float] = {}
        for part in world.gather(sums):  # a process without images has no metrics
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        count = totals.pop("count")
        return {**{name: value / max(count, 1.0) for name, value in totals.items()}, "count": count}

    def rank(self, numbers: dict[str, float]) -> tuple[float, ...]:
        """See `Measure`."""
        if not numbers:
            return ()
        return (-numbers["loss"],) if self._objective.chosen_by_loss else (numbers["step"],)

    def write_newest(self, folder: RunFolder) -> None:
        """See `Measure`."""
        if self._picture is not None:
            folder.write_bytes(SEEN, self._picture)

    def _sums(self, images: Rounds) -> dict[str, float]:
        device = next(self._objective.parameters()).device
        sums: dict[str, float] = {"count": 0.0, "loss": 0.0}
        shown: list[Prepared] = []

        def launch(batch: Batch) -> dict[str, Tensor | int]:
            prepared = self._objective.prepare(batch, step=VALIDATION)
            with torch.autocast(device.type, dtype=self._half, enabled=self._half is not None):
                loss, count, metrics = self._objective(prepared, step=VALIDATION)
            if not shown and world.is_main():
                shown.append(prepared.first(SHOWN_ROWS))
            return {"count": count, "loss": loss, **metrics}

        for _, numbers in ahead(images.epoch(0), launch):
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        if shown:
            self._picture = columns_picture(self._objective.show(shown[0]))
        return sums


class FewShotProbe:
    """Few-shot accuracy on the validation images, with shots from the training images (protocol "big_vision-2023").

    The shots are chosen once, so every evaluation uses the same ones; they are prepared as validation images are.
    Raises UsageError for impossible numbers of shots, DataError for a class without training images.
    """

    kind = "fewshot"
    """Kind of its lines in metrics.jsonl."""

    def __init__(self, run: Run, train: IndexedSource) -> None:
        assert run.fewshot is not None
        self.shots = ShotSelection(one_label(train.labels, "fewshot"), list(train.class_names), shots=run.fewshot)
        self.loader = evaluation_loader(run, Subset(train, self.shots.rows))

    def __call__(self, embed: Predict, validation: Rounds, check: Callable[[], None]) -> dict[str, float]:
        """Return {"5-shot": mean over seeds, "5-shot std": standard deviation, ...}; `embed` maps images to features.

        Random numbers come from the protocol's own generators only. Raises DataError for non-finite features.
        """
        names = self.shots.class_names
        shots = collect(embed, Rounds(self.loader, check), names)
        shots = replace(shots, index=self.shots.rows[shots.index])
        found = fewshot(self.shots, shots, collect(embed, validation, names))
        numbers: dict[str, float] = {}
        for row, count in enumerate(found.shots):
            numbers |= {f"{count}-shot": float(found.mean[row, 0]), f"{count}-shot std": float(found.std[row, 0])}
        return numbers


class KNNProbe:
    """Accuracy on the validation images by the `run.knn` nearest training images (`vitrail.evaluation.knn`).

    The training images are chosen once, so every evaluation uses the same ones; they are prepared as validation images
    are. Raises UsageError if no training image has a label, or if `run.knn` is below 1.
    """

    kind = "knn"
    """Kind of its lines in metrics.jsonl."""

    def __init__(self, run: Run, train: IndexedSource) -> None:
        assert run.knn is not None
        labelled = np.flatnonzero(one_label(train.labels, "knn") >= 0)
        if len(labelled) < run.knn:
            raise UsageError(
                f"knn is {run.knn}; it is a number of neighbours among the training images with labels, from 1 to "
                f"{len(labelled)}"
            )
        known = Subset(train, labelled)
        rows = subset(known, min(MOST, len(known)), run.seed)
        self.neighbours = min(run.knn, len(rows))
        self.class_names = list(train.class_names)
        self.device = choose_device(run.device)
        self.loader = evaluation_loader(run, Subset(known, rows))

    def __call__(self, embed: Predict, validation: Rounds, check: Callable[[], None]) -> dict[str, float]:
        """Return {"knn": top-1}; `embed` maps images to features. Raises DataError for non-finite features."""
        train = collect(embed, Rounds(self.loader, check), self.class_names)
        asked = collect(embed, validation, self.class_names)
        found = knn(train, asked, k=(self.neighbours,), device=self.device)
        return {"knn": found.top1[self.neighbours]}


class Rounds:
    """A loader whose passes take equally many rounds in every process; `check` is called once in each round.

    Processes may have different numbers of evaluation batches, and batches without a readable image are left out. So
    `check` may talk to the other processes, while no loop over batches may: a process without a batch takes part in the
    round all the same. `check` may raise to end the pass, in all processes at the same round. All processes must create
    it together.
    """

    def __init__(self, loader: Loader, check: Callable[[], None]) -> None:
        self.loader = loader
        self._check = check
        self.bad, self.source = loader.bad, loader.source
        self._rounds = max(world.gather(len(loader)))

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate over the batches of this process."""
        with closing(self.loader.epoch(epoch)) as batches:  # type: ignore[type-var]
            for _ in range(self._rounds):
                self._check()
                if (batch := next(batches, None)) is not None:
                    yield batch
