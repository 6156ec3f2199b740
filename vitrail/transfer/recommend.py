"""The one rule by which a method of learning is chosen for images, weights and a machine.

The rule is a measurement: `MEASURED` has the accuracy that each method reaches with a number of images per class. The
most accurate method that fits into the time and the memory is recommended. `vitrail finetune` and `vitrail sweep` tune
the part of the network that the same table has first (`best_tuned`). Timing is in `vitrail.transfer.timing`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vitrail.errors import UsageError
from vitrail.words import binary_size, one_line, time_span

Method = Literal["few-shot", "linear probe", "attention-only", "full fine-tuning", "from scratch"]
METHODS: tuple[Method, ...] = ("few-shot", "linear probe", "attention-only", "full fine-tuning", "from scratch")
"""From cheap to expensive."""
MEASURED: Mapping[int, Mapping[Method, float]] = {
    5: {"few-shot": 54.2, "linear probe": 53.9, "attention-only": 54.8, "full fine-tuning": 55.3},
    20: {"few-shot": 64.5, "linear probe": 65.3, "attention-only": 68.0, "full fine-tuning": 68.1},
    100: {"few-shot": 70.1, "linear probe": 71.8, "attention-only": 78.5, "full fine-tuning": 79.5},
    500: {"few-shot": 73.3, "linear probe": 75.7, "attention-only": 82.8, "full fine-tuning": 83.9},
}
"""Images per class -> mean accuracy in percent on test images of flowers, satellite images, trash and CIFAR-100, over
three seeds and two pretrained networks, vitrail/tiny and one of CIFAR-100 (`python -m benchmarks.adviser`, whose rows
are in benchmarks/results/adviser.jsonl). Classes with fewer images have all of theirs: at 500, satellite images have
300 and trash has 37 to 494. The row whose number is nearest counts."""
TUNES: Mapping[Method, Literal["all", "attention"]] = {"attention-only": "attention", "full fine-tuning": "all"}
"""Method that tunes the network -> its `Run.tune`."""
PRE_TRAINING = 14_000_000
"""Number of training images from which other weights are of no use: about ImageNet-21k, the smaller of the two data
sets on which the paper's large networks learn what convolutions have built in (section 4.3). The exact limit is a
judgement."""
LEAST_SHARE = 0.5
"""Smallest share of its steps with which training from scratch is recommended under a time limit; a judgement."""
LEAST_TUNED = 0.05
"""The same for methods that tune a network. They begin as a linear probe, keep its weights where tuning does not
improve them, and gain most of what they gain in the first passes: two to six of 23 passes over 3,068 photographs of
clothing took the test images from 81 to 85 % (`python -m benchmarks.shipped`, `python -m benchmarks.first_run`)."""


@dataclass(frozen=True)
class Situation:
    """The facts that the rule depends on."""

    images: int
    """Number of training images."""
    classes: int
    """Number of classes; 0 if the labels are numbers."""
    enlarged: bool = False
    """Whether the classes are those of the weights, and the images larger than those of the weights."""
    labels: int | None = None
    """Number of classes of all images together; None: each image has one class, as in the measurement."""

    @property
    def each(self) -> float:
        """Mean number of images per class."""
        return (self.labels or self.images) / max(self.classes, 1)


@dataclass(frozen=True)
class Expectation:
    """The methods, the most accurate first."""

    order: tuple[Method, ...]
    why: str
    """The reason, which follows the number of images."""
    source: str


def expectation(seen: Situation, options: Collection[Method] = METHODS) -> Expectation:
    """Return which method is expected to be how good. The accuracies of the methods `options` are the reason."""
    row = min(MEASURED, key=lambda each: abs(math.log(each / max(seen.each, 1e-9))))
    accuracy = MEASURED[row]
    order = (*sorted(accuracy, key=lambda name: accuracy[name], reverse=True), "from scratch")
    if seen.images >= PRE_TRAINING:
        why = "as many as networks are pre-trained on, so other weights have little to add"
        source = "section 4.3, Figures 3 and 4; the number is a judgement"
        return Expectation(("from scratch", *order[:-1]), why, source)
    if seen.enlarged:
        why = (
            "the weights know these classes and only the image size is new, so tuning only the attention comes within "
            "0.1 % of tuning everything"
        )
        order = ("attention-only", *(name for name in order if name != "attention-only"))
        return Expectation(order, why, "follow-up, section 4, Table 5")
    named = ", ".join(f"{name} {accuracy[name]:.1f} %" for name in order if name in accuracy and name in options)
    why = f"with {row} images per class, {named} were right"
    if seen.labels is not None:
        why += ", measured on classes of whole images and not on labels such as these"
    return Expectation(order, why, "python -m benchmarks.adviser")


def best_tuned(each: float) -> Literal["all", "attention"]:
    """Return which part of a Vision Transformer is best tuned with this number of images per class."""
    order = expectation(Situation(max(round(each * 100), 1), 100)).order
    return next(TUNES[name] for name in order if name in TUNES)


@dataclass(frozen=True)
class Option:
    """One method, with the time and memory it takes on this machine."""

    name: Method
    command: str
    """The command to copy."""
    seconds: float
    """Time of the whole command."""
    memory_bytes: int
    """Peak memory, without that of Python and torch themselves."""
    images_per_second: float
    """Speed of training, loading included."""
    steps: int
    """Number of optimiser steps; 0 if the network stays frozen."""
    why: str = ""
    """A note about this method."""
    expected: int = 0
    """Its place by expected accuracy: 1 is the best."""
    recommended: bool = False
    share: float = 1.0
    """Share of its steps that a time limit leaves."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by purpose."""


