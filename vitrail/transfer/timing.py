"""Timing a run before it starts: set it up as training does, warm up, time ten steps, multiply by the steps of the run.

Steps are timed together with the loader behind them, because on a CPU decoding and learning share the cores. If ten
steps of a whole micro-batch take too long, steps of fewer images are timed, and the time grows with the images. The
times of evaluations, of checkpoints, before the first step and after the last step are added.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitrail.costs.count import training_flops
from vitrail.costs.measure import now
from vitrail.costs.memory import step_memory
from vitrail.data.item import Subset, evenly_spaced
from vitrail.data.loading.loader import Batch
from vitrail.data.roles import Splits
from vitrail.device import command_seconds, core_share, fast_float32
from vitrail.evaluation.classify import predictor
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.assemble import set_up
from vitrail.training.batch_size import blank_labels, waiting_bytes
from vitrail.training.batches import Sizes, endless, evaluation_loader, training_loader
from vitrail.training.checkpoints import checkpoint
from vitrail.training.optim.optimizer import build_optimizer, divisor_of_gradients, set_learning_rate, update
from vitrail.training.python_objects import PythonObjects
from vitrail.training.run import Optim, Run
from vitrail.training.step import backward, seed_step
from vitrail.training.time_limit import ENOUGH, PICTURED, predicted_end
from vitrail.training.timetable import Timetable
from vitrail.words import time_span

log = logging.getLogger("vitrail")
STEPS = 10
"""Number of timed steps."""
GROWTHS = (0.0, 0.5, 1.0)
"""Moments of progressive resizing at which steps are timed. Between them the time follows the FLOPs."""
SAMPLED = 1000
"""Number of steps at which the image size is computed."""
FIRST = 8
"""Number of images in the first step. It is slow, because it allocates memory and chooses kernels."""
SECONDS = 3.0
"""Maximum duration of the second step of a first batch in seconds, as predicted from the first step."""
SMALLEST = 2
"""Number of images in the warm-up step. Norms over a batch need two."""
WRITTEN = 64 * 2**20
"""Maximum number of bytes written to time a checkpoint."""
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1, "muon": 2}
"""Number of values that the optimiser stores for each weight. Muon stores one for the matrices of the blocks."""
TRAIN = 5.8
"""Seconds that every `vitrail train` and `vitrail finetune` takes for Python, torch, TensorBoard, the run folder and
the report. Measured on two EPYC cores. It differs on other machines, but matters little in a run of minutes."""
PROBE = 2.4
"""Seconds that every `vitrail probe` takes, apart from its features and its own arithmetic."""


@dataclass(frozen=True)
class Speeds:
    """The measured times of one run, in seconds."""

    images: tuple[float, ...]
    """Per training image, loading included, at each of `GROWTHS`; a single value if the images keep their size."""
    update: float
    """Per step, for clipping, optimiser and average."""
    answer: float
    """Per evaluated image, loading included."""
    ready: float
    """Before the first evaluated image, while the weights are laid out for speed."""
    checkpoint: float
    """Per checkpoint, with the newest model."""
    model: float
    """Per best model."""
    start: float
    """Before the first step, for opening weights and everything else."""


@dataclass(frozen=True)
class Times:
    """Seconds of a whole run, by purpose."""

    start: float
    steps: float
    evaluations: float
    """During training, including the writing of the best models."""
    checkpoints: float
    end: float
    """The last evaluation if a time limit ends the run, the test images, and the pictures of the report."""
    share: float
    """Share of the steps that a time limit leaves; 1 without a limit."""

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.start + self.steps + self.evaluations + self.checkpoints + self.end

    def parts(self) -> dict[str, float]:
        """Return the seconds by purpose."""
        return {name: round(value, 3) for name, value in asdict(self).items() if name != "share"}


def evaluations(plan: Timetable) -> int:
    """Return the number of evaluations in a run that does all its steps; there is one after the last step."""
    return math.ceil(plan.total / plan.evaluate_every)


def checkpoints(plan: Timetable) -> int:
    """Return the number of checkpoints in a run that does all its steps; there is one after the last step."""
    return math.ceil(plan.total / plan.checkpoint_every)


def training_seconds(
    run: Run,
    config: ViTConfig | ResNetConfig,
    plan: Timetable,
    speeds: Speeds,
    *,
    validation: int = 0,
    test: int = 0,
) -> Times:
    """Return the times of a decided `run`; validation and test are numbers of images.

    Each evaluation is assumed to find a better model, which is then written. Early stopping is not predicted. A time
    limit shortens or lengthens the training, so that the whole run ends with it.
    """
    assert run.batch_size is not None
    steps = plan.total * (run.batch_size * _mean(speeds.images, run, config, plan) + speeds.update)
    evaluation = speeds.model + (speeds.ready + validation * speeds.answer if validation else 0.0)
    evaluated = evaluations(plan) * evaluation
    saved = checkpoints(plan) * speeds.checkpoint
    end = speeds.ready + test * speeds.answer if test else 0.0
    end += min(validation, PICTURED) * speeds.images[-1]
    share, work = 1.0, steps + evaluated + saved
    if plan.limit is not None and (plan.open or TRAIN + speeds.start + work + end > plan.limit):
        end += evaluation + speeds.checkpoint
        share = max(plan.limit - TRAIN - speeds.start - end, 0.0) / work
    return Times(TRAIN + speeds.start, share * steps, share * evaluated, share * saved, end, share)


def _mean(values: Sequence[float], run: Run, config: ViTConfig | ResNetConfig, plan: Timetable) -> float:
    """Return the mean over all steps of values that are known at `GROWTHS`. Between these they are linear in FLOPs."""
    if len(values) == 1:
        return values[0]
    sizes = Sizes(run.progressive, config)
    count = min(plan.total, SAMPLED)
    work = [training_flops(config, sizes.size(growth)) for growth in GROWTHS]
    done = [plan.growth(place * plan.total // count, 0.0) for place in range(count)]
    flops = {size: training_flops(config, size) for size in {sizes.size(growth) for growth in done}}
    return float(np.mean(np.interp([flops[sizes.size(growth)] for growth in done], work, list(values))))


def seen_in_time(run: Run, splits: Splits, seconds: float) -> int:
    """Return the number of images that the training of `run` sees in its time limit, at least 1.

    Its speed is measured for about `seconds`, loading included, with all threads and with one, because one is faster
    where other programs keep the cores busy. Images of progressive resizing have their full size. Raises the errors of
    `Rehearsal`.
    """
    assert run.time_limit is not None
    began = time.monotonic() - command_seconds()
    rehearsal = Rehearsal(run, splits)
    setup, most = rehearsal.setup, torch.get_num_threads()
    counts = [most] if most == 1 or setup.decision.device.type != "cpu" else [1, most]
    each: dict[int, float] = {}
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            if each and core_share() < ENOUGH:
                break
            each[threads] = rehearsal.image_seconds(seconds / len(counts))
    finally:
        torch.set_num_threads(most)
    image = min(each.values())
    left = 60 * run.time_limit - (time.monotonic() - began) - rehearsal.start
    left = max(left - predicted_end(setup, reported=True).seconds(image, left), 0.0)
    speeds = ", ".join(f"{1 / value:.3g} images/s with {count} of {most} threads" for count, value in each.items())
    slower = "" if len(each) == len(counts) else ", and several are not tried: others keep the cores busy"
    log.info(
        f"measured: {speeds}{slower}; of {time_span(60 * run.time_limit)} about {time_span(left)} are left for training"
    )
    return max(int(left / image), 1)


class Rehearsal:
    """A run ready for its first step, to be timed.

    Raises what `fit` raises before its first step: UsageError, DataError, WeightsError. No run folder is made, and the
    timed steps leave the weights as they are.
    """

    def __init__(self, run: Run, splits: Splits, objects: PythonObjects | None = None) -> None:
        build_optimizer(nn.Linear(1, 1), Optim())  # torch's imports for the first optimiser are no part of `start`
        began = time.perf_counter()
        self.setup = set_up(run, splits, objects=objects, measure=True)
        self.setup.loader.close()  # steps are timed with loaders of their own
        self.setup.validation.close()
        set_learning_rate(self.setup.optimizer, 0.0)
        self.start = time.perf_counter() - began
        """Seconds that this took."""

    @property
    def micro(self) -> int:
        """Number of images in the network at once."""
        run = self.setup.run
        assert run.batch_size and run.accumulate
        return math.ceil(run.batch_size / run.accumulate)

    @fast_float32()
    def speeds(self, seconds: float, answers: tuple[float, float] | None = None) -> Speeds:
        """Time steps, evaluation and writing in about `seconds`; `answers` are `Speeds.answer` and `ready` if known."""
        growths = GROWTHS if self.setup.run.progressive.start < 1 else GROWTHS[-1:]
        share = seconds / (len(growths) + (answers is None))
        timed = [self._steps(growth, share) for growth in growths]
        answer, ready = answers or self._answers(share)
        saved, model = self._writing()
        return Speeds(tuple(image for image, _ in timed), timed[-1][1], answer, ready, saved, model, self.start)

    @fast_float32()
    def image_seconds(self, seconds: float) -> float:
        """Return the seconds per image of full size, with its share of an update, timed for about `seconds`."""
        image, update = self._steps(GROWTHS[-1], seconds)
        return max(image + update / (self.setup.run.batch_size or 1), 1e-9)

    @fast_float32()
    def first_batch(self) -> tuple[float, int, float]:
        """Return loss, images and seconds of a forward and backward pass on a micro-batch, or on fewer images."""
        run = replace(self.setup.run, batch_size=self.micro, accumulate=1)
        with closing(training_loader(run, self.setup.splits.train)) as loader:
            batch = next(endless(loader, 0))

        def timed(count: int) -> tuple[float, float]:
            some = Batch(batch.images[:count], batch.labels[:count], batch.index[:count])
            seed_step(run.seed, 0, 0)
            began = self._now()
            outcome = backward(self.setup.objective, some, step=0, parts=1, autocast=self.setup.decision.autocast)
            return outcome.loss, self._now() - began

        read = len(batch.labels)
        first = min(FIRST, read)
        _, seconds = timed(first)
        second = min(read, max(first, int(first * SECONDS / seconds)))
        loss, seconds = timed(second)
        return loss, second, seconds

    def memory(self) -> int:
        """Return the peak bytes of a step (`vitrail.costs.memory`), and of the batches that wait."""
        run, config = self.setup.run, self.setup.decision.config
        assert run.batch_size is not None and self.setup.image_bytes is not None
        values = sum(parameter.numel() for parameter in self.setup.objective.parameters())
        held = step_memory(
            values,
            self.setup.image_bytes,
            trainable=self._tuned(),
            stored=self.stored_values(),
            precision=run.decided_precision,
            accumulates=(run.accumulate or 1) > 1,
        )
        return held.bytes(self.micro) + waiting_bytes(run, config, run.batch_size, self.setup.decision.device)

    def _steps(self, growth: float, seconds: float) -> tuple[float, float]:
        """Return the seconds per image and per update at one moment of progressive resizing."""
        run = self.setup.run
        images = self._affordable(lambda batch: self._step(batch, growth)[0], seconds, self.micro)
        each: list[float] = []
        updates: list[float] = []
        end = time.perf_counter() + seconds
        with closing(training_loader(replace(run, batch_size=images, accumulate=1), self._sample(images))) as loader:
            if run.cache == "yes":
                for _ in loader.epoch(0):  # cached images are decoded only once in a whole run
                    pass
            batches = endless(loader, len(loader))
            while len(each) < STEPS + 1 and (len(each) < 2 or time.perf_counter() < end):
                began = self._now()
                _, update = self._step(next(batches), growth)
                each.append((self._now() - began - update) / images)
                updates.append(update)
        return statistics.median(each[1:]), statistics.median(updates[1:])

    def _step(self, batch: Batch, growth: float) -> tuple[float, float]:
        """Take a step as the loop does; return the seconds of its gradient and of its update."""
        setup = self.setup
        seed_step(setup.run.seed, 0, 0)
        began = self._now()
        resized, autocast = setup.resize(batch, growth), setup.decision.autocast
        backward(setup.objective, resized, step=0, parts=1, autocast=autocast, network=setup.network)
        between = self._now()
        norm, divisor = divisor_of_gradients(setup.objective.parameters(), setup.run.optim.clip)
        update(setup.optimizer, torch.isfinite(norm), divisor)
        setup.average.update(0)
        setup.optimizer.zero_grad(set_to_none=True)
        return between - began, self._now() - between

    def _answers(self, seconds: float) -> tuple[float, float]:
        """Return the seconds per evaluated image, and those before the first."""
        began = time.perf_counter()
        predict = predictor(self.setup.objective.model, precision=self.setup.run.precision)
        ready = time.perf_counter() - began

        def answer(batch: Batch) -> float:
            began = self._now()
            predict(batch.images)
            return self._now() - began

        images = self._affordable(answer, seconds, 2 * self.micro)
        run = replace(self.setup.run, batch_size=images, accumulate=2)
        with closing(evaluation_loader(run, self._sample(images))) as loader:
            for _ in range(2):  # the second time, small images come from memory, as in all later evaluations
                seen, began = 0, self._now()
                for batch in loader.epoch(0):
                    predict(batch.images)
                    seen += len(batch.labels)
                    if time.perf_counter() - began > seconds / 2:
                        break
                each = (self._now() - began) / max(seen, 1)
        return each, ready

    def _affordable(self, timed: Callable[[Batch], float], seconds: float, most: int) -> int:
        """Warm up, and return the number of images with which `STEPS` calls of `timed` take `seconds`."""
        few = min(SMALLEST, self.micro)
        timed(self._blank(few))  # the first call allocates memory and chooses kernels
        each = timed(self._blank(few)) / few
        return min(most, max(SMALLEST, int(seconds / (STEPS * each))))

    def _writing(self) -> tuple[float, float]:
        """Return the seconds of writing a checkpoint with the newest model, and of a model, on the disk of the run."""
        run = self.setup.run
        stored = {
            name: value.detach()
            for name, value in self.setup.objective.named_parameters()
            if run.tune == "all" or value.requires_grad
        }
        some: dict[str, torch.Tensor] = {}
        for name, value in stored.items():
            if not some or _bytes(some) + value.nbytes <= WRITTEN:
                some[name] = value
        place = next(path for path in (Path(run.out).absolute() / "run").parents if path.is_dir())
        with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as folder:
            began = time.perf_counter()
            checkpoint.save(Path(folder), 0, {"model": some}, keep=1)
            took = time.perf_counter() - began
        state = 4 * self.stored_values()
        model = took * _bytes(stored) / _bytes(some)
        return model + took * (_bytes(stored) + state) / _bytes(some), model

    def _tuned(self) -> int:
        """Return the number of values that learn."""
        return sum(value.numel() for value in self.setup.objective.parameters() if value.requires_grad)

    def stored_values(self) -> int:
        """Return the number of values that the optimiser stores, and the average of the weights."""
        run, groups = self.setup.run, self.setup.optimizer.param_groups
        matrices = sum(value.numel() for group in groups if group.get("parts") for value in group["params"])
        return (MOMENTS[run.optim.name] + (run.average.kind != "none")) * self._tuned() - matrices

    def _sample(self, images: int) -> Subset:
        """Return training images for the warm-up and `STEPS` steps of `images`, evenly spread."""
        train = self.setup.splits.train
        return Subset(train, evenly_spaced(len(train), (STEPS + 1) * images))

    def _blank(self, number: int) -> Batch:
        """Return a batch of black images, for which no loader is needed."""
        config = self.setup.decision.config
        images = torch.zeros(number, *config.image_size, config.channels, dtype=torch.uint8).permute(0, 3, 1, 2)
        labels = blank_labels(self.setup.objective, self.setup.run, config, images)
        return Batch(images, labels, torch.zeros(number, dtype=torch.int64))

    def _now(self) -> float:
        """Return the time once the device has finished all its work."""
        return now(self.setup.decision.device)


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
