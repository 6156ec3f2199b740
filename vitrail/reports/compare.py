"""`write_comparison(run_folders, out)`: how runs differ in settings, accuracy and cost. The first run is the baseline.

The page shows where two runs disagree: the classes that gain and lose, and the images that only one run gets right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config import dotted, plain
from vitrail.data.images.pixels import picture
from vitrail.data.roles import SUBSET
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.evaluation.metric import TITLES, headline
from vitrail.files import read_json_object
from vitrail.model.variants import Config
from vitrail.reports.cost import RunCost, cost_of
from vitrail.reports.curves import comparison_curves
from vitrail.reports.figures import SERIES
from vitrail.reports.folds import Folds, join_folds
from vitrail.reports.gallery import Exhibit, decode_image, true_class
from vitrail.reports.page import render, write_page
from vitrail.reports.run_record import RunRecord, attempt, read_run, validation_images
from vitrail.reports.significance import Pair, holm, pair_predictions
from vitrail.reports.tables import MOST_CLASSES
from vitrail.tasks.catalog import TASKS
from vitrail.weights.load import read_card
from vitrail.words import distinct_labels, without_folders

NOT_COMPARED = ("name", "out")
"""Settings that only say where a run is stored."""


@dataclass(frozen=True)
class Against:
    """One run compared with the first."""

    number: int
    """Position of the run in the list of runs, from 1."""
    pair: Pair
    p: float
    """p-value of McNemar's test, corrected for the number of comparisons (Holm)."""


@dataclass(frozen=True)
class Comparison:
    """Several runs, compared with the first."""

    runs: list[RunRecord]
    labels: list[str]
    """Short names that distinguish the runs."""
    settings: dict[str, list[Any]]
    """Settings that differ -> their value in each run; None also where a run's settings cannot be read."""
    against: list[Against]
    costs: list[RunCost]
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""
    folds: Folds | None = None
    """The cross-validation, if all runs are folds: they have different validation images and are not compared."""

    @property
    def untested(self) -> list[int]:
        """Numbers of the runs that could not be compared with the first."""
        return sorted(set(range(1, len(self.runs))) - {one.number for one in self.against})


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read and compare run folders.

    Raises DataError if a folder is not a run folder, UsageError for fewer than two or the same folder twice.
    """
    where = [folder.resolve() for folder in folders]
    if twice := [str(folder) for number, folder in enumerate(folders) if where[number] in where[:number]]:
        raise UsageError(f"{twice[0]} is given twice. Give each run once.")
    if len(folders) < 2:
        raise UsageError(f"a comparison needs at least two runs, and {len(folders)} was given")
    runs = [read_run(folder) for folder in folders]
    labels = distinct_labels(where)
    notes = [f"{label}: {note}" for label, run in zip(labels, runs, strict=True) for note in run.notes]
    folds = attempt(notes, "the folds cannot be joined", lambda: join_folds(runs))
    return Comparison(
        runs,
        labels,
        differing_settings(runs),
        [] if folds else _against_first(runs, labels, notes),
        [cost_of(run, _config(run, label, notes)) for run, label in zip(runs, labels, strict=True)],
        notes,
        folds,
    )


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs by their dotted names, and whether the images differ."""
    each = [{} if run.run is None else dict(dotted(plain(run.run))) for run in runs]
    for values, run in zip(each, runs, strict=True):
        for name in NOT_COMPARED:
            values.pop(name, None)
        if fingerprint := run.data_facts.get("fingerprint"):
            values["data (fingerprint)"] = fingerprint
    names = dict.fromkeys(name for values in each for name in values)
    settings = {name: [values.get(name) for values in each] for name in names}
    return {name: values for name, values in settings.items() if any(value != values[0] for value in values)}


def _against_first(runs: Sequence[RunRecord], labels: Sequence[str], notes: list[str]) -> list[Against]:
    pairs = [
        attempt(notes, f"{label} cannot be compared with {labels[0]} image by image", partial(pair_runs, runs[0], run))
        for label, run in zip(labels[1:], runs[1:], strict=True)
    ]
    found = [(number, one) for number, one in enumerate(pairs, start=1) if one is not None]
    corrected = holm([one.p for _, one in found])
    return [Against(number, one, p) for (number, one), p in zip(found, corrected, strict=True)]


def pair_runs(first: RunRecord, second: RunRecord) -> Pair:
    """Match the predictions of two runs.

    Raises DataError if one was not evaluated or their validation images may differ.
    """
    for run in (first, second):
        if run.results is None:
            raise DataError(f"{run.folder.name} has no evaluation (evaluation.npz)")
        if run.evaluation is None:
            predicts = TASKS[run.results.task].predicts
            raise DataError(f"{run.folder.name} predicts {predicts}, and this test needs one class for each image")
    assert first.evaluation is not None and second.evaluation is not None
    fingerprints = [run.data_facts.get("fingerprint") for run in (first, second)]
    # other data may have the same validation images: with more images to train on, for example
    identify = _image_ids if all(fingerprints) and fingerprints[0] != fingerprints[1] else _split_of
    if identify(first) != identify(second):
        raise DataError("their validation images are not the same")
    return pair_predictions(first.evaluation, second.evaluation)


def _image_ids(run: RunRecord) -> list[str]:
    """Return the names of all validation images, in order. Raises DataError if the data cannot be opened."""
    try:
        source = validation_images(run)
    except (VitrailError, OSError) as error:
        raise DataError(f"their data sets differ, and one cannot be read: {error}") from error
    return [source.id(index) for index in range(len(source))]


