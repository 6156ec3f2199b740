"""The runs of a cross-validation, one for each `data.fold`: mean and deviation, and predictions for all images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.labels.sets import SEPARATOR
from vitrail.data.spreadsheet import SafeWriter
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import has_top5
from vitrail.evaluation.metric import NUMBERS, TITLES
from vitrail.evaluation.results import Results
from vitrail.files import read_json_object, replacing_text
from vitrail.reports.run_record import RunRecord

COLUMNS = ("path", "split", "label", "prediction", "probability", "fold", "run")
"""Columns of the CSV of predictions; several labels stand with '|' between them."""
_COUNTS = ("count", "chance")
_LOSSES = ("nll", "loss")
_TITLES = {**TITLES, "top5": "top-5", "nll": "loss"}


class Number(NamedTuple):
    """A metric over the folds."""

    title: str
    mean: float
    deviation: float
    """Standard deviation between folds, with n - 1 in the denominator."""
    share: bool
    """Whether it is written in percent."""

    def __str__(self) -> str:
        number = "{:.2%}" if self.share else "{:.4f}"
        return f"{self.title} {number.format(self.mean)} ± {number.format(self.deviation)}"


@dataclass(frozen=True)
class Folds:
    """The runs of one cross-validation."""

    count: int
    """Number of folds of the division."""
    done: int
    """Number of folds among the runs."""
    images: int
    """Number of images that a run has predicted without having trained on them."""
    numbers: list[Number]
    rows: list[tuple[Any, ...]]
    """One row of `COLUMNS` for each of these images."""

    def write(self, file: Path) -> None:
        """Write the predictions to a CSV. Raises UsageError if it cannot be written."""
        with replacing_text(file, UsageError) as stream:
            writer = SafeWriter(stream, read_back=True)
            writer.writerow(COLUMNS)
            writer.writerows(self.rows)


def join_folds(runs: Sequence[RunRecord]) -> Folds | None:
    """Return the cross-validation that the runs make up together; None if one of them is no fold.

    Raises DataError for folds of different divisions, a fold that is there twice, and a run without an evaluation.
    """
    if any(run.run is None or run.run.data.fold is None for run in runs):
        return None
    divisions = {_division(run) for run in runs}
    if len(divisions) > 1:
        raise DataError(
            "the runs are folds of different divisions: they differ in the number of folds, the seed or the images"
        )
    names = [_fold(run) for run in runs]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise DataError(f"fold {twice[0]} is there twice")
    found = [_evaluation(run) for run in runs]
    rows = [row for run, one in zip(runs, found, strict=True) for row in _rows(run, one)]
    return Folds(int(names[0].split("/")[1]), len(runs), len(rows), _numbers(found), rows)


def _fold(run: RunRecord) -> str:
    assert run.run is not None and run.run.data.fold is not None
    return run.run.data.fold


def _division(run: RunRecord) -> tuple[Any, ...]:
    assert run.run is not None
    data = run.run.data
    return _fold(run).split("/")[1], run.run.seed, data.train, run.data_facts.get("fingerprint")


def _evaluation(run: RunRecord) -> Results:
    found = run.results
    if found is None:
        raise DataError(f"{run.folder.name} has no evaluation (evaluation.npz)")
    return found


def _numbers(found: Sequence[Results]) -> list[Number]:
    """Return mean and deviation of each metric that all folds have."""
    each = [one.metrics() for one in found]
    without = _COUNTS if has_top5(len(found[0].class_names)) else (*_COUNTS, "top5")
    names = [name for name in each[0] if name not in without and all(name in one for one in each)]
    values = {name: np.array([one[name] for one in each], dtype=np.float64) for name in names}
    return [
        Number(
            _TITLES.get(name, name.replace("_", " ")),
            float(value.mean()),
            float(value.std(ddof=1)) if len(each) > 1 else float("nan"),
            name not in (*NUMBERS, *_LOSSES),
        )
        for name, value in values.items()
    ]


def _rows(run: RunRecord, found: Results) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each validation image of a run. Raises DataError if split.json does not name them all."""
    held = read_json_object(run.folder / "split.json", DataError)
    ids, split = (
        held.get("paths", held.get("ids")),
        str(held.get("from", "")),
    )  # runs of an earlier version have no paths
    if not isinstance(ids, list) or len(ids) <= int(found.index.max(initial=-1)):
        raise DataError(f"{run.folder / 'split.json'} does not name the images of the fold")
    for number, index in enumerate(found.index.tolist()):
        cells = found.cells(number)
        yield str(ids[index]), split, *(SEPARATOR.join(cell) for cell in cells), _fold(run), run.folder.name
