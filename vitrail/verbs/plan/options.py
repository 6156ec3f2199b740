"""The options of `vitrail plan`: each method of learning with its command, and its time and memory on this machine."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.data.settings import SPLIT, as_flags
from vitrail.errors import DataError
from vitrail.ranges import InputSize, size_words
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide
from vitrail.verbs.features import Embedder, Prepare, TrainAndTestImages, open_train_and_test
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.reading import READ, read_settings

if TYPE_CHECKING:
    from vitrail.data.item import IndexedSource
    from vitrail.data.roles import Splits
    from vitrail.data.settings import Data
    from vitrail.recipes.known import Known
    from vitrail.training.run import Run
    from vitrail.transfer.recommend import Method, Option
    from vitrail.transfer.timing import Rehearsal, Speeds
    from vitrail.weights.card import Card

log = logging.getLogger("vitrail")
UNITS: dict[Method, float] = {
    "few-shot": 1,
    "linear probe": 1,
    "attention-only": 2,
    "full fine-tuning": 3,
    "from scratch": 3,
}
"""Relative share of each method in the time for timing."""
AT_ONCE = 64
"""Number of images in a batch of a probe."""
SAMPLE = 4
"""Number of images that warm up a probe."""
LARGEST = 256
"""Largest number of images with which a probe is timed."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked `vitrail plan` for, and the opened data."""

    path: str
    weights: str
    named: bool
    """Whether the user named the weights; otherwise they are the default of `vitrail finetune`."""
    card: Card
    """The card of the weights."""
    image_size: InputSize | None
    limit: float | None
    """Maximum duration of a method in seconds; None: no limit."""
    seconds: float
    """Time for timing all methods."""
    known: Known
    splits: Splits
    opening: float
    """Seconds spent on opening the data."""
    reading: Mapping[str, Any]
    """Settings of the data that were asked for."""
    settings: Data
    """All settings of the data."""

    def share(self, name: Method) -> float:
        """Return the seconds for timing one method."""
        return self.seconds * UNITS[name] / sum(UNITS.values())

    @property
    def objective(self) -> dict[str, str] | None:
        """The settings of the objective that the labels need; None: the commands choose it."""
        from vitrail.data.labels.numbers import Numbers

        return {"kind": "regression"} if isinstance(self.splits.train.labels, Numbers) else None

    @property
    def probed(self) -> dict[str, Any]:
        """The settings of the data that were asked for and that probes have, too."""
        return {name: value for name, value in self.reading.items() if name in (*READ, *SPLIT)}

    def run(self, *, tunes: bool, tune: str | None) -> Run:
        """Return the run that a command would train, as the command decides it (`vitrail.recipes.decide`)."""
        settings = {"image_size": self.image_size, "tune": tune, "objective": self.objective}
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        if self.reading:
            given["data"] = dict(self.reading)
        asked = Asked(self.path, weights=self.weights if tunes else None, settings=given)
        choice = decide(asked, self.known, tunes=tunes)
        log.info("%s", choice)
        return choice.run

    def command(self, *words: str, data: Data | None = None) -> str:
        """Return a command with the size of the images and the settings `data` of the data (default: all)."""
        size = [] if self.image_size is None else ["--image-size", *size_words(self.image_size)]
        return shlex.join(["vitrail", *words, *size, *as_flags(data or self.settings)])


def training_options(request: PlanRequest) -> Iterator[Option]:
    """Yield each method of training as an option, timed. One network at a time is in memory.

    Raises the errors of the commands: UsageError, DataError, WeightsError.
    """
    from vitrail.model.variants import ResNetConfig
    from vitrail.transfer.timing import Rehearsal

    words = ["finetune", request.path, *(["--from", request.weights] if request.named else [])]
    methods: list[tuple[Method, bool, str | None, list[str]]]
    methods = [("full fine-tuning", True, "all", [*words, "--tune", "all"])]
    if not isinstance(request.card.config, ResNetConfig):
        methods.append(("attention-only", True, "attention", [*words, "--tune", "attention"]))
    methods.append(("from scratch", False, None, ["train", request.path]))
    kind = [] if request.objective is None else ["--objective.kind", request.objective["kind"]]
    evaluation = None
    for name, tunes, tune, words in methods:
        run = request.run(tunes=tunes, tune=tune)
        log.info("timing %s", name)
        rehearsal = Rehearsal(run, request.splits)
        speeds = rehearsal.speeds(request.share(name), evaluation)
        yield _training_option(name, request, rehearsal, speeds, [*words, *kind])
        del rehearsal  # before the next network is built
        # tuning the attention alone evaluates the same network
        evaluation = (speeds.answer, speeds.ready) if name == "full fine-tuning" else None


