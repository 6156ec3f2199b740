"""The rule that recommends a way of learning for images, weights and a machine.

The rule is the table `RULES`, read from the top: it goes by how many images there are of each class, how many there
are in all, and whether there are weights to start from. What it names is recommended unless it does not fit into the
time or the memory; then the next cheaper way that does is. Nothing is timed here (see `vitrail.transfer.timing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vitrail.errors import UsageError

Name = Literal["few-shot", "linear probe", "attention-only", "full fine-tuning", "from scratch"]
CHEAPER: tuple[Name, ...] = ("full fine-tuning", "attention-only", "linear probe", "few-shot")
"""Ways from expensive to cheap: a cheaper one replaces one that is too slow or too large."""

FEW = 10
"""Images per class up to which nothing is tuned. A judgement: of ten, a tenth held out leaves one to choose by. The
paper's few-shot numbers are of five, those of BiT of one to a hundred."""
FEWEST_TUNED = 20
"""Images per class from which on weights of the network move. Flowers-102 has 20, the fewest of the sets on which the
follow-up tunes attention alone and does better than by tuning all (section 4, Table 6); below it is a judgement."""
SMALL = 20_000
"""Training images of a small task: BiT-HyperRule's limit. The sets on which attention alone does better have 2,040
(Flowers-102) and 8,144 (Cars); on the largest, iNaturalist with hundreds of thousands, tuning all does (follow-up,
section 4, on Table 6). That the limit lies between them just here is a judgement."""
PRE_TRAINING = 14_000_000
"""Training images with which weights from elsewhere have nothing left to add: about ImageNet-21k, the smaller of the
two sets on which the paper's large networks learn from scratch what convolutions bring along (section 4.3). That
weights lose their use exactly here is a judgement."""
LEAST_SHARE = 0.5
"""Smallest share of its steps: a way that a time limit cuts to less is not recommended. A judgement."""


@dataclass(frozen=True)
class Situation:
    """What the rule depends on."""

    images: int
    """In the training split."""
    classes: int
    weights: bool
    """Whether there are weights to start from."""
    enlarged: bool = False
    """Whether the classes are those of the weights and the images larger than the weights were trained on."""

    @property
    def each(self) -> float:
        """Images per class, the mean."""
        return self.images / max(self.classes, 1)


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    name: Name
    """What it recommends."""
    holds: Callable[[Situation], bool]
    why: str
    """Half a sentence, after the numbers."""
    source: str


RULES = (
    Rule(
        "from scratch",
        lambda seen: not seen.weights,
        "and no weights to start from, so everything has to be learned from them",
        "section 4.3: transfer is what makes little data enough",
    ),
    Rule(
        "from scratch",
        lambda seen: seen.images >= PRE_TRAINING,
        "as many as networks are pre-trained on, so weights from elsewhere have little to add",
        "section 4.3, Figures 3 and 4; the number is a judgement",
    ),
    Rule(
        "attention-only",
        lambda seen: seen.enlarged,
        "of the classes that the weights know, only larger: tuning attention alone comes within 0.1 % of tuning all",
        "follow-up, section 4, Table 5",
    ),
    Rule(
        "few-shot",
        lambda seen: seen.each <= FEW,
        "too few to tune or to choose by: a classifier in closed form on the frozen network has nothing to get wrong",
        "section 4.1, metrics; the number is a judgement",
    ),
    Rule(
        "linear probe",
        lambda seen: seen.each < FEWEST_TUNED,
        "enough to fit a classifier on the frozen network and to choose how strongly to regularise it, not to tune it",
        "a judgement, between the rules before and after",
    ),
    Rule(
        "attention-only",
        lambda seen: seen.images < SMALL,
        "so few that tuning the attention alone does as well as tuning all, or better",
        "follow-up, section 4, Table 6; BiT-HyperRule's small tasks",
    ),
    Rule(
        "full fine-tuning",
        lambda seen: True,
        "enough for every weight to learn from",
        "Table 4; follow-up, Table 6, where all beats attention alone on the largest sets",
    ),
)
"""The first that holds counts."""


@dataclass(frozen=True)
class Option:
    """One way of learning, with the time and memory it takes here."""

    name: Name
    command: str
    """To copy."""
    seconds: float
    """From pressing return to the prompt."""
    memory_bytes: int
    """Peak memory, without that of Python and torch themselves."""
    images_per_second: float
    """Speed of training, loading included."""
    steps: int
    """Number of optimiser steps; 0 if the network stays frozen."""
    why: str = ""
    """A note about this way."""
    recommended: bool = False
    share: float = 1.0
    """Share of its steps that a time limit leaves."""
    parts: dict[str, float] = field(default_factory=dict)
    """Where the seconds go."""


