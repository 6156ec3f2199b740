"""The numbers of a study as tables, and the verdicts on its claims."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.studies.claims import MEAN, Answer, Column, Place, Scores, answers, mean_and_deviation, mean_of
from vitrail.studies.study import Cell, Published, Scale, Study


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
    key: str = ""
    """That of `vitrail.studies.known.number_key`."""

    @property
    def place(self) -> Place:
        """Its row and its column."""
        return self.cell.row, self.cell.at

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = {name: getattr(self, name) for name in ("seed", "score", "reason", "run", "rate", "seconds", "key")}
        return {"table": self.cell.table, "row": self.cell.row, "at": self.cell.at, **values}


@dataclass(frozen=True)
class Table:
    """One table of a study: rows, columns, and mean and deviation over seeds of the cells that are measured."""

    name: str
    scores: Scores
    rows: Sequence[str]
    """In the order of the grid."""
    columns: Sequence[Column]
    """Numbers ascending, words in the order of the grid."""

    @property
    def means(self) -> Mapping[Place, tuple[float, float]]:
        """Place -> mean and deviation over seeds (n - 1; NaN for one seed)."""
        return {place: mean_and_deviation(values) for place, values in self.scores.items()}

    def lines(self) -> list[list[str]]:
        """Return the table as text: a header, then a line for each row."""
        return text_table({place: number(*mean) for place, mean in self.means.items()}, self.rows, self.columns)


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
        return Table(name, scores(results), *axes([result.place for result in results]))

    @property
    def missing(self) -> list[CellResult]:
        """The results without a number."""
        return [result for result in self.results if result.score is None]

    def answers(self) -> list[Answer]:
        """Return the verdict on each claim; without all rows of the grid, none is decided."""
        found = {table.name: table.scores for table in self.tables}
        incomplete = {result.cell.table for result in self.missing}
        paper = self.scale == "paper"
        return answers(
            [
                (claim, claim.evidence(found, incomplete, paper=paper) if self.whole else "not decided")
                for claim in self.study.claims
            ]
        )


def axes(places: Collection[Place]) -> tuple[list[str], list[Column]]:
    """Return the rows and the columns of these places."""
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(at for _, at in places))
    return rows, columns if any(isinstance(at, str) for at in columns) else sorted(columns)


def scores(results: Sequence[CellResult]) -> Scores:
    """Return the scores of the places whose every seed is measured."""
    found: dict[Place, list[float]] = {}
    incomplete = {result.place for result in results if result.score is None}
    for result in results:
        if result.place not in incomplete and result.score is not None:
            found.setdefault(result.place, []).append(result.score)
    return found


def mean_table(tables: Sequence[Table]) -> Table:
    """Return the means over tables, for the places that all of them have."""
    places = [place for place in tables[0].scores if all(place in table.scores for table in tables)]
    return Table(MEAN, {place: mean_of([table.scores[place] for table in tables]) for place in places}, *axes(places))


def published_tables(published: Published, quoted: Collection[str]) -> dict[str, list[list[str]]]:
    """Return the paper's tables as text, a header and then a line for each row; rows that it quotes are marked."""
    tables: dict[str, dict[Place, str]] = {}
    for (table, row, at), value in published.items():
        tables.setdefault(table, {})[row + " (quoted)" * (row in quoted), at] = f"{value:.2f}"
    return {name: text_table(shown, *axes(shown)) for name, shown in tables.items()}


def text_table(shown: Mapping[Place, str], rows: Sequence[str], columns: Sequence[Column]) -> list[list[str]]:
    """Return a table as text: a header, then a line for each row, with empty cells where nothing is shown."""
    return [["", *map(column, columns)], *([row, *(shown.get((row, at), "") for at in columns)] for row in rows)]


def column(at: Column) -> str:
    """Return a place on the axis as text."""
    return at if isinstance(at, str) else f"{at:,.6g}"


def number(mean: float, deviation: float) -> str:
    """Return mean and deviation as text, without a deviation that is 0 or NaN."""
    return f"{mean:,.2f}" if math.isnan(deviation) or deviation == 0 else f"{mean:,.2f} ± {deviation:.2f}"
