"""Each way of learning as an option of `vitrail plan`: its command, with the time and memory it takes here."""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import DataError
from vitrail.verbs.finetune import finetune
from vitrail.verbs.network.features import Embedder, open_splits
from vitrail.verbs.train import Preview, train

if TYPE_CHECKING:
    from vitrail.data.item import Listed
    from vitrail.data.sources.open import Splits
    from vitrail.training.run import Run
    from vitrail.transfer.plan import Name, Option
    from vitrail.transfer.timing import Rehearsal, Speeds
    from vitrail.weights.card import Card

log = logging.getLogger("vitrail")
UNITS: dict[Name, float] = {
    "few-shot": 1,
    "linear probe": 1,
    "attention-only": 2,
    "full fine-tuning": 3,
    "from scratch": 3,
}
"""Relative share of each way in the time for timing."""
AT_ONCE = 64
"""Number of images in a batch of a probe."""
SAMPLE = 4
"""Number of images that warm up a probe."""
LARGEST = 256
"""Largest number of images with which a probe is timed."""


@dataclass(frozen=True)
class Question:
    """What the user asked `vitrail plan` for, and the opened data."""

    path: str
    weights: str | None
    image_size: int | None
    limit: float | None
    """Seconds that a way may take; None: as long as it takes."""
    seconds: float
    """For timing."""
    splits: Splits
    opening: float
    """Seconds that opening the data took."""

    def share(self, name: Name) -> float:
        """Return the seconds for timing one way."""
        units = UNITS if self.weights is not None else {"from scratch": UNITS["from scratch"]}
        return self.seconds * UNITS[name] / sum(units.values())

    def run(self, verb: Callable[..., Any], **settings: Any) -> Run:
        """Return what a command would train, as the command decides it."""
        size = {} if self.image_size is None else {"image_size": self.image_size}
        preview = verb(self.path, print_config=True, **size, **settings)
        assert isinstance(preview, Preview)
        return preview.run

    def command(self, *words: str) -> str:
        """Return a command of `words` with the size of the images that was asked for."""
        size = [] if self.image_size is None else ["--image-size", str(self.image_size)]
        return shlex.join(["vitrail", *words, *size])


def trained(asked: Question) -> Iterator[Option]:
    """Yield each way of training as an option, timed; one network at a time is in memory.

    Raises what the commands would: UsageError, DataError, WeightsError.
    """
    from vitrail.model.variants import ResNetConfig
    from vitrail.transfer.timing import Rehearsal

    if asked.weights is not None:
        words = ["finetune", asked.path, "--from", asked.weights]
        run = asked.run(finetune, weights=asked.weights)
        log.info("timing full fine-tuning")
        rehearsal = Rehearsal(run, asked.splits)
        speeds = rehearsal.speeds(asked.share("full fine-tuning"))
        yield _option("full fine-tuning", asked, rehearsal, speeds, words)
        has_attention = not isinstance(rehearsal.setup.resolved.config, ResNetConfig)
        del rehearsal
        if has_attention:
            run = asked.run(finetune, weights=asked.weights, tune="attention")
            log.info("timing attention-only")
            rehearsal = Rehearsal(run, asked.splits)
            speeds = rehearsal.speeds(asked.share("attention-only"), (speeds.answer, speeds.ready))
            yield _option("attention-only", asked, rehearsal, speeds, [*words, "--tune", "attention"])
            del rehearsal
    run = asked.run(train)
    log.info("timing training from scratch")
    rehearsal = Rehearsal(run, asked.splits)
    speeds = rehearsal.speeds(asked.share("from scratch"))
    yield _option("from scratch", asked, rehearsal, speeds, ["train", asked.path])


def _option(name: Name, asked: Question, rehearsal: Rehearsal, speeds: Speeds, words: list[str]) -> Option:
    """Return the timed way as an option; if it takes longer than the limit, with a --time-limit that makes it fit."""
    from vitrail.data.item import role_of
    from vitrail.transfer.plan import Option
    from vitrail.transfer.timing import training_seconds

    setup = rehearsal.setup
    splits, run, config, plan = asked.splits, setup.run, setup.resolved.config, setup.plan
    validation = 0 if splits.validation is None else len(splits.validation)
    chosen_by = role_of(str(splits.held_out.get("validation")))
    test = 0 if splits.test is None or chosen_by == "test" else len(splits.test)
    speeds = replace(speeds, start=speeds.start + 2 * asked.opening)  # looked at, then opened
    times = training_seconds(run, config, plan, speeds, validation=validation, test=test)
    rate = plan.total * (run.batch_size or 1) / max(times.steps, 1e-9)
    command = asked.command(*words)
    if asked.limit is not None and times.total > asked.limit:
        cut = training_seconds(run, config, replace(plan, limit=1.0), speeds, validation=validation, test=test)
        limit = math.floor(100 * (asked.limit - (cut.total - 1.0)) / 60) / 100  # minutes, rounded to what reads well
        if limit > 0:  # else nothing is gained by it
            command += f" --time-limit {limit:g}"
            limited = replace(plan, limit=60 * limit)
            times = training_seconds(run, config, limited, speeds, validation=validation, test=test)
    steps = max(round(plan.total * times.share), 1)
    return Option(
        name=name,
        command=command,
        seconds=times.total,
        memory_bytes=rehearsal.memory(),
        images_per_second=rate,
        steps=steps,
        why=_about(rehearsal, steps, times.share),
        share=times.share,
        parts=times.parts(),
    )


