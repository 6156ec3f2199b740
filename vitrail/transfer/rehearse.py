"""Timing a run before it is run: set up as `vitrail.training.loop.fit` sets it up, a few real steps, forgotten.

Steps are timed with the loader behind them: on a CPU decoding and learning share the cores, so that neither the
longer of the two nor their sum is what they take together. A step too large to be repeated in the time there is, is
timed on fewer images, and grows in proportion but for what does not depend on them (`timing.overhead`). An epoch is
rehearsed with as many steps as it has, up to `STEPS`, because nothing is loaded ahead for the first one. The first
steps of every size are left out, and what remains is given by its median.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from vitrail.costs.measure import now
from vitrail.data.item import View
from vitrail.data.loading.loader import Batch
from vitrail.data.sources.open import Splits
from vitrail.evaluation.classify import predictor
from vitrail.model.process import prepare_process
from vitrail.training.batch_size import COPIES_AT_THE_LOADER, COPIES_ON_A_DEVICE, cut, image_bytes
from vitrail.training.batches import evaluation_loader, training_loader
from vitrail.training.checkpoints import checkpoint
from vitrail.training.objectives import build_objective
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer, clip_, set_learning_rate
from vitrail.training.optim.progressive import Sizes
from vitrail.training.optim.tune import tune
from vitrail.training.plan import Plan
from vitrail.training.processes.parallel import prepare
from vitrail.training.resolve import build_model, resolve
from vitrail.training.run import Optim, Run
from vitrail.training.step import backward, seed_step
from vitrail.transfer.timing import GROWTHS, Answers, Pace, Speeds, overhead

STEPS = 4
"""Of a rehearsed epoch, at most."""
SMALLEST = 2
"""Images of the first step that is tried: norms over a batch need two."""
FACTOR = 4
"""From one size that is tried to the next."""
SHARE = 1 / 12
"""Of the time there is, that a step may take at most; sizes are then chosen in about a third of it."""
SECOND = 1 / 4
"""The same for the second size: a single one cannot tell what does not grow with the images."""
WRITTEN = 64 * 2**20
"""Bytes of a checkpoint that are written to time it, at most."""
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1}
"""Values that the optimiser keeps of each weight."""


class Size(NamedTuple):
    """How many images a step is timed with."""

    images: int
    constant: float
    """Seconds of such a step that do not grow with the images."""
    whole: int
    """How many it will have."""

    def each(self, seconds: float) -> float:
        """Return the seconds per image of the whole step, where one of this size takes `seconds`."""
        constant = min(self.constant, seconds / 2)
        return (seconds - constant) / self.images + constant / self.whole


class Rehearsal:
    """A run ready for its first step.

    Raises what `fit` raises before its first step: UsageError, DataError, WeightsError. No run folder is made.
    """

    def __init__(self, run: Run, splits: Splits) -> None:
        build_optimizer(nn.Linear(1, 1), Optim())  # what torch imports for the first one is no part of `start`
        began = time.perf_counter()
        names = splits.class_names
        self.splits = splits
        self.resolved = resolve(run, splits.train, names)
        run, config = self.resolved.run, self.resolved.config
        prepare_process()
        torch.manual_seed(run.seed)
        model = build_model(self.resolved)
        tune(model, run, self.resolved.decisions)
        self.objective = build_objective(self.resolved, model, len(names))
        self.objective.to(self.resolved.device).train()
        self.image_bytes = image_bytes(self.objective, run, config)
        """That a step takes for each image that is in the network at once."""
        if run.accumulate is None:
            run = replace(run, accumulate=cut(self.objective, run, config, self.image_bytes))
        self.run = run
        prepare(model, run)
        self.optimizer = build_optimizer(self.objective, run.optim)
        set_learning_rate(self.optimizer, 0.0)  # what is timed leaves the weights as they are
        with closing(training_loader(run, splits.train)) as loader:
            self.plan = Plan.of(run, len(loader))
        self.average = Averager(model if run.supervised else self.objective, run.average)
        self.sized = Sizes(run.progressive, config)
        self.start = time.perf_counter() - began
        """Seconds that this took."""

    @property
    def micro(self) -> int:
        """Images that are in the network at once."""
        assert self.run.batch_size and self.run.accumulate
        return math.ceil(self.run.batch_size / self.run.accumulate)

    def speeds(self, seconds: float, answers: Answers | None = None) -> Speeds:
        """Time steps, writing and, where they are not given, answers, in about `seconds`; each at least once."""
        growths = GROWTHS if self.run.progressive.start < 1 else GROWTHS[-1:]
        share = seconds / (len(growths) + (answers is None))
        paces = tuple(self._pace(growth, share) for growth in growths)
        saved, model = self._writing()
        return Speeds(paces, self._update(), answers or self.answers(share), saved, model, self.start)

    def answers(self, seconds: float) -> Answers:
        """Time the frozen network on training images, as evaluation and probes ask it."""
        began = time.perf_counter()
        predict = predictor(self.objective.model, precision="bf16" if self.resolved.autocast else "float32")
        ready = time.perf_counter() - began
        size = self._affordable(lambda number: predict(self._blank(number).images), 2 * self.micro, seconds)
        end = time.perf_counter() + seconds / 2
        sample = self._sample(STEPS * size.images)
        passes: list[float] = []
        run = replace(self.run, batch_size=size.images, accumulate=2)
        with closing(evaluation_loader(run, sample)) as loader:
            while not passes or time.perf_counter() < end:
                seen, began = 0, self._now()
                for batch in loader.epoch(0):
                    predict(batch.images)
                    seen += len(batch.labels)
                    if time.perf_counter() > end:
                        break
                passes.append(size.each((self._now() - began) * size.images / max(seen, 1)))
        return Answers(passes[0], statistics.median(passes[1:] or passes), ready)

    def memory(self) -> int:
        """Return the bytes a step takes at its peak, as the run reckons: weights, gradients, moments, activations."""
        assert self.run.batch_size is not None
        parameters = list(self.objective.parameters())
        tuned = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        copies = 1 + MOMENTS[self.run.optim.name] + (self.run.average.kind != "none")
        state = 4 * (_values(self.objective) + copies * tuned)
        waiting = COPIES_AT_THE_LOADER if self.resolved.device.type == "cpu" else COPIES_ON_A_DEVICE
        return round(state + self.image_bytes * self.micro + waiting * self.run.batch_size * self._pixels())

    def _pace(self, growth: float, seconds: float) -> Pace:
        """Time training on images of the size they have at one moment of the run."""
        end = time.perf_counter() + seconds
        size = self._affordable(lambda number: self._step(self._blank(number), growth), self.micro, seconds)
        count = min(self.plan.per_epoch, STEPS)
        run = replace(self.run, batch_size=size.images, accumulate=1)
        firsts: list[float] = []
        others: list[float] = []
        with closing(training_loader(run, self._sample(count * size.images))) as loader:
            if run.cache == "yes":
                for _ in loader.epoch(0):  # what is kept in memory is decoded once in a whole run
                    pass
            epoch = 0
            while not firsts or (len(loader) > 1 and not others) or time.perf_counter() < end:
                epoch += 1
                began = self._now()
                for number, batch in enumerate(loader.epoch(epoch)):
                    self._step(batch, growth)
                    ended = self._now()
                    (others if number else firsts).append(size.each(ended - began))
                    began = ended
                    if others and ended > end:
                        break
        first = statistics.median(firsts)
        return Pace(first, statistics.median(others) if others else first)

    def _affordable(self, step: Callable[[int], object], most: int, seconds: float) -> Size:
        """Return the largest size up to `most` of which a step takes `SHARE` of `seconds`; it is warmed up."""
        images = min(SMALLEST, most)
        took, constant = self._twice(step, images), None
        while images < most:
            larger = min(FACTOR * images, most)
            fixed = took / 2 if constant is None else constant  # of a small step, more than nothing
            allowed = seconds * (SECOND if constant is None else SHARE)
            if fixed + (took - fixed) * larger / images > allowed:
                break
            longer = self._twice(step, larger)
            constant = overhead(images, took, larger, longer)
            images, took = larger, longer
        return Size(images, constant or 0.0, most)

    def _twice(self, step: Callable[[int], object], images: int) -> float:
        """Seconds of a step, the quicker of two, after a first one that allocates and chooses kernels."""
        took = []
        for _ in range(3):
            began = self._now()
            step(images)
            took.append(self._now() - began)
        return min(took[1:])

    def _step(self, batch: Batch, growth: float) -> None:
        """Forward and backward pass of one micro-batch, as the loop does them."""
        seed_step(self.run.seed, 0, 0)
        backward(self.objective, self.sized(batch, growth), step=0, parts=1, autocast=self.resolved.autocast)
        self.optimizer.zero_grad(set_to_none=True)

    def _update(self) -> float:
        """Seconds of what a step does once, however large its batch."""
        batch = self.sized(self._blank(min(SMALLEST, self.micro)), 0.0)
        took = []
        for _ in range(4):
            backward(self.objective, batch, step=0, parts=1, autocast=self.resolved.autocast)
            began = self._now()
            clip_(self.objective.parameters(), self.run.optim.clip)
            self.optimizer.step()
            self.average.update(0)
            self.optimizer.zero_grad(set_to_none=True)
            took.append(self._now() - began)
        return statistics.median(took[1:])

    def _writing(self) -> tuple[float, float]:
        """Seconds of writing a checkpoint with the newest model beside it, and of a model, where the run will be."""
        stored = {
            name: value.detach()
            for name, value in self.objective.named_parameters()
            if self.run.tune == "all" or value.requires_grad
        }
        some: dict[str, torch.Tensor] = {}
        for name, value in stored.items():
            if not some or _bytes(some) + value.nbytes <= WRITTEN:
                some[name] = value
        place = next(path for path in (Path(self.run.out).absolute() / "run").parents if path.is_dir())
        with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
            began = time.perf_counter()
            checkpoint.save(Path(folder), 0, {"model": some}, keep=1)
            took = time.perf_counter() - began
        tuned = 4 * sum(value.numel() for value in self.objective.parameters() if value.requires_grad)
        state = (MOMENTS[self.run.optim.name] + (self.run.average.kind != "none")) * tuned
        model = took * _bytes(stored) / _bytes(some)
        return model + took * (_bytes(stored) + state) / _bytes(some), model

    def _sample(self, count: int) -> View:
        """So many training images, evenly spread."""
        train = self.splits.train
        return View(train, np.unique(np.linspace(0, len(train) - 1, min(count, len(train))).astype(int)))

    def _blank(self, number: int) -> Batch:
        """A batch of black images that no loader was waited for."""
        config = self.resolved.config
        images = torch.zeros(number, *config.image_size, config.channels, dtype=torch.uint8)
        nothing = torch.zeros(number, dtype=torch.int64)
        return Batch(images.permute(0, 3, 1, 2), nothing, nothing)

    def _pixels(self) -> int:
        """Bytes of an image as the loader hands it over."""
        return self.resolved.config.channels * math.prod(self.resolved.config.image_size)

    def _now(self) -> float:
        """The time when everything asked of the device is done."""
        return now(self.resolved.device)


def _values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
