"""All tasks by name, and the results of any of them as a file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.labels.answers import MOST
from vitrail.data.labels.sets import Labels
from vitrail.data.npz import Npz
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import classify, label_scores, number_scores, pixel_scores
from vitrail.evaluation.results import Results
from vitrail.files import replacing
from vitrail.tasks.answers import AnswersTask
from vitrail.tasks.classes import ClassTask
from vitrail.tasks.labels import LabelTask
from vitrail.tasks.numbers import NumberTask
from vitrail.tasks.segmentation import SegmentationTask
from vitrail.tasks.task import Task

if TYPE_CHECKING:
    from vitrail.weights.card import Card

_OF_ONE: tuple[Task[Any], ...] = (ClassTask(), LabelTask(), NumberTask())
TASKS: dict[str, Task[Any]] = {task.name: task for task in (*_OF_ONE, SegmentationTask(), AnswersTask(_OF_ONE))}
"""Name -> task."""
MARKS = {"answers": "answers", "numbers": "numbers", "targets": "labels", "pixels": "segmentation"}
"""Array that only one task has in a file of results -> name of the task; without any of them it is "classes"."""
ARRAYS = {
    *classify.STORED, *label_scores.STORED, *number_scores.STORED, *pixel_scores.STORED,
    "bad", "uncalibrated", "temperature", "scale",
}  # fmt: skip
"""Arrays of all tasks in files of results."""
OF_ANSWERS = {"answers", *(f"{number}.{name}" for number in range(MOST) for name in ARRAYS)}
"""Arrays of several answers: each has those of its task."""


def task_of(card: Card) -> Task[Any]:
    """Return the task of a network with this card."""
    return TASKS[card.task]


def task_for(labels: Labels) -> Task[Any]:
    """Return the task of images with these labels."""
    return next(task for task in TASKS.values() if task.holds(labels))


def save_results(path: Path, found: Results) -> None:
    """Write results as an .npz: the arrays of `Results.arrays`, and `bad`."""
    arrays: dict[str, Any] = {**found.arrays(), "bad": np.array(found.bad, dtype=np.str_).reshape(-1, 2)}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_results(path: Path, class_names: Sequence[str]) -> Results:
    """Read a file that `save_results` wrote. Raises DataError for a damaged or different file."""
    try:
        with closing(Npz(path, DataError, only={*ARRAYS, *OF_ANSWERS})) as file:
            name = next((task for array, task in MARKS.items() if array in file.headers), "classes")
            found: Results = TASKS[name].read(file, class_names)
            bad = [(str(id_), str(reason)) for id_, reason in file.read("bad", "U")]
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise DataError(f"{path} cannot be read as the outputs of an evaluation: {error}") from error
    return replace(found, bad=bad)  # type: ignore[type-var]  # each is a dataclass
