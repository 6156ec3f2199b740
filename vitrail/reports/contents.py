"""What a report is made of, read from the run folder and, for the pictures, from the data it names.

Anything may be missing: the folder may have been moved, the data deleted, the run killed. What cannot be read is
left out and becomes a note.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config import from_yaml
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError, VitrailError
from vitrail.evaluation.classify import Classification, load_classification
from vitrail.reports.figures import Curve
from vitrail.training.run import Run


@dataclass(frozen=True)
class Contents:
    """A run folder in memory; `notes` say what is not there and why."""

    folder: Path
    run: Run | None
    facts: dict[str, Any]
    """run.json."""
    class_names: list[str]
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    answers: Classification | None
    batch: bytes | None
    """batch.png."""
    notes: list[str] = field(default_factory=list)

    def curve(self, name: str, *, beside: str) -> Curve:
        """Steps and values of the lines that have `name` and `beside`, which tells training from evaluation."""
        lines = [line for line in self.metrics if line.get(beside) is not None and line.get(name) is not None]
        return np.array([line.get("step", 0) for line in lines]), np.array([float(line[name]) for line in lines])


def read_contents(folder: Path) -> Contents:
    """Read a run folder. Raises DataError if it is none."""
    if not (folder / "run.json").is_file() and not (folder / "config.yaml").is_file():
        raise DataError(f"{folder} is no run folder: it holds neither run.json nor config.yaml")
    notes: list[str] = []

    def attempt(name: str, read: Callable[[Path], Any], otherwise: Any = None) -> Any:
        try:
            return read(folder / name)
        except (OSError, ValueError, VitrailError) as error:
            missing = isinstance(error, FileNotFoundError)
            notes.append(f"{name} is missing" if missing else f"{name} cannot be used: {error}")
            return otherwise

    class_names = attempt("classes.json", _names, [])
    return Contents(
        folder,
        attempt("config.yaml", lambda path: from_yaml(path, Run())),
        attempt("run.json", _mapping, {}),
        class_names,
        attempt("metrics.jsonl", _lines, []),
        attempt("evaluation.npz", lambda path: _answers(path, class_names)),
        attempt("batch.png", lambda path: path.read_bytes()),
        notes,
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _mapping(path: Path) -> dict[str, Any]:
    value = _json(path)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _names(path: Path) -> list[str]:
    value = _json(path)
    if not isinstance(value, list):
        raise ValueError("it is not a JSON list")
    return [str(name) for name in value]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a killed run
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def _answers(path: Path, class_names: list[str]) -> Classification:
    if not path.exists():
        raise FileNotFoundError(path)
    answers = load_classification(path, class_names)
    largest = max(int(answers.label.max(initial=-1)), int(answers.top.max(initial=-1)))
    if largest >= len(class_names):
        raise ValueError(f"it names class {largest} of {len(class_names)}")
    if not answers.count:
        raise ValueError("it holds no labelled image")
    return answers


def validation_images(contents: Contents) -> Any:
    """Return the source that the answers' `index` counts in. Raises VitrailError, saying why, without one."""
    if contents.run is None:
        raise DataError("config.yaml, which says where the images are, cannot be read")
    data = contents.run.data
    here = Path(contents.facts.get("directory") or ".") / data.path
    if not Path(data.path).exists() and here.exists():  # a relative path, and we are somewhere else
        data = replace(data, path=str(here))
    splits = open_data(data, seed=contents.run.seed, labels=contents.run.supervised)
    trained_on = contents.facts.get("data", {}).get("fingerprint")
    if trained_on and splits.fingerprint != trained_on:
        raise DataError(f"{data.path} is not what the run was trained on: files were added, removed or changed")
    if splits.validation is None:
        raise DataError(f"{data.path} has no validation images")
    return splits.validation