def _split_of(run: RunRecord) -> Any:
    """Return what decides which images were held out: their ids, or the split that they came from."""
    try:
        value = read_json_object(run.folder / "split.json", DataError)
        return value.get("ids") or value.get("validation")
    except DataError:
        if run.run is None:
            return None
        data = run.run.data  # within one data set, these decide which images are held out
        of = data.subset if data.validation == SUBSET else None
        return [data.train, data.validation, data.holdout, of, run.run.seed]


def _config(run: RunRecord, label: str, notes: list[str]) -> Config | None:
    what = f"{label}: the FLOPs are unknown because its model cannot be read"
    card = attempt(notes, what, lambda: read_card(run.folder))
    return None if card is None else card.config


MOST_EACH, MOST_TOTAL = 12, 96
"""Maximum number of images in one gallery, and on the page."""


@dataclass(frozen=True)
class ClassShift:
    """The accuracy of one class in several runs."""

    name: str
    images: int
    accuracy: list[float]


@dataclass(frozen=True)
class Disagreement:
    """Images that run `better` gets right and run `worse` gets wrong."""

    better: int
    worse: int
    images: int
    runs: tuple[int, int]
    """The numbers of the runs whose guesses the exhibits hold."""
    shown: list[Exhibit]


def class_shifts(comparison: Comparison) -> list[ClassShift]:
    """Return every class that all compared runs know, the largest difference first."""
    numbers = [0, *(one.number for one in comparison.against)]
    evaluations = [one for one in (comparison.runs[number].evaluation for number in numbers) if one is not None]
    if len(numbers) < 2:
        return []
    accuracy = np.stack([one.class_accuracy for one in evaluations], axis=1)
    known = np.flatnonzero(~np.isnan(accuracy).any(axis=1))
    gap = np.ptp(accuracy[known], axis=1)
    first = evaluations[0]
    return [
        ClassShift(first.class_names[k], int(first.class_count[k]), accuracy[k].tolist())
        for k in known[np.argsort(-gap, kind="stable")].tolist()
    ]


def disagreements(comparison: Comparison, source: Any) -> list[Disagreement]:
    """Return the images that only one of two runs gets right. `source` holds the validation images."""
    most = min(MOST_EACH, max(1, MOST_TOTAL // (2 * max(len(comparison.against), 1))))
    both = []
    for one in comparison.against:
        first, second = one.pair.first_right, one.pair.second_right
        both.append(_disagreement(comparison, one, (one.number, 0), second & ~first, source, most))
        both.append(_disagreement(comparison, one, (0, one.number), first & ~second, source, most))
    return [gallery for gallery in both if gallery.shown]


def _disagreement(
    comparison: Comparison, one: Against, order: tuple[int, int], differ: np.ndarray, source: Any, most: int
) -> Disagreement:
    """Collect the images where bool [n] `differ` is true, those with the largest difference in loss first."""
    first, second = comparison.runs[0].evaluation, comparison.runs[one.number].evaluation
    assert first is not None and second is not None
    rows = np.stack([one.pair.first_rows, one.pair.second_rows], axis=1)[differ]
    gap = np.abs(first.loss[rows[:, 0]] - second.loss[rows[:, 1]])
    gap = np.nan_to_num(gap, nan=np.inf, posinf=np.inf)
    shown: list[Exhibit] = []
    for a, b in rows[np.argsort(-gap, kind="stable")].tolist():
        if len(shown) == most:
            break
        if (decoded := decode_image(source, int(first.index[a]), picture)) is not None:
            guessed = [first.guesses(a, 1), second.guesses(b, 1)]
            shown.append(Exhibit(*decoded, true_class(first, a), guessed))
    return Disagreement(*order, len(rows), (0, one.number), shown)


def write_comparison(run_folders: Sequence[Path | str], out: Path | str) -> Comparison:
    """Write a page that compares runs to the file `out`; return the comparison. The first run is the baseline.

    If the runs are the folds of a cross-validation, the predictions for all images are written to `predictions_file`.

    Notes on the page list what is missing. Raises DataError if a folder is not a run folder, UsageError if a folder is
    given twice or `out` cannot be written.
    """
    comparison = compare_runs([Path(folder) for folder in run_folders])
    notes, galleries = list(comparison.notes), None
    if comparison.against:
        galleries = attempt(notes, "pictures", lambda: disagreements(comparison, validation_images(comparison.runs[0])))
    settings = {
        name: [run.local(v) for run, v in zip(comparison.runs, values, strict=True)]
        for name, values in comparison.settings.items()
    }
    page = render(
        "comparison.html",
        title=f"{', '.join(comparison.labels[:-1])} and {comparison.labels[-1]}",
        comparison=replace(comparison, runs=[run.shareable() for run in comparison.runs], settings=settings),
        curves=comparison_curves(comparison.runs, comparison.labels),
        colours=len(SERIES),
        shifts=class_shifts(comparison),
        most_classes=MOST_CLASSES,
        galleries=galleries or [],
        headline=headline,
        titles=TITLES,
        notes=without_folders(notes),
    )
    write_page(Path(out), page)
    if comparison.folds:
        comparison.folds.write(predictions_file(Path(out)))
    return comparison


def predictions_file(page: Path) -> Path:
    """Return the CSV beside a page, for the predictions of the folds of a cross-validation."""
    return page.with_name(f"{page.stem}-predictions.csv")
