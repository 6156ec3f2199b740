"""The rule that recommends a method of learning for images, weights and a machine.

The rule is the table `RULES`, whose first matching line counts. It depends on the number of images per class, the
number of all images, and whether the weights know the classes. The method of that line is recommended if it fits into
the time and the memory; otherwise the next cheaper method that fits. Timing is in `vitrail.transfer.timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vitrail.errors import UsageError
from vitrail.words import binary_size, one_line

Method = Literal["few-shot", "linear probe", "attention-only", "full fine-tuning", "from scratch"]
CHEAPER: tuple[Method, ...] = ("full fine-tuning", "attention-only", "linear probe", "few-shot")
"""Methods from expensive to cheap. A cheaper one replaces one that is too slow or too large."""

FEW = 10
"""Largest number of images per class for few-shot. This is a judgement: a tenth of ten images leaves one to choose by.
The paper's few-shot numbers use five images per class, those of BiT one to a hundred."""
FEWEST_TUNED = 20
"""Smallest number of images per class for tuning the network. Flowers-102 has 20, the fewest of the data sets on which
the follow-up tunes only the attention and does better than by tuning everything (section 4, Table 6)."""
SMALL = 20_000
"""Number of training images below which only the attention is tuned: BiT-HyperRule's limit for small data sets. Tuning
only the attention is better on data sets with 2,040 (Flowers-102) and 8,144 images (Cars), and worse on the largest,
iNaturalist with hundreds of thousands (follow-up, section 4, Table 6). The exact limit is a judgement."""
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
    enlarged: bool = False
    """Whether the classes are those of the weights, and the images larger than those of the weights."""

    @property
    def each(self) -> float:
        """Mean number of images per class."""
        return self.images / max(self.classes, 1)


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    name: Method
    """The recommended method."""
    holds: Callable[[Situation], bool]
    why: str
    """The reason, which follows the number of images."""
    source: str


RULES = (
    Rule(
        "from scratch",
        lambda seen: seen.images >= PRE_TRAINING,
        "as many as networks are pre-trained on, so other weights have little to add",
        "section 4.3, Figures 3 and 4; the number is a judgement",
    ),
    Rule(
        "attention-only",
        lambda seen: seen.enlarged,
        "the weights know these classes and only the image size is new, so tuning only the attention comes within "
        "0.1 % of tuning everything",
        "follow-up, section 4, Table 5",
    ),
    Rule(
        "few-shot",
        lambda seen: seen.each <= FEW,
        "too few to tune the network or to choose settings by, so a classifier is fitted to the frozen network in "
        "closed form",
        "section 4.1, metrics; the number is a judgement",
    ),
    Rule(
        "linear probe",
        lambda seen: seen.each < FEWEST_TUNED,
        "too few to tune the network, but enough to train a classifier on the frozen network and to choose its "
        "learning rate",
        "a judgement, between the rules before and after",
    ),
    Rule(
        "attention-only",
        lambda seen: seen.images < SMALL,
        "with so few images, tuning only the attention is as good as tuning everything, or better",
        "follow-up, section 4, Table 6; BiT-HyperRule's small tasks",
    ),
    Rule(
        "full fine-tuning",
        lambda seen: True,
        "enough to tune every weight",
        "Table 4; follow-up, Table 6, where tuning everything is best on the largest data sets",
    ),
)
"""The first line that holds counts."""


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


def rule(seen: Situation) -> Rule:
    """Return the first line of the table that holds."""
    return next(rule for rule in RULES if rule.holds(seen))


def recommend(
    seen: Situation, options: Sequence[Option], *, seconds: float | None = None, memory: float = float("inf")
) -> Recommendation:
    """Return the options with one of them recommended.

    `seconds` is the available time (None: no limit), `memory` the free bytes. The method of the rule is recommended if
    it is among the options and fits; else the next cheaper method that fits; else, if only the time is too short, the
    quickest one that fits into memory. Raises UsageError if none fits into memory.
    """
    first = rule(seen)
    wanted = next((option for option in options if option.name == first.name), None)
    order = CHEAPER[CHEAPER.index(first.name) :] if first.name in CHEAPER else (first.name, *CHEAPER)
    small = [option for option in options if option.memory_bytes <= memory]
    if not small:
        need = binary_size(min(option.memory_bytes for option in options))
        raise UsageError(
            f"Even the smallest method takes {need} of memory, but {binary_size(memory)} are free. Choose a smaller "
            "network or a smaller --image-size."
        )
    fitting = {option.name: option for option in small if _in_time(option, seconds)}
    chosen = next((fitting[name] for name in order if name in fitting), None)
    chosen = chosen or min(small, key=lambda option: option.seconds)
    marked = [replace(option, recommended=option is chosen) for option in options]
    each = f"{seen.each:,.0f}" if seen.each >= 10 else f"{seen.each:.2g}"
    about = f"{seen.images:,} training images of {seen.classes:,} classes ({each} per class): {first.why}."
    why = f"{about} {_obstacle(first.name, wanted, chosen, seconds, memory)}{_takes(chosen, seconds)}."
    return Recommendation(marked, why, first.source)


def _in_time(option: Option, seconds: float | None) -> bool:
    return seconds is None or (option.seconds <= seconds and _does_enough(option))


def _does_enough(option: Option) -> bool:
    """Return whether the time leaves enough of the steps of a method."""
    return option.share >= (LEAST_SHARE if option.name == "from scratch" else LEAST_TUNED)


def _obstacle(method: Method, wanted: Option | None, chosen: Option, seconds: float | None, memory: float) -> str:
    """Return why the method of the rule is not recommended, as the beginning of a sentence; "" if it is."""
    name, limit = method.capitalize(), span(seconds or 0.0)
    if wanted is None:
        return f"{name} is not possible with this network, so {chosen.name} is the next choice: it "
    if wanted.name == chosen.name:
        return "It "
    if wanted.memory_bytes > memory:
        obstacle = f"needs {binary_size(wanted.memory_bytes)} of memory, but {binary_size(memory)} are free"
    elif not _does_enough(wanted):
        obstacle = f"could do only {wanted.share:.0%} of its steps in {limit}"
    else:
        obstacle = f"takes {span(wanted.seconds)}, more than the available {limit}"
    return f"{name} {obstacle}, so {chosen.name} is the next choice: it "


def _takes(chosen: Option, seconds: float | None) -> str:
    """Return the time and memory of the recommended method, and whether the time is too short for it."""
    takes = f"takes {span(chosen.seconds)} and {binary_size(chosen.memory_bytes)} of memory"
    if chosen.share < 1:
        takes += f", with {chosen.share:.0%} of its steps"
    if _in_time(chosen, seconds):
        return takes
    if chosen.seconds > (seconds or 0.0):
        return f"{takes}, more than the available {span(seconds or 0.0)}, and no other method is quicker"
    return f"{takes}; more time would improve it"


def span(seconds: float) -> str:
    """Write a time: "42 s", "3:05 min", "2:03 h", "4.1 days"."""
    whole = round(seconds)
    if whole < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"
    if whole < 6_000:
        return f"{whole // 60}:{whole % 60:02} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02} h" if minutes < 2_880 else f"{minutes / 1440:.1f} days"
