"""The claims of the papers: the differences that they are about, and the one rule that decides whether they hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.studies.rule import LEVEL, MOST_SEEDS, Evidence, evidence, holm

Verdict = Literal["holds", "does not hold", "too noisy to tell", "not finished", "not decided"]
Column = float | str
"""A place on the axis of a study."""
Place = tuple[str, Column]
"""(row, column)."""
Scores = Mapping[Place, Sequence[float]]
"""Place -> the measured numbers of one table, one for each seed, in the order of the seeds."""
MEAN = "mean"
"""The table of the means over all other tables, where a study has it."""


class Parts(tuple[Sequence[float], ...]):
    """The differences of several parts of a claim, seed by seed: it holds if all of them are above 0."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the difference that is above 0 if it holds."""

    text: str
    difference: Callable[[Scores], Sequence[float] | Parts]
    """Function: the scores of its table -> the difference for each seed, in the unit of the table, or several such
    parts, all of which must be above 0."""
    table: str | None = None
    """The table whose numbers decide it (default: the first)."""
    paper: Mapping[Any, Column] = field(default_factory=dict)
    """Row, column or table of the laptop's grid -> that of the paper's, where the names differ."""
    matters: float = 0.5
    """The smallest difference that matters, in the unit of the table: by default half a point of accuracy."""
    exact: bool = False
    """Whether its numbers are counts, such as parameters, which do not differ between seeds."""

    def of_paper(self, scores: Scores) -> Scores:
        """Return scores of the paper's grid by the names of the laptop's, which `difference` reads."""
        back = {theirs: ours for ours, theirs in self.paper.items()}
        hidden = self.paper.keys() - back.keys()  # in the paper's grid, these names mean other networks
        return {
            (back.get(row, row), back.get(at, at)): values
            for (row, at), values in scores.items()
            if row not in hidden and at not in hidden
        }

    def evidence(self, tables: Mapping[str, Scores], incomplete: Collection[str], *, paper: bool) -> Evidence | Verdict:
        """Return what the tables of a study say about the claim, or why nothing can be said.

        It is "not finished" if numbers of its table are missing. It is "not decided" if the paper's grid does not have
        the networks that it compares.

        Args:
            tables: Name -> scores of each table that a number was measured for, the first table first.
            incomplete: Names of the tables of which numbers are missing.
            paper: Whether the grid is the paper's.
        """
        table = self.table or next(iter(tables), MEAN)
        table = str(self.paper.get(table, table)) if paper else table
        if table == MEAN and len(tables) == 1:  # the mean over one table is that table
            (table,) = tables
        if table not in tables and table != MEAN:
            return "not decided"
        if table not in tables or table in incomplete or (table == MEAN and incomplete):
            return "not finished"
        try:
            found = self.difference(self.of_paper(tables[table]) if paper else tables[table])
        except (LookupError, ValueError):  # the best, or the first, of no network
            return "not decided"
        return evidence(found if isinstance(found, Parts) else (found,), self.matters, exact=self.exact)


@dataclass(frozen=True)
class Answer:
    """A claim of the paper, and its verdict by the numbers of a study."""

    claim: Claim
    verdict: Verdict
    difference: float = math.nan
    """In the unit of the claim's table, above 0 if the claim is right; of several parts, that of the weakest."""
    error: float = math.nan
    """Standard error of `difference` over seeds."""
    p: float = math.nan
    """Corrected for the number of claims (Holm)."""
    needed: int | None = None
    """Number of seeds that would decide, if the numbers are too noisy to tell; None also for more than 100."""

    def __str__(self) -> str:
        if math.isnan(self.difference):
            return f"{self.verdict}: {self.claim.text}"
        error = "" if math.isnan(self.error) else f" ± {self.error:.2f}, p {self.p:.2g}"
        return f"{self.verdict} ({self.difference:+.2f}{error}{self.advice}): {self.claim.text}"

    @property
    def advice(self) -> str:
        """How many seeds would decide, as text; empty for a claim that is decided."""
        if self.verdict != "too noisy to tell" or math.isnan(self.p):
            return ""
        return f"; {self.needed} seeds would decide" if self.needed else f"; more than {MOST_SEEDS} seeds would decide"


def answers(found: Sequence[tuple[Claim, Evidence | Verdict]]) -> list[Answer]:
    """Return the answers to all claims of a study, from what its numbers say about each."""
    corrected = holm([one.p for _, one in found if isinstance(one, Evidence)])
    level, left = LEVEL / max(sum(p > LEVEL for p in corrected), 1), iter(corrected)
    return [
        _answer(claim, one, next(left), level) if isinstance(one, Evidence) else Answer(claim, one)
        for claim, one in found
    ]


def _answer(claim: Claim, found: Evidence, p: float, level: float) -> Answer:
    """Return the answer for a corrected p; `level` is the one at which the undecided claims are tested."""
    if p <= LEVEL:
        return Answer(claim, "holds" if found.holds else "does not hold", found.difference, found.error, p)
    return Answer(claim, "too noisy to tell", found.difference, found.error, p, found.seeds_to_decide(level))


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


def alike(differences: Sequence[float], margin: float) -> Parts:
    """Return the parts of the claim that a difference is below `margin` in both directions (two one-sided tests)."""
    return Parts(([margin - x for x in differences], [margin + x for x in differences]))


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
