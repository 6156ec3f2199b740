"""`compare(folders)`: how runs differ in their settings, accuracy and cost. The first run is the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.config import dotted, plain
from vitrail.data.roles import SUBSET
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.files import read_json_object
from vitrail.model.variants import Config
from vitrail.reports.cost import RunCost, cost_of
from vitrail.reports.folds import Folds, join_folds
from vitrail.reports.run_record import RunRecord, attempt, read_run, validation_images
from vitrail.reports.significance import Pair, holm, pair
from vitrail.weights.load import read_card
from vitrail.words import distinct_labels

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


def compare(folders: Sequence[Path]) -> Comparison:
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
    found = {name: [values.get(name) for values in each] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


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
        if run.scores is not None:
            raise DataError(f"{run.folder.name} predicts several labels for an image, and this test needs one")
        if run.numbers is not None:
            raise DataError(f"{run.folder.name} predicts numbers, and this test needs one label for each image")
        if run.evaluation is None:
            raise DataError(f"{run.folder.name} has no evaluation (evaluation.npz)")
    assert first.evaluation is not None and second.evaluation is not None
    fingerprints = [run.data_facts.get("fingerprint") for run in (first, second)]
    # other data may have the same validation images: with more images to train on, for example
    identify = _image_ids if all(fingerprints) and fingerprints[0] != fingerprints[1] else _split_of
    if identify(first) != identify(second):
        raise DataError("their validation images are not the same")
    return pair(first.evaluation, second.evaluation)


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