@dataclass(frozen=True)
class Plan:
    """The options, the recommended one among them, and the facts about data and machine."""

    options: list[Option]
    why: str
    """The recommendation in two sentences."""
    source: str
    """Source of the rule."""
    data: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def recommended(self) -> Option:
        """The option to take."""
        return next(option for option in self.options if option.recommended)


def rule(seen: Situation) -> Rule:
    """Return the line of the table that holds."""
    return next(rule for rule in RULES if rule.holds(seen))


def recommend(
    seen: Situation, options: Sequence[Option], *, seconds: float | None = None, memory: float = float("inf")
) -> Plan:
    """Return the options with one of them recommended.

    seconds: time there is; None: as long as it takes. memory: bytes that are free. What the rule names is taken if
    it is among the options and fits; else the next cheaper one that fits; else, if it only takes too long, the
    quickest one that fits into memory. Raises UsageError where not one does.
    """
    first = rule(seen)
    wanted = next((option for option in options if option.name == first.name), None)
    order = CHEAPER[CHEAPER.index(first.name) :] if first.name in CHEAPER else (first.name, *CHEAPER)
    small = [option for option in options if option.memory_bytes <= memory]
    if not small:
        need = min(option.memory_bytes for option in options)
        raise UsageError(
            f"the least of these ways takes {gib(need)} of memory and {gib(memory)} are free: take a smaller network "
            "or a smaller --image-size"
        )
    fitting = {option.name: option for option in small if _in_time(option, seconds)}
    chosen = next((fitting[name] for name in order if name in fitting), None)
    chosen = chosen or min(small, key=lambda option: option.seconds)
    marked = [replace(option, recommended=option is chosen) for option in options]
    return Plan(marked, _reason(seen, first, wanted, chosen, seconds, memory), first.source)


def _in_time(option: Option, seconds: float | None) -> bool:
    return seconds is None or (option.seconds <= seconds and option.share >= LEAST_SHARE)


def _reason(
    seen: Situation, first: Rule, wanted: Option | None, chosen: Option, seconds: float | None, memory: float
) -> str:
    """Two sentences: why this way of learning, and what it takes or why it is not the one that the data ask for."""
    each = f"{seen.each:,.0f}" if seen.each >= 10 else f"{seen.each:.2g}"
    about = f"{seen.images:,} training images of {seen.classes:,} classes, {each} of each, {first.why}."
    takes = f"{span(chosen.seconds)} and {gib(chosen.memory_bytes)}"
    late = not _in_time(chosen, seconds)
    if wanted is None:
        return f"{about} {_name(first.name)} is not to be had with this network, and {chosen.name} takes {takes}."
    if chosen.name != wanted.name:
        if wanted.memory_bytes > memory:
            obstacle = f"needs {gib(wanted.memory_bytes)}, with {gib(memory)} free"
        elif wanted.share < LEAST_SHARE:
            obstacle = f"could do {wanted.share:.0%} of its steps in the {span(seconds or 0.0)} there are"
        else:
            obstacle = f"takes {span(wanted.seconds)}, more than the {span(seconds or 0.0)} there are"
        even = "even " if late else ""
        return f"{about} {_name(first.name)} {obstacle}, so {chosen.name} comes in: {even}it takes {takes}."
    if late and chosen.seconds > (seconds or 0.0):
        return f"{about} It takes {takes}, more than the {span(seconds or 0.0)} there are, and nothing else is quicker."
    limited = f", with {chosen.share:.0%} of its steps" if chosen.share < 1 else ""
    limited += ": more time would do it good" if late else ""
    return f"{about} It takes {takes}{limited}."


def _name(name: Name) -> str:
    return name[0].upper() + name[1:]


def span(seconds: float) -> str:
    """Write a time: "42 s", "3:05 min", "2:03 h", "4.1 days"."""
    whole = round(seconds)
    if whole < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"
    if whole < 6_000:
        return f"{whole // 60}:{whole % 60:02} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02} h" if minutes < 2_880 else f"{minutes / 1440:.1f} days"


def gib(count: float) -> str:
    """Write bytes: "3.2 GiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