def _training_option(
    name: Method, request: PlanRequest, rehearsal: Rehearsal, speeds: Speeds, words: list[str]
) -> Option:
    """Return a timed method as an option. If it takes longer than the limit, its command gets a --time-limit."""
    from vitrail.data.item import role_of
    from vitrail.training.timetable import Timetable
    from vitrail.transfer.recommend import Option
    from vitrail.transfer.timing import training_seconds

    setup, splits = rehearsal.setup, request.splits
    run, timetable = setup.run, setup.timetable
    chosen_by = role_of(str(splits.held_out.get("validation")))
    seconds = partial(
        training_seconds,
        run,
        setup.decision.our_config,
        # data are opened to choose the recipe, and again by the run
        speeds=replace(speeds, start=speeds.start + 2 * request.opening),
        validation=0 if splits.validation is None else len(splits.validation),
        test=0 if splits.test is None or chosen_by == "test" else len(splits.test),
    )
    times = seconds(timetable)
    rate = timetable.total * (run.batch_size or 1) / max(times.steps, 1e-9)
    command = request.command(*words)
    if request.limit is not None and times.total > request.limit:
        command += f" --time-limit {request.limit / 60:.3g}"
        times = seconds(Timetable(replace(run, time_limit=request.limit / 60), timetable.per_epoch))
    steps = max(round(timetable.total * times.share), 1)
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
    """Return a line about the steps, the input and the trained part of the network."""
    setup = rehearsal.setup
    run, timetable = setup.run, setup.timetable
    of = "" if share == 1 or timetable.open else f" of {timetable.total:,} ({share:.0%})"
    pieces = "" if run.accumulate == 1 else f", {rehearsal.micro} at once"
    size = " x ".join(str(side) for side in setup.decision.config.image_size)
    parameters = list(setup.objective.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    values = sum(parameter.numel() for parameter in parameters)
    which = (
        f"{learning / 1e6:,.3g} M parameters" if learning == values else f"{learning / values:.0%} of the parameters"
    )
    count = f"{steps:,} step{'s' if steps > 1 else ''}{of} of {run.batch_size} images{pieces}"
    return f"{count} ({steps / timetable.per_epoch:,.3g} epochs), {size} px; {which} are trained"


def probe_options(request: PlanRequest) -> Iterator[Option]:
    """Yield each method that leaves the network unchanged as an option, timed. Raises DataError and WeightsError."""
    import numpy as np

    from vitrail.data.images.bands import bands_to_keep, layouts
    from vitrail.device import choose_device
    from vitrail.evaluation.fewshot import SHOTS, ShotSelection
    from vitrail.transfer.probing import fewshot_seconds, linear_seconds

    images = open_train_and_test(request.weights, request.path, None, request.known, request.probed)
    labels = images.train.labels
    if not isinstance(labels, np.ndarray):
        log.warning("few-shot and linear probe are left out: they need one label for each image")
        return
    of_weights = request.card.preprocess.bands
    if of_weights is None and bands_to_keep(request.settings, layouts(images.train, request.settings.channels)):
        log.warning(
            "few-shot and linear probe are left out: %s reads red, green and blue with 8 bits, and these images have "
            "other bands",
            request.weights,
        )
        return
    names = list(images.train.class_names)
    log.info("timing few-shot and linear probe")
    try:
        drawn = ShotSelection(labels, names)
    except DataError as error:
        log.warning("few-shot is left out: %s", error)
    else:
        counts = [len(drawn.draws[0][shots]) for shots in drawn.shots]
        few = partial(fewshot_seconds, counts, len(drawn.draws), len(drawn.l2), classes=len(names))
        why = f"least squares on the features of {len(drawn.rows):,} images, {min(SHOTS)} to {max(SHOTS)} of each class"
        fit = partial(few, test=len(images.test))
        prepare: Prepare = "protocol" if of_weights is None else "model"  # the protocol is one of RGB images
        yield _probe_option("few-shot", ("fewshot", prepare), request, images, len(drawn.rows), fit, why)
    fit = partial(linear_seconds, len(images.train), classes=len(names), device=choose_device(None))
    why = f"a classifier on the features of {len(images.train):,} images, the best of seven strengths of regularisation"
    yield _probe_option("linear probe", ("linear", "model"), request, images, len(images.train), fit, why)


def _probe_option(
    name: Method,
    how: tuple[str, Prepare],
    request: PlanRequest,
    images: TrainAndTestImages,
    used: int,
    fit: Callable[..., float],
    why: str,
) -> Option:
    """Return a probe as an option: time the network on some training images, then the arithmetic of the probe.

    `how` is the verb of the probe and its preparation of images, `used` the number of training images whose features it
    needs, and fit(width=) the seconds of its arithmetic with features of this width.
    """
    from vitrail.transfer.probing import answering_bytes
    from vitrail.transfer.recommend import Option
    from vitrail.transfer.timing import PROBE

    began = time.perf_counter()
    embedder = Embedder(request.weights, Compute(request.image_size), how[1])
    words = ["probe", how[0], request.weights, request.path]
    if how == ("fewshot", "model"):
        words += ["--prepare", "model"]
    width = embedder.width  # computes once, too
    start = PROBE + request.opening + time.perf_counter() - began
    count = used + len(images.test)
    each = _seconds_per_image(embedder, images.train, request.share(name))
    computing, fitting = count * each, fit(width=width)
    memory = answering_bytes(request.card.config, request.image_size, min(AT_ONCE, count))
    return Option(
        name=name,
        command=request.command(*words, data=read_settings(request.probed, request.path, used=tuple(request.probed))),
        seconds=start + computing + fitting,
        memory_bytes=memory + 4 * count * width,
        images_per_second=1 / each,
        steps=0,
        why=why,
        parts={"start": round(start, 3), "features": round(computing, 3), "fit": round(fitting, 3)},
    )


def _seconds_per_image(embedder: Embedder, source: IndexedSource, seconds: float) -> float:
    """Return the seconds per image of computing features, loading included."""
    import numpy as np

    from vitrail.data.item import Subset

    def timed(count: int) -> float:
        some = Subset(source, np.unique(np.linspace(0, len(source) - 1, count).astype(int)))
        began = time.perf_counter()
        embedder(some)
        return (time.perf_counter() - began) / len(some)

    few = min(SAMPLE, len(source))
    timed(few)  # the first call allocates
    each = timed(few)
    more = min(len(source), LARGEST, int(seconds / each))
    return timed(more) if more > few else each
