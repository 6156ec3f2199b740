"""The numbers of a study as tables, and the verdicts on its claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.studies.study import MEAN, Cell, Claim, Place, Scale, Scores, Study


@dataclass(frozen=True)
class CellResult:
    """One cell with one seed."""

    cell: Cell
    seed: int
    score: float | None = None
    """The number, in the unit of its table; None without one."""
    reason: str = ""
    """Why there is no number."""
    run: str = ""
    """The run folder of the network, below that of the study."""
    rate: float | None = None
    """Learning rate of the training that counts, if several were tried."""
    seconds: float = 0.0
    """Seconds of training, without the stages before it."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = {name: getattr(self, name) for name in ("seed", "score", "reason", "run", "rate", "seconds")}
        return {"table": self.cell.table, "row": self.cell.row, "at": self.cell.at, **values}


@dataclass(frozen=True)
class Answer:
    """A claim of the paper, and its verdict by the numbers of this study."""

    claim: Claim
    verdict: str
    """holds, does not hold, too noisy to tell, not finished, or not decided (see `Tables.answers`)."""
    difference: float = math.nan
    """In the unit of the claim's table, above 0 if the claim is right."""
    deviation: float = math.nan
    """Over seeds."""

    def __str__(self) -> str:
        if math.isnan(self.difference):
            return f"{self.verdict}: {self.claim.text}"
        deviation = "" if math.isnan(self.deviation) else f" ± {self.deviation:.2f} over seeds"
        return f"{self.verdict} ({self.difference:+.2f}{deviation}): {self.claim.text}"


@dataclass(frozen=True)
class Table:
    """One table of a study: rows, columns, and mean and deviation over seeds of the cells that are measured."""

    name: str
    scores: Scores
    rows: Sequence[str]
    """In the order of the grid."""
    columns: Sequence[float | str]
    """Numbers ascending, words in the order of the grid."""

    @property
    def means(self) -> Mapping[Place, tuple[float, float]]:
        """Place -> mean and deviation over seeds (n - 1; NaN for one seed)."""
        return {place: mean_and_deviation(values) for place, values in self.scores.items()}

    def lines(self) -> list[list[str]]:
        """Return the table as text: a header, then a line for each row."""
        means = self.means
        header = ["", *map(column, self.columns)]
        return [header, *([row, *(number(means.get((row, at))) for at in self.columns)] for row in self.rows)]


@dataclass(frozen=True)
class Tables:
    """Everything that a study has measured."""

    study: Study
    results: Sequence[CellResult]
    scale: Scale = "laptop"
    whole: bool = True
    """Whether all rows of the grid were run, which the claims need."""

    @property
    def tables(self) -> list[Table]:
        """One table for each kind of number, in the order of the grid, then the means over them if the study has it."""
        names = list(dict.fromkeys(result.cell.table for result in self.results))
        found = [self._table(name) for name in names]
        return [*found, mean_table(found)] if self.study.mean and len(found) > 1 else found

    def _table(self, name: str) -> Table:
        results = [result for result in self.results if result.cell.table == name]
        return Table(name, scores(results), *axes([(result.cell.row, result.cell.at) for result in results]))

    @property
    def missing(self) -> list[CellResult]:
        """The results without a number."""
        return [result for result in self.results if result.score is None]

    def answers(self) -> list[Answer]:
        """Return the verdict on each claim.

        It is "not finished" if numbers of its table are missing. It is "not decided" if not all rows were run, or if
        the paper's grid does not have the networks that it compares.
        """
        found = {table.name: table.scores for table in self.tables}
        incomplete = {result.cell.table for result in self.missing}
        first, paper = next(iter(found), MEAN), self.scale == "paper"
        answers = []
        for claim in self.study.claims:
            table = claim.table or first
            table = str(claim.paper.get(table, table)) if paper else table
            if not self.whole or (table not in found and table != MEAN):
                answers.append(Answer(claim, "not decided"))
            elif table not in found or table in incomplete or (table == MEAN and incomplete):
                answers.append(Answer(claim, "not finished"))
            else:
                answers.append(_answer(claim, claim.of_paper(found[table]) if paper else found[table]))
        return answers


def _answer(claim: Claim, found: Scores) -> Answer:
    try:
        return Answer(claim, *claim.verdict(found))
    except (LookupError, ValueError):  # the best, or the first, of no network
        return Answer(claim, "not decided")


def axes(places: Sequence[Place]) -> tuple[list[str], list[float | str]]:
    """Return the rows and the columns of these places."""
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(at for _, at in places))
    return rows, columns if any(isinstance(at, str) for at in columns) else sorted(columns)


def scores(results: Sequence[CellResult]) -> Scores:
    """Return the scores of the places whose every seed is measured."""
    found: dict[Place, list[float]] = {}
    incomplete = {(result.cell.row, result.cell.at) for result in results if result.score is None}
    for result in results:
        place = result.cell.row, result.cell.at
        if place not in incomplete and result.score is not None:
            found.setdefault(place, []).append(result.score)
    return found


def mean_table(tables: Sequence[Table]) -> Table:
    """Return the means over tables, for the places that all of them have."""
    places = [place for place in tables[0].scores if all(place in table.scores for table in tables)]
    means = {
        place: [statistics.fmean(values) for values in zip(*(table.scores[place] for table in tables), strict=True)]
        for place in places
    }
    return Table(MEAN, means, *axes(places))


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and deviation over seeds (n - 1; NaN for one seed)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def column(at: float | str) -> str:
    """Return a place on the axis as text."""
    return at if isinstance(at, str) else f"{at:,.6g}"


def number(value: tuple[float, float] | None) -> str:
    """Return mean and deviation as text, without a deviation that is 0; empty if nothing was measured."""
    if value is None:
        return ""
    mean, deviation = value
    return f"{mean:,.2f}" if math.isnan(deviation) or deviation == 0 else f"{mean:,.2f} ± {deviation:.2f}"