@one_line
@dataclass(frozen=True)
class Recommendation:
    """The options, one of them recommended, and the facts about data and machine."""

    options: list[Option]
    why: str
    """The reason in two sentences."""
    source: str
    """Source of the rule."""
    data: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def recommended(self) -> Option:
        """The recommended option."""
        return next(option for option in self.options if option.recommended)


def recommend(
    seen: Situation, options: Sequence[Option], *, seconds: float | None = None, memory: float = float("inf")
) -> Recommendation:
    """Return the options with their expected order, and one of them recommended.

    `seconds` is the available time (None: no limit), `memory` the free bytes. The method with the best expectation that
    fits is recommended; if only the time is too short for all, the quickest one that fits into memory. Raises
    UsageError if none fits into memory.
    """
    there = [option.name for option in options]
    expected = expectation(seen, there)
    places = {name: place for place, name in enumerate((name for name in expected.order if name in there), start=1)}
    small = [option for option in options if option.memory_bytes <= memory]
    if not small:
        need = binary_size(min(option.memory_bytes for option in options))
        raise UsageError(
            f"Even the smallest method takes {need} of memory, but {binary_size(memory)} are free. Choose a smaller "
            "network or a smaller --image-size."
        )
    fitting = [option for option in small if _in_time(option, seconds)]
    if fitting:
        chosen = min(fitting, key=lambda option: places[option.name])
    else:
        chosen = min(small, key=lambda option: option.seconds)
    marked = [replace(one, recommended=one is chosen, expected=places[one.name]) for one in options]
    each = f"{seen.each:,.0f}" if seen.each >= 10 else f"{seen.each:.2g}"
    of = f"of {seen.classes:,} classes ({each} per class)" if seen.classes else "with numbers"
    about = f"{seen.images:,} training images {of}: {expected.why}."
    first = expected.order[0]
    wanted = next((option for option in options if option.name == first), None)
    why = f"{about} {_obstacle(first, wanted, chosen, seconds, memory)}{_takes(chosen, seconds)}."
    return Recommendation(marked, why, expected.source)


def _in_time(option: Option, seconds: float | None) -> bool:
    return seconds is None or (option.seconds <= seconds and _does_enough(option))


def _does_enough(option: Option) -> bool:
    """Return whether the time leaves enough of the steps of a method."""
    return option.share >= (LEAST_SHARE if option.name == "from scratch" else LEAST_TUNED)


def _obstacle(method: Method, wanted: Option | None, chosen: Option, seconds: float | None, memory: float) -> str:
    """Return why the method of the rule is not recommended, as the beginning of a sentence; "" if it is."""
    name, limit = method.capitalize(), time_span(seconds or 0.0)
    if wanted is None:
        return f"{name} is not possible with this network, so {chosen.name} is the next choice: it "
    if wanted.name == chosen.name:
        return "It "
    if wanted.memory_bytes > memory:
        obstacle = f"needs {binary_size(wanted.memory_bytes)} of memory, but {binary_size(memory)} are free"
    elif not _does_enough(wanted):
        obstacle = f"could do only {wanted.share:.0%} of its steps in {limit}"
    else:
        obstacle = f"takes {time_span(wanted.seconds)}, more than the available {limit}"
    return f"{name} {obstacle}, so {chosen.name} is the next choice: it "


def _takes(chosen: Option, seconds: float | None) -> str:
    """Return the time and memory of the recommended method, and whether the time is too short for it."""
    takes = f"takes {time_span(chosen.seconds)} and {binary_size(chosen.memory_bytes)} of memory"
    if chosen.share < 1:
        takes += f", with {chosen.share:.0%} of its steps"
    if _in_time(chosen, seconds):
        return takes
    if chosen.seconds > (seconds or 0.0):
        return f"{takes}, more than the available {time_span(seconds or 0.0)}, and no other method is quicker"
    return f"{takes}; more time would improve it"
