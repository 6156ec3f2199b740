"""From what was timed for a few seconds to how long a whole run takes: arithmetic, nothing is measured here.

A run is its steps (each as slow as the size of its images makes it, and slower at the start of an epoch, for which
nothing was loaded ahead), the evaluations between them, the models and checkpoints that are written, and the parts
before the first step and after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.costs.count import training_flops
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.optim.progressive import Sizes
from vitrail.training.plan import Plan
from vitrail.training.run import Run

GROWTHS = (0.0, 0.5, 1.0)
"""Moments of progressive resizing at which steps are timed; between them time follows the FLOPs."""
SAMPLED = 1000
"""Steps at which the size of the images is looked at."""
TRAIN = 5.8
"""Seconds of `vitrail train` and `vitrail finetune` that are the same for every run: Python, torch, TensorBoard, the
run folder, drawing the report. Two EPYC cores; another machine has others, and in a run of minutes they are little."""
PROBE = 2.4
"""The same of `vitrail probe`."""
PICTURED = 24
"""Images of the report that the network is asked about once more, a few at a time, with its attention."""


@dataclass(frozen=True)
class Pace:
    """Seconds per image of training, loading included."""

    first: float
    """In the first batch of an epoch."""
    steady: float
    """In the others."""


@dataclass(frozen=True)
class Answers:
    """Seconds of asking the network, loading included."""

    first: float
    """Per image, when the images are looked at for the first time."""
    again: float
    """Per image, later: what is small may have been kept in memory."""
    ready: float
    """Before the first image: the weights are laid out for speed."""


@dataclass(frozen=True)
class Speeds:
    """What was timed of one run, in seconds."""

    paces: tuple[Pace, ...]
    """At each of `GROWTHS`; a single one where the images keep their size."""
    update: float
    """Per step: clipping, optimiser, average."""
    answers: Answers
    checkpoint: float
    """Per checkpoint, the newest model beside it included."""
    model: float
    """Per best model written."""
    start: float
    """Opening data and weights, and all else before the first step."""


@dataclass(frozen=True)
class Times:
    """Seconds of a whole run, by what they are spent on."""

    start: float
    steps: float
    evaluations: float
    """On the way, with the best models written."""
    checkpoints: float
    end: float
    """The last evaluation where a time limit ends the run, the test images, the pictures of the report."""
    share: float
    """Of the steps that a time limit leaves; 1 without one."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.start + self.steps + self.evaluations + self.checkpoints + self.end

    def parts(self) -> dict[str, float]:
        """Return what the seconds are spent on."""
        names = ("start", "steps", "evaluations", "checkpoints", "end")
        return {name: round(getattr(self, name), 3) for name in names}


def overhead(few: int, took_few: float, many: int, took_many: float) -> float:
    """Return the seconds of a call that do not grow with its images, from calls of two sizes.

    Between none and half of what the larger one took: two measurements say no more than that.
    """
    constant = (took_few * many - took_many * few) / (many - few)
    return min(max(constant, 0.0), took_many / 2)


def evaluations(plan: Plan) -> int:
    """Return how often the loop evaluates in a run that does all its steps; the last step always is."""
    return math.ceil(plan.total / plan.evaluate_every)


def checkpoints(plan: Plan) -> int:
    """Return how many checkpoints such a run writes; the last step always is one."""
    return math.ceil(plan.total / plan.checkpoint_every)


def training_seconds(
    run: Run,
    config: ViTConfig | ResNetConfig,
    plan: Plan,
    speeds: Speeds,
    *,
    validation: int = 0,
    test: int = 0,
) -> Times:
    """Return how long `run`, every decision made, takes; validation and test are numbers of images.

    Each evaluation is taken to find a better model, which is then written. Early stopping is not foreseen. Under a
    time limit as much of the schedule is done as fits; then come one more evaluation and checkpoint.
    """
    assert run.batch_size is not None
    answers = speeds.answers
    image = _mean([pace.steady for pace in speeds.paces], run, config, plan)
    stall = _mean([max(pace.first - pace.steady, 0.0) for pace in speeds.paces], run, config, plan)
    epochs = math.ceil(plan.total / plan.per_epoch)
    steps = plan.total * (run.batch_size * image + speeds.update) + epochs * run.batch_size * stall
    evaluation = speeds.model + (answers.ready + validation * answers.again if validation else 0.0)
    once = max(answers.first - answers.again, 0.0)
    asked = evaluations(plan) * evaluation + validation * once
    saved = checkpoints(plan) * speeds.checkpoint
    end = answers.ready + test * answers.first if test else 0.0
    end += min(validation, PICTURED) * speeds.paces[-1].steady
    share = 1.0
    if plan.limit is not None and steps + asked + saved > plan.limit:
        share = plan.limit / (steps + asked + saved)
        end += evaluation + speeds.checkpoint
    return Times(TRAIN + speeds.start, share * steps, share * asked, share * saved, end, share)


def _mean(values: Sequence[float], run: Run, config: ViTConfig | ResNetConfig, plan: Plan) -> float:
    """The mean over the steps of a run of what was timed at `GROWTHS`, linear in FLOPs between them."""
    if len(values) == 1:
        return values[0]
    sizes = Sizes(run.progressive, config)
    count = min(plan.total, SAMPLED)
    work = [training_flops(config, sizes.size(growth)) for growth in GROWTHS]
    done = [plan.growth(place * plan.total // count, 0.0) for place in range(count)]
    flops = {size: training_flops(config, size) for size in {sizes.size(growth) for growth in done}}
    return float(np.mean(np.interp([flops[sizes.size(growth)] for growth in done], work, list(values))))