def _about(rehearsal: Rehearsal, steps: int, share: float) -> str:
    """Return a line about what is trained."""
    setup = rehearsal.setup
    run, plan = setup.run, setup.plan
    of = "" if share == 1 else f" of {plan.total:,} ({share:.0%})"
    pieces = "" if run.accumulate == 1 else f", {rehearsal.micro} at once"
    size = " x ".join(str(side) for side in setup.resolved.config.image_size)
    parameters = list(setup.objective.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    values = sum(parameter.numel() for parameter in parameters)
    which = (
        f"{learning / 1e6:,.3g} M parameters" if learning == values else f"{learning / values:.0%} of the parameters"
    )
    count = f"{steps:,} step{'s' if steps > 1 else ''}{of} of {run.batch_size} images{pieces}"
    return f"{count} ({steps / plan.per_epoch:,.3g} epochs), {size} px; {which} learn"


def probed(asked: Question, weights: str) -> Iterator[Option]:
    """Yield the ways that leave the network as it is, as options, timed. Raises DataError and WeightsError."""
    from vitrail.device import choose_device
    from vitrail.evaluation.fewshot import SHOTS
    from vitrail.evaluation.fewshot import Plan as Shots
    from vitrail.transfer.probing import fewshot_seconds, linear_seconds

    splits = open_splits(weights, asked.path, None)
    images, tested = len(splits.train), len(splits.test)
    names = list(splits.train.class_names)
    classes = len(names)
    log.info("timing few-shot and linear probe")
    try:
        drawn = Shots(splits.train.labels, names)
    except DataError as error:
        log.warning("few-shot is left out: %s", error)
    else:
        counts = [len(drawn.draws[0][shots]) for shots in drawn.shots]
        used = len(drawn.rows)

        def fitting(width: int) -> float:
            how = dict(classes=classes, width=width, test=tested)
            return fewshot_seconds(counts, len(drawn.draws), len(drawn.l2), **how)

        why = f"least squares on the features of {used:,} images, {min(SHOTS)} to {max(SHOTS)} of each class"
        yield _probe(
            asked, Asking("few-shot", "fewshot", "protocol", used, tested, fitting, why), splits.train, weights
        )

    def learning(width: int) -> float:
        return linear_seconds(images, classes=classes, width=width, device=choose_device(None))

    why = f"a classifier on the features of {images:,} images, the best of eight learning rates"
    yield _probe(asked, Asking("linear probe", "linear", "model", images, tested, learning, why), splits.train, weights)


@dataclass(frozen=True)
class Asking:
    """What decides the time of a probe."""

    name: Name
    verb: str
    prepare: Literal["model", "protocol"]
    images: int
    """Training images whose features are needed."""
    tested: int
    fit: Callable[[int], float]
    """Number of features -> seconds of the probe's own arithmetic."""
    why: str


def _probe(asked: Question, probe: Asking, source: Listed, weights: str) -> Option:
    """Return the probe as an option: time the network on some images of `source`, then the arithmetic of the probe."""
    from vitrail.transfer.plan import Option
    from vitrail.transfer.probing import answering_bytes
    from vitrail.transfer.timing import PROBE
    from vitrail.weights.load import read_card

    began = time.perf_counter()
    embedder = Embedder(weights, prepare=probe.prepare, image_size=asked.image_size)
    start = PROBE + asked.opening + time.perf_counter() - began
    images = probe.images + probe.tested
    each, width = _asking(embedder, source, asked.share(probe.name))
    looking, fit, config = images * each, probe.fit(width), read_card(weights).config
    return Option(
        name=probe.name,
        command=asked.command("probe", probe.verb, weights, asked.path),
        seconds=start + looking + fit,
        memory_bytes=answering_bytes(config, asked.image_size, min(AT_ONCE, images)) + 4 * images * width,
        images_per_second=1 / each,
        steps=0,
        why=probe.why,
        parts={"start": round(start, 3), "features": round(looking, 3), "fit": round(fit, 3)},
    )


def _asking(embedder: Embedder, source: Listed, seconds: float) -> tuple[float, int]:
    """Return the seconds per image of computing features, loading included, and the number of features."""
    import numpy as np

    from vitrail.data.item import View

    def timed(count: int) -> tuple[float, int]:
        some = View(source, np.unique(np.linspace(0, len(source) - 1, count).astype(int)))
        began = time.perf_counter()
        found = embedder(some)
        return (time.perf_counter() - began) / len(some), found.width

    few = min(SAMPLE, len(source))
    timed(few)  # the first call allocates
    each, width = timed(few)
    more = min(len(source), LARGEST, int(seconds / each))
    return timed(more) if more > few else (each, width)


def enlarged(asked: Question, card: Card) -> bool:
    """Return whether the classes are those of the weights, and the images larger than those of the weights."""
    larger = asked.image_size is not None and asked.image_size > max(card.config.image_size)
    return larger and list(card.class_names) == asked.splits.class_names
