"""The claims of the papers: the differences that they are about, and the one rule that decides whether they hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["holds", "does not hold", "too noisy to tell", "not finished", "not decided"]
Column = float | str
"""A place on the axis of a study."""
Place = tuple[str, Column]
"""(row, column)."""
Scores = Mapping[Place, Sequence[float]]
"""Place -> the measured numbers of one table, one for each seed, in the order of the seeds."""
MEAN = "mean"
"""The table of the means over all other tables, where a study has it."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the difference that is above 0 if it holds."""

    text: str
    difference: Callable[[Scores], Sequence[float]]
    """Function: the scores of its table -> the difference for each seed, in the unit of the table."""
    table: str | None = None
    """The table whose numbers decide it (default: the first)."""
    paper: Mapping[Any, Column] = field(default_factory=dict)
    """Row, column or table of the laptop's grid -> that of the paper's, where the names differ."""

    def of_paper(self, scores: Scores) -> Scores:
        """Return scores of the paper's grid by the names of the laptop's, which `difference` reads."""
        back = {theirs: ours for ours, theirs in self.paper.items()}
        hidden = self.paper.keys() - back.keys()  # in the paper's grid, these names mean other networks
        return {
            (back.get(row, row), back.get(at, at)): values
            for (row, at), values in scores.items()
            if row not in hidden and at not in hidden
        }

    def verdict(self, scores: Scores) -> tuple[Verdict, float, float]:
        """Return the verdict, the mean difference and its deviation over seeds (n - 1; NaN for one seed).

        A claim holds, or does not hold, if the difference is more than twice its deviation away from 0. With a single
        seed, nobody can tell.
        """
        mean, deviation = mean_and_deviation(self.difference(scores))
        if math.isnan(deviation) or abs(mean) <= 2 * deviation:
            return "too noisy to tell", mean, deviation
        return ("holds" if mean > 0 else "does not hold"), mean, deviation

    def answer(self, tables: Mapping[str, Scores], incomplete: Collection[str], *, whole: bool, paper: bool) -> Answer:
        """Return the answer that the tables of a study give.

        It is "not finished" if numbers of its table are missing. It is "not decided" if not all rows were run, or if
        the paper's grid does not have the networks that it compares.

        Args:
            tables: Name -> scores of each table that a number was measured for, the first table first.
            incomplete: Names of the tables of which numbers are missing.
            whole: Whether all rows of the grid were run.
            paper: Whether the grid is the paper's.
        """
        table = self.table or next(iter(tables), MEAN)
        table = str(self.paper.get(table, table)) if paper else table
        if not whole or (table not in tables and table != MEAN):
            return Answer(self, "not decided")
        if table not in tables or table in incomplete or (table == MEAN and incomplete):
            return Answer(self, "not finished")
        try:
            return Answer(self, *self.verdict(self.of_paper(tables[table]) if paper else tables[table]))
        except (LookupError, ValueError):  # the best, or the first, of no network
            return Answer(self, "not decided")


@dataclass(frozen=True)
class Answer:
    """A claim of the paper, and its verdict by the numbers of a study."""

    claim: Claim
    verdict: Verdict
    difference: float = math.nan
    """In the unit of the claim's table, above 0 if the claim is right."""
    deviation: float = math.nan
    """Over seeds."""

    def __str__(self) -> str:
        if math.isnan(self.difference):
            return f"{self.verdict}: {self.claim.text}"
        deviation = "" if math.isnan(self.deviation) else f" ± {self.deviation:.2f} over seeds"
        return f"{self.verdict} ({self.difference:+.2f}{deviation}): {self.claim.text}"


# what the claims compare, always seed by seed


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and deviation over seeds (n - 1; NaN for one seed)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def mean_of(differences: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several differences, seed by seed."""
    return [statistics.fmean(values) for values in zip(*differences, strict=True)]


def minus(scores: Scores, one: Place, other: Place) -> list[float]:
    """Return score of `one` minus score of `other`, seed by seed."""
    return [a - b for a, b in zip(scores[one], scores[other], strict=True)]


def columns(scores: Scores) -> list[Column]:
    """Return the columns of a table."""
    return list(dict.fromkeys(at for _, at in scores))


def extremes(scores: Scores, row: str) -> tuple[float, float]:
    """Return the smallest and the largest column of a row."""
    numbers = [at for name, at in scores if name == row and not isinstance(at, str)]
    return min(numbers), max(numbers)


def lead(scores: Scores, one: str, other: str, *at: Column) -> list[float]:
    """Return the mean lead of row `one` over row `other` in these columns (default: in all)."""
    return mean_of([minus(scores, (one, each), (other, each)) for each in at or columns(scores)])


def column_lead(scores: Scores, one: Column, other: Column, *rows: str) -> list[float]:
    """Return the mean lead of column `one` over column `other` in these rows (default: in all)."""
    every = rows or dict.fromkeys(row for row, _ in scores)
    return mean_of([minus(scores, (row, one), (row, other)) for row in every])


def gain(scores: Scores, one: str, other: str, first: Column, last: Column) -> list[float]:
    """Return how much the lead of row `one` over row `other` grows from the first column to the last."""
    leads = lead(scores, one, other, first), lead(scores, one, other, last)
    return [after - before for before, after in zip(*leads, strict=True)]
