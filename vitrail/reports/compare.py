"""`compare(runs)`: what differs between runs, in their settings and in what they came to.

The first run is the one that the others are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.config import plain
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.reports.contents import Contents, read_contents, validation_images
from vitrail.reports.cost_section import Config, Cost, cost_of
from vitrail.reports.paired import Pair, holm, pair
from vitrail.weights.load import read_card

PLACES = ("name", "out")
"""Settings that say where a run is kept, not what it is."""


@dataclass(frozen=True)
class Against:
    """One run compared with the first."""

    number: int
    """Its place among the runs, from 1."""
    pair: Pair
    p: float
    """Of McNemar's test, corrected for the number of comparisons (Holm)."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    runs: list[Contents]
    labels: list[str]
    """Short names that tell them apart."""
    settings: dict[str, list[Any]]
    """What differs: setting -> its value in each run; None also where a run's settings cannot be read."""
    against: list[Against]
    costs: list[Cost]
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""


def compare(folders: Sequence[Path]) -> Comparison:
    """Read and compare run folders. Raises DataError for one that is none, UsageError for one given twice."""
    where = [folder.resolve() for folder in folders]
    if twice := [str(folder) for number, folder in enumerate(folders) if where[number] in where[:number]]:
        raise UsageError(f"{twice[0]} is given twice: a run compared with itself shows nothing")
    if len(folders) < 2:
        raise UsageError("a comparison needs two runs at least")
    runs = [read_contents(folder) for folder in folders]
    labels = told_apart(where)
    notes = [f"{label}: {note}" for label, run in zip(labels, runs, strict=True) for note in run.notes]
    return Comparison(
        runs,
        labels,
        settings(runs),
        _against_first(runs, labels, notes),
        [cost_of(run, _config(run, label, notes)) for run, label in zip(runs, labels, strict=True)],
        notes,
    )


def told_apart(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of absolute paths, as many of them as make all different."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def settings(runs: Sequence[Contents]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs, by their dotted names; `data` also where the images do."""
    each = [{} if run.run is None else _flat(plain(run.run)) for run in runs]
    for values, run in zip(each, runs, strict=True):
        for name in PLACES:
            values.pop(name, None)
        if mark := run.facts.get("data", {}).get("fingerprint"):
            values["data (fingerprint)"] = mark
    names = dict.fromkeys(name for values in each for name in values)
    found = {name: [values.get(name) for values in each] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[above + name] = value
    return flat


def _against_first(runs: Sequence[Contents], labels: Sequence[str], notes: list[str]) -> list[Against]:
    first, found = runs[0], {}
    for number, run in enumerate(runs[1:], start=1):
        try:
            found[number] = same_images(first, run)
        except DataError as error:
            notes.append(f"{labels[number]} cannot be compared with {labels[0]} image by image: {error}")
    corrected = holm([one.p for one in found.values()])
    return [Against(number, one, p) for (number, one), p in zip(found.items(), corrected, strict=True)]


def same_images(first: Contents, second: Contents) -> Pair:
    """Match the answers of two runs. Raises DataError, saying why not, where the images may be others."""
    for run in (first, second):
        if run.answers is None:
            raise DataError(f"{run.folder.name} has no answers (evaluation.npz)")
    assert first.answers is not None and second.answers is not None
    marks = [run.facts.get("data", {}).get("fingerprint") for run in (first, second)]
    if all(marks) and marks[0] != marks[1]:  # more to train on, say, and the same images to validate on
        if _ids(first) != _ids(second):
            raise DataError("their validation images are others")
    elif _held_out(first) != _held_out(second):
        raise DataError("their validation images are others")
    return pair(first.answers, second.answers)


def _ids(run: Contents) -> list[str]:
    """Names of all validation images, in order. Raises DataError where the data cannot be opened as they were."""
    try:
        source = validation_images(run)
    except (VitrailError, OSError) as error:
        raise DataError(f"their data sets differ, and one cannot be read: {error}") from error
    return [source.id(index) for index in range(len(source))]


def _held_out(run: Contents) -> Any:
    """What tells which images were held out: their ids, or the split they came from."""
    try:
        value = json.loads((run.folder / "split.json").read_text(encoding="utf-8"))
        return value.get("ids") or value.get("validation")
    except (OSError, ValueError, AttributeError):
        if run.run is None:
            return None
        data = run.run.data  # of one data set, these say which images were held out
        return [data.train, data.validation, data.holdout, run.run.seed]


def _config(run: Contents, label: str, notes: list[str]) -> Config | None:
    try:
        return read_card(run.folder).config
    except VitrailError as error:
        notes.append(f"{label}: no exaFLOPs without its model: {error}")
        return None
