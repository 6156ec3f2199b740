"""What is known about the images and the weights of a command. Each is read or measured once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitrail.data.sources.open import OpenedData
from vitrail.durations import Epochs
from vitrail.ranges import height_width
from vitrail.recipes.by_data import TrainingSet
from vitrail.recipes.finetune_by_data import Pretrained
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.roles import Splits
    from vitrail.data.settings import Preparation

MEASURED = 2.0
"""Seconds for which the speed of training is measured if there is a time limit."""


class Known(OpenedData):
    """The data of a command, opened once, and what else its settings depend on."""

    def __init__(self) -> None:
        super().__init__()
        self._facts: dict[object, Any] = {}

    def splits_of(self, run: Run) -> Splits:
        """Return the data of `run`, opened. Raises DataError and UsageError."""
        from vitrail.training.classes import known_classes

        return self.splits(run.data, run.seed, run.supervised, known_classes(run))

    def training_set(self, run: Run) -> TrainingSet:
        """Return the properties of the training images of `run`. Raises DataError and UsageError."""
        train = self.splits_of(run).train
        key = "training set", run.data, run.seed, run.supervised
        if key not in self._facts:
            self._facts[key] = TrainingSet.of(train)
        found: TrainingSet = self._facts[key]
        return found

    def network(self, run: Run) -> Pretrained:
        """Return the properties of the pretrained network of `run`. Raises WeightsError."""
        from vitrail.model.variants import ResNetConfig
        from vitrail.weights.load import read_card

        assert run.weights is not None
        config = read_card(run.weights).config
        side = min(height_width(run.image_size or config.image_size))
        own_head = run.vit.head is not None or getattr(config, "head", None) is not None
        if isinstance(config, ResNetConfig):
            width = config.width * 2 ** (len(config.units) + 1)
            return Pretrained(width, 0, side, config.classes > 0, own_head)
        head = getattr(config, "segmentation", "") if run.vit.segmentation is None else run.vit.segmentation
        return Pretrained(config.width, config.depth, side, config.classes > 0, own_head, head == "queries")

    def framing(self, run: Run) -> tuple[Preparation, str] | None:
        """Return how images are best prepared for the weights of `run`, and the reason; None where nothing is tried.

        Processes that torchrun started do not try it, because they must all decide the same.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return None
        from vitrail.transfer.framing import framing

        key = ("framing", run.weights, run.image_size, run.data, run.seed)
        if key not in self._facts:
            self._facts[key] = framing(run, self.splits_of(run))
        found: tuple[Preparation, str] | None = self._facts[key]
        return found

    def seen_in_time(self, run: Run) -> int | None:
        """Return the number of images of full size that `run` sees in its time limit; None without a limit.

        The speed is measured, which takes seconds. Processes that torchrun started do not measure it, because they must
        all decide the same.
        """
        if run.time_limit is None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return None
        from vitrail.transfer.timing import seen_in_time

        return seen_in_time(replace(run, duration=Epochs(1)), self.splits_of(run), MEASURED)
