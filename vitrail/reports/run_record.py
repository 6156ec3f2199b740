"""The files of a run folder and, for the pictures, the data set that they name.

Anything may be missing: the folder was moved, the data deleted, or the run killed. The report leaves out what cannot be
read, and a note says so.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitrail.config import from_yaml
from vitrail.errors import DataError, VitrailError
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.results import Results
from vitrail.files import names_near, open_regular, read_bytes, read_json, read_json_object
from vitrail.reports.figures import Points
from vitrail.run_log import FACTS, Dropped, fitting, log_lines
from vitrail.tasks.catalog import load_results
from vitrail.training.classes import splits_of
from vitrail.training.floor import shortfall
from vitrail.training.recorded import located
from vitrail.training.result import classes_in_words
from vitrail.training.run import Run
from vitrail.words import without_folders

T = TypeVar("T")
LOSSES = {
    "masked-patch": "cross-entropy in nats of a hidden patch's colours, or squared error of its pixels",
    "mae": "squared error of a hidden patch's pixels, by default normalised to mean 0 and deviation 1",
    "beit": "cross-entropy in nats of a hidden patch's visual token",
    "tokenizer": "squared error of pixels between -1 and 1",
    "dino": "cross-entropy in nats between student and teacher, which does not show which model is better",
    "dinov2": "weighted sum of four losses, which does not show which model is better",
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
    results: Results | None
    """Predictions of the best model on the validation images."""
    batch: bytes | None
    """batch.png: the first training batch."""
    notes: list[str] = field(default_factory=list)

    @property
    def evaluation(self) -> Classification | None:
        """The results, if the images have one label each."""
        return self.results if isinstance(self.results, Classification) else None

    @property
    def result(self) -> dict[str, Any]:
        """How the run ended; empty until it has ended."""
        return self.facts.get("result") or {}

    @property
    def of_classes(self) -> str:
        """How right the network is on the classes that its weights knew, before and now, and on the others."""
        return classes_in_words(self.result.get("before") or {}, self.result.get("best") or {})

    @property
    def floors(self) -> dict[str, dict[str, float]]:
        """What a classifier must beat, on the test images, else on the validation images; empty if not measured."""
        return self.result.get("floors") or {}

    @property
    def shortfall(self) -> str:
        """What it means that the network does not exceed a floor: "has not learned enough"; "" if it exceeds all."""
        return shortfall(self.result.get("test") or self.result.get("best") or {}, self.floors)

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

    def local(self, value: Any) -> Any:
        """Return JSON values for a page that others see: paths below the folder of the command are relative to it.

        Other absolute paths are only their last part.
        """
        return without_folders(value, str(self.facts.get("directory") or ""))

    def runnable(self, text: str) -> str:
        """Return a command, or a sentence with commands, for a page that others see.

        Where `local` would leave the last part of a path, which no command finds, stand RUN for the run folder, DATA
        for its images, and FOLDER for other folders: words that a person replaces.
        """
        directory, images = self.facts.get("directory") or "", "" if self.run is None else self.run.data.path
        for place, word in ((str(self.folder), "RUN"), (images, "DATA")):
            if os.path.isabs(place) and not (directory and Path(place).is_relative_to(directory)):
                text = re.sub(rf"(?<![\w/]){re.escape(shlex.quote(place))}(?![\w.-])", word, text)
        return str(without_folders(text, str(directory), "FOLDER/"))

    def shareable(self) -> RunRecord:
        """Return the record for a page that others see: see `local` and `runnable`."""
        facts = {name: value for name, value in self.facts.items() if name != "directory"}
        with suppress(ValueError):  # somebody has edited run.json
            facts["command"] = shlex.join(self.local(shlex.split(facts.get("command") or "")))
        folder = shlex.split(self.runnable(shlex.quote(str(self.folder))))[0]
        return replace(self, folder=Path(folder), facts=self.local(facts))

    def curve(self, name: str, *, having: str) -> Points:
        """Return steps and values of metric `name`, from the lines that also have `having`.

        Training lines have "lr"; evaluation lines have "nll" or "count".
        """
        lines = [line for line in self.metrics if line.get(having) is not None and line.get(name) is not None]
        steps = [line["step"] for line in lines]
        return np.array(steps), np.array([float(line[name]) for line in lines])


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Raises DataError if `folder` is not one."""
    if not folder.exists():
        raise DataError(f"there is no run folder {folder}.{names_near(folder)} Give a folder that training wrote.")
    if not (folder / "run.json").is_file() and not (folder / "config.yaml").is_file():
        raise DataError(
            f"{folder} is not a run folder: it contains neither run.json nor config.yaml. "
            "Give a folder that training wrote, such as runs/digits-1."
        )
    notes: list[str] = []

    def read_file(name: str, read: Callable[[Path], Any], otherwise: Any = None) -> Any:
        try:
            open_regular(folder / name).close()  # a pipe would not end
            return read(folder / name)
        except (OSError, ValueError, VitrailError) as error:
            missing = not (folder / name).exists()
            notes.append(f"{name} is missing" if missing else f"{name} cannot be used: {error}")
            return otherwise

    class_names = [str(name) for name in read_file("classes.json", _class_names, [])]
    return RunRecord(
        folder,
        read_file("config.yaml", lambda path: from_yaml(path, Run())),
        read_file("run.json", partial(_facts, notes=notes), {}),
        class_names,
        read_file("metrics.jsonl", partial(_metric_lines, notes=notes), []),
        read_file("evaluation.npz", lambda path: _results(path, class_names)),
        read_file("batch.png", read_bytes),
        notes,
    )


def attempt(notes: list[str], what: str, read: Callable[[], T]) -> T | None:
    """Return the result of `read`. If it cannot be read, return None and add the note "`what`: the reason"."""
    try:
        return read()
    except (VitrailError, OSError) as error:
        notes.append(f"{what}: {error}")
        return None


def _class_names(path: Path) -> list[Any]:
    value = read_json(path, DataError)
    if not isinstance(value, list):
        raise ValueError("it is not a JSON list")
    return value


def _facts(path: Path, notes: list[str]) -> dict[str, Any]:
    facts, wrong = fitting(read_json_object(path, DataError))
    notes += [f"run.json: {name} cannot be used" for name in wrong]
    if facts.get("tuned", {}).keys() != FACTS["tuned"].keys():
        facts.pop("tuned", None)
    return facts


def _metric_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    dropped = Dropped()
    with open_regular(path) as file:
        lines = [line for _, line in log_lines(file, dropped)]
    if dropped.count:
        notes.append(f"metrics.jsonl: {dropped}")
    return lines


def _results(path: Path, class_names: list[str]) -> Results:
    if not path.exists():
        raise FileNotFoundError(path)
    found = load_results(path, class_names)
    if not found.measurable:
        raise ValueError("it holds no labelled image")
    return found


def validation_images(record: RunRecord) -> Any:
    """Return the source of the validation images, which `evaluation.index` numbers.

    Raises VitrailError if the images are gone or have changed.
    """
    if record.run is None:
        raise DataError("config.yaml, which names the data set, cannot be read")
    data = located(record.run.data, record.facts.get("directory") or "")
    splits = splits_of(replace(record.run, data=data))
    trained_on = record.data_facts.get("fingerprint")
    if trained_on and splits.fingerprint != trained_on:
        raise DataError(
            f"{data.path} is not what the run was trained on: its files were added, removed or changed since then"
        )
    if splits.validation is None:
        raise DataError(f"{data.path} has no validation images")
    return splits.validation
