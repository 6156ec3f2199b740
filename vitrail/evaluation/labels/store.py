"""The results of an evaluation as a file, of one label or of several for each image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from vitrail.data.npz import Npz
from vitrail.errors import DataError
from vitrail.evaluation.classify import Classification, check_rows, load_classification, save_classification
from vitrail.evaluation.labels.scores import LabelScores
from vitrail.files import replacing

STORED = {
    "index": "index",
    "targets": "target",
    "probabilities": "probability",
    "loss": "loss",
    "thresholds": "thresholds",
}
"""Array in the file -> field of `LabelScores`."""

NUMBERS = {"index": ("i", 1), "target": ("i", 2), "probability": ("f", 2), "loss": ("f", 1)}
"""See `vitrail.evaluation.classify.NUMBERS`."""


def save_results(path: Path, found: Classification | LabelScores) -> None:
    """Write the results as an .npz (see `save_classification`, `STORED`)."""
    if isinstance(found, Classification):
        save_classification(path, found)
        return
    arrays = {name: getattr(found, field) for name, field in STORED.items()}
    arrays["temperature"] = np.array([found.temperature])
    arrays["bad"] = np.array(found.bad, dtype=np.str_).reshape(-1, 2)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_results(path: Path, class_names: Sequence[str]) -> Classification | LabelScores:
    """Read a file that `save_results` wrote. Raises DataError for a damaged or different file."""
    try:
        with closing(Npz(path, DataError, only=(*STORED, "bad", "labels", "temperature"))) as file:
            if "targets" not in file.headers:
                return load_classification(path, class_names)
            arrays = {field: file.read(name) for name, field in STORED.items()}
            bad = [(str(id_), str(reason)) for id_, reason in file.read("bad", "U")]
            temperature = file.read("temperature", "f") if "temperature" in file.headers else np.ones(1)
        check_rows(arrays, NUMBERS)
        if arrays["thresholds"].dtype.kind != "f" or arrays["thresholds"].shape != (len(class_names),):
            raise ValueError(f"thresholds are {arrays['thresholds'].shape}, and there are {len(class_names)} classes")
        if temperature.shape != (1,) or not 0 < temperature[0] < np.inf:
            raise ValueError(f"the temperature is {temperature}")
        shape = (len(arrays["index"]), len(class_names))
        if arrays["target"].shape != shape or arrays["probability"].shape != shape:
            raise ValueError(
                f"probabilities are {arrays['probability'].shape}, and there are {len(class_names)} classes"
            )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as the outputs of an evaluation: {error}") from error
    return LabelScores(list(class_names), **arrays, bad=bad, temperature=float(temperature[0]))
