"""Results of a network that gives several answers for an image: those of each answer, and their mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

import numpy as np

from vitrail.data.labels.sets import BETWEEN
from vitrail.evaluation.metric import SCORE
from vitrail.evaluation.results import Guess, Results


@dataclass(frozen=True)
class AnswerResults(Results):
    """Results of each answer of a network for the same images, one row per image in each."""

    task = "answers"
    headline = SCORE
    class_names: list[str]
    """Names of the outputs of all answers."""
    parts: dict[str, Results]
    """Name of an answer -> its results; an answer that no image has is missing."""
    temperatures: dict[str, float]
    """Name of an answer -> the temperature of its probabilities."""
    bad: list[tuple[str, str]] = field(default_factory=list)

    @property
    def index(self) -> np.ndarray:  # type: ignore[override]
        """See `Results`."""
        return next(iter(self.parts.values())).index

    @property
    def known(self) -> np.ndarray:
        """bool [N]: whether any answer is known."""
        found: np.ndarray = np.any([part.known for part in self.parts.values()], axis=0)
        return found

    @property
    def score(self) -> float:
        """Mean over answers of the number that says how good each is: top-1, mAP or R2, which counts as 0 below 0."""
        return float(np.mean([np.maximum(getattr(part, part.headline), 0.0) for part in self.parts.values()]))

    @property
    def loss(self) -> float:
        """Sum over answers of the mean loss of each, unweighted."""
        each = [part.metrics() for part in self.parts.values()]
        return sum(numbers.get("nll", numbers.get("loss", 0.0)) for numbers in each)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log: score, loss, count, and those of each answer as "NAME.top1"."""
        each = {f"{name}.{key}": value for name, part in self.parts.items() for key, value in part.metrics().items()}
        return {SCORE: self.score, "loss": self.loss, "count": self.count, **each}

    def in_words(self) -> str:
        """See `Results`."""
        return "; ".join(f"{name}{BETWEEN}{part.in_words()}" for name, part in self.parts.items())

    def worst(self, most: int) -> np.ndarray:
        """See `Results`: those of each answer in turns."""
        return self._in_turns(lambda part: part.worst(most), most)

    def uncertain(self, most: int) -> np.ndarray:
        """See `Results`: those of each answer in turns."""
        return self._in_turns(lambda part: part.uncertain(most), most)

    def _in_turns(self, rows: Callable[[Results], np.ndarray], most: int) -> np.ndarray:
        turns = zip_longest(*(rows(part).tolist() for part in self.parts.values()))
        chosen = dict.fromkeys(row for row in chain.from_iterable(turns) if row is not None)
        return np.array([*chosen][:most], dtype=np.int64)

    def true_names(self, row: int) -> list[str] | None:
        """See `Results`."""
        each = {name: part.true_names(row) for name, part in self.parts.items()}
        return [f"{name}{BETWEEN}{', '.join(names)}" for name, names in each.items() if names is not None] or None

    def guesses(self, row: int, most: int) -> list[Guess]:
        """See `Results`: the best one of each answer."""
        each = {name: part.guesses(row, 1) for name, part in self.parts.items()}
        return [one._replace(name=f"{name}{BETWEEN}{one.name}") for name, found in each.items() for one in found]

    def cells(self, row: int) -> tuple[list[str], list[str], list[str]]:
        """See `Results`: one text for each answer."""
        columns = {name: part.cells(row) for name, part in self.parts.items()}
        labels, predictions = (
            [f"{name}{BETWEEN}{', '.join(column[place])}" for name, column in columns.items()] for place in (0, 1)
        )
        return labels, predictions, [", ".join(shares) for _, _, shares in columns.values()]

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Results`: "answers", the name and the task of each, and its arrays as "0.labels"."""
        found = {"answers": np.array([(name, part.task) for name, part in self.parts.items()], dtype=np.str_)}
        for number, (name, part) in enumerate(self.parts.items()):
            found |= {f"{number}.{array}": values for array, values in part.arrays().items()}
            found[f"{number}.temperature"] = np.array([self.temperatures[name]])
        return found

    def stored(self) -> AnswerResults:
        """See `Results`."""
        return replace(self, parts={name: part.stored() for name, part in self.parts.items()})
