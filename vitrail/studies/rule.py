"""The rule that decides a claim: t-tests on the differences of paired seeds, Holm's correction over a study's claims.

A claim says that a difference d is above 0, and names the smallest difference m that matters. The seeds can show either
of two things, each by a one-sided t-test: d > 0, and then the claim holds if the mean is at least m; or d < m, and then
it does not hold. So every true difference except m is decided with enough seeds, also a difference of 0. A claim of
several parts (one is better than each of the others; two are alike, to a margin on both sides) holds if all parts hold:
the largest of their p-values counts. It does not hold if one part does not, and there the smallest p-value counts,
multiplied by the number of parts (Bonferroni).

With probability 0.95 no verdict of a study is wrong: the smaller p-value of a claim counts twice, because a claim can
be decided in two ways, and Holm's step-down procedure ("A simple sequentially rejective multiple test procedure", 1979)
corrects for the number of claims.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05
"""Probability that a study whose claims nobody could decide decides any."""
POWER = 0.8
"""Probability with which `seeds_to_decide` seeds decide."""
MOST_SEEDS = 100
"""More seeds than these are not counted."""


@dataclass(frozen=True)
class Evidence:
    """What the seeds say about a claim, before the correction for the other claims of its study."""

    holds: bool
    """Which verdict the seeds favour."""
    p: float
    """Probability of evidence as strong for either verdict if it is wrong; NaN for a single seed."""
    parts: Sequence[Sequence[float]]
    """The differences of each part, seed by seed."""
    matters: float
    """The smallest difference that matters."""

    @property
    def weakest(self) -> Sequence[float]:
        """The differences of the part with the smallest mean."""
        return min(self.parts, key=statistics.fmean)

    @property
    def difference(self) -> float:
        """Mean over seeds of the weakest part."""
        return statistics.fmean(self.weakest)

    @property
    def error(self) -> float:
        """Standard error of `difference`; NaN for a single seed."""
        seeds = len(self.weakest)
        return statistics.stdev(self.weakest) / math.sqrt(seeds) if seeds > 1 else math.nan

    def seeds_to_decide(self, level: float) -> int | None:
        """Return how many seeds would decide at a level, if mean and deviation are the true ones.

        None for more than `MOST_SEEDS`, and for a single seed, whose deviation is not known.
        """
        if math.isnan(self.p):
            return None
        parts = self.parts if self.difference >= self.matters else [self.weakest]
        bound = 0.0 if self.difference >= self.matters else self.matters
        effects = [abs(statistics.fmean(part) - bound) / (statistics.stdev(part) or math.inf) for part in parts]
        return next((seeds for seeds in range(2, MOST_SEEDS + 1) if power(min(effects), seeds, level) >= POWER), None)


def evidence(parts: Sequence[Sequence[float]], matters: float, *, exact: bool = False) -> Evidence:
    """Return what seeds say about a claim. `exact` numbers are counts, which do not differ between seeds."""
    if not exact and min(map(len, parts)) < 2:
        return Evidence(False, math.nan, parts, matters)
    means = [statistics.fmean(part) for part in parts]
    above = max(p_above(part, 0.0, exact) for part in parts) if min(means) >= matters else 1.0
    below = min(p_above([-x for x in part], -matters, exact) for part in parts) * len(parts)
    return Evidence(above < below, min(1.0, 2 * min(above, below)), parts, matters)


def p_above(values: Sequence[float], bound: float, exact: bool = False) -> float:
    """Return the p-value of the one-sided t-test that the true mean is above `bound`."""
    if exact:
        return float(statistics.fmean(values) <= bound)
    if math.isclose(min(values), max(values)):  # equal by chance, so that their deviation is not known
        return 1.0
    from scipy import stats  # of the extra train, which a list of the studies does without

    return float(stats.ttest_1samp(values, bound, alternative="greater").pvalue)


def power(effect: float, seeds: int, level: float) -> float:
    """Return the probability that a claim is decided whose true mean is `effect` deviations away from its bound."""
    from scipy import stats

    critical = stats.t.ppf(1 - level / 2, seeds - 1)  # two ways to be decided
    return float(stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number; NaN, an untested claim, stays NaN and is not counted."""
    order = sorted((index for index in range(len(p)) if not math.isnan(p[index])), key=p.__getitem__)
    corrected, largest = list(p), 0.0
    for rank, index in enumerate(order):
        largest = corrected[index] = max(largest, min(1.0, (len(order) - rank) * p[index]))
    return corrected
