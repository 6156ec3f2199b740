"""The learning rate over a run: linear warmup, then a decay (paper, appendix B.1). A pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from vitrail.errors import UsageError

Shape = Literal["cosine", "linear", "rsqrt", "step", "constant"]


def learning_rate(
    step: float,
    total: float,
    base: float,
    *,
    shape: Shape = "cosine",
    warmup: float = 0,
    end: float = 0.0,
    timescale: float | None = None,
    drops: Sequence[float] = (),
) -> float:
    """Return the learning rate of update `step`, counted from 0, of a run of `total`.

    `step`, `total`, `warmup`, `timescale` and `drops` have the same unit, and only their ratios count: optimiser steps,
    seconds of a run limited by time, or fractions of either (total 1). After the end the rate stays the last one.

    With p = (step - warmup) / (total - warmup), the decay from `base` is

    - cosine: to `end` along half a cosine, (1 + cos(pi p)) / 2
    - linear: to `end` along a straight line, 1 - p
    - rsqrt: base / sqrt(1 + (step - warmup) / timescale), never below `end`; default timescale: total / 10
    - step: divided by ten after each of `drops` (from the next step on, because BiT's code compares with <),
      never below `end`
    - constant: no decay

    and the warmup multiplies it by min(1, step / warmup). So the first update has rate 0, as in the original code. The
    paper's text ("learning rate warmup of 10k steps") does not say whether steps are counted from 0 or from 1. A run
    too short to waste an update passes `step + 1`.

    Raises UsageError if the values contradict each other.
    """
    if shape not in get_args(Shape):
        raise UsageError(f"no schedule is named {shape!r}. Valid: {', '.join(get_args(Shape))}")
    if total <= 0 or not 0 <= warmup <= total:
        raise UsageError(f"a warmup of {warmup:g} does not fit a run of {total:g}. It must be from 0 to {total:g}")
    timescale = total / 10 if timescale is None else timescale
    if timescale <= 0:
        raise UsageError(f"the timescale of an rsqrt schedule is {timescale:g}; it must be above 0")
    if any(not 0 <= drop <= total for drop in drops):
        raise UsageError(f"the drops of a step schedule are {list(drops)}; each must be from 0 to {total:g}")
    step = min(max(step, 0), total)
    after = max(step - warmup, 0)
    progress = after / (total - warmup) if total > warmup else 0.0
    if shape == "cosine":
        rate = end + (base - end) * (1 + math.cos(math.pi * progress)) / 2
    elif shape == "linear":
        rate = end + (base - end) * (1 - progress)
    elif shape == "rsqrt":
        rate = max(base / math.sqrt(1 + after / timescale), min(end, base))
    elif shape == "step":
        rate = max(base * 0.1 ** sum(drop < step for drop in drops), min(end, base))
    else:
        rate = base
    return rate * (step / warmup) if step < warmup else rate
