"""What a run left behind, read from its folder and, for the pictures, from the data set that it names.

Anything may be missing: the folder was moved, the data deleted, or the run killed. Whatever cannot be read is left
out of the report, and a note says so.
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

LOSSES = {
    "masked-patch": "cross-entropy in nats of a hidden patch's colours, or squared error of its pixels",
    "mae": "squared error of a hidden patch's pixels, by default normalised to mean 0 and deviation 1",
    "beit": "cross-entropy in nats of a hidden patch's visual token",
    "tokenizer": "squared error of pixels between -1 and 1",
    "dino": "cross-entropy in nats between student and teacher, which does not show which model is better",
}


@dataclass(frozen=True)
class RunRecord:
    """A run folder in memory. `notes` say what is missing and why."""

    folder: Path
    run: Run | None
    """The settings, from config.yaml."""
    facts: dict[str, Any]
    """run.json."""
    class_names: list[str]
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    evaluation: Classification | None
    """Predictions of the best model on the validation images."""
    batch: bytes | None
    """batch.png: the first training batch."""
    notes: list[str] = field(default_factory=list)

    @property
    def result(self) -> dict[str, Any]:
        """How the run ended; empty until it has ended."""
        return self.facts.get("result") or {}

    @property
    def data_facts(self) -> dict[str, Any]:
        """Path, fingerprint and sizes of the data set, as training found them."""
        return self.facts.get("data") or {}

    @property
    def self_supervised(self) -> bool:
        """Whether the run learned without labels."""
        return self.run is not None and not self.run.supervised

    @property
    def loss_in_words(self) -> str:
        """What the loss of self-supervised training measures; empty for supervised training."""
        return "" if self.run is None else LOSSES.get(self.run.objective.kind, "")

    def curve(self, name: str, *, having: str) -> Curve:
        """Return steps and values of metric `name`, from the lines that also have `having`.

        Training lines have "lr"; evaluation lines have "nll" or "count".
        """
        lines = [line for line in self.metrics if line.get(having) is not None and line.get(name) is not None]
        return np.array([line.get("step", 0) for line in lines]), np.array([float(line[name]) for line in lines])


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Raises DataError if `folder` is not one."""
    if not (folder / "run.json").is_file() and not (folder / "config.yaml").is_file():
        raise DataError(
            f"{folder} is not a run folder: it contains neither run.json nor config.yaml. "
            "Give a folder that training wrote, such as runs/digits-1."
        )
    notes: list[str] = []

    def attempt(name: str, read: Callable[[Path], Any], otherwise: Any = None) -> Any:
        try:
            return read(folder / name)
        except (OSError, ValueError, VitrailError) as error:
            missing = isinstance(error, FileNotFoundError)
            notes.append(f"{name} is missing" if missing else f"{name} cannot be used: {error}")
            return otherwise

    class_names = attempt("classes.json", _class_names, [])
    return RunRecord(
        folder,
        attempt("config.yaml", lambda path: from_yaml(path, Run())),
        attempt("run.json", _mapping, {}),
        class_names,
        attempt("metrics.jsonl", _metric_lines, []),
        attempt("evaluation.npz", lambda path: _evaluation(path, class_names)),
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


def _class_names(path: Path) -> list[str]:
    value = _json(path)
    if not isinstance(value, list):
        raise ValueError("it is not a JSON list")
    return [str(name) for name in value]


def _metric_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a killed run
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _evaluation(path: Path, class_names: list[str]) -> Classification:
    if not path.exists():
        raise FileNotFoundError(path)
    found = load_classification(path, class_names)
    largest = max(int(found.label.max(initial=-1)), int(found.top.max(initial=-1)))
    if largest >= len(class_names):
        raise ValueError(f"it names class number {largest}, but there are {len(class_names)} classes")
    if not found.count:
        raise ValueError("it holds no labelled image")
    return found


def validation_images(record: RunRecord) -> Any:
    """Return the source of the validation images, which `evaluation.index` numbers.

    Raises VitrailError if the images are gone or have changed.
    """
    if record.run is None:
        raise DataError("config.yaml, which names the data set, cannot be read")
    data = record.run.data
    path = Path(record.facts.get("directory") or ".") / data.path
    if not Path(data.path).exists() and path.exists():  # a relative path, from another working directory
        data = replace(data, path=str(path))
    splits = open_data(data, seed=record.run.seed, labels=record.run.supervised)
    trained_on = record.data_facts.get("fingerprint")
    if trained_on and splits.fingerprint != trained_on:
        raise DataError(
            f"{data.path} is not what the run was trained on: its files were added, removed or changed since then"
        )
    if splits.validation is None:
        raise DataError(f"{data.path} has no validation images")
    return splits.validation
