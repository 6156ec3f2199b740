"""The results of an evaluation as a file: of one label or several for each image, or of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from vitrail.data.labels.numbers import TargetScale
from vitrail.data.npz import Npz
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import Classification, check_rows, load_classification, save_classification
from vitrail.evaluation.number_scores import NumberScores
from vitrail.evaluation.label_scores import LabelScores
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


NUMBER_ARRAYS = {"index": "index", "numbers": "target", "predictions": "prediction"}
"""Array in the file -> field of `NumberScores`."""


def save_results(path: Path, found: Classification | LabelScores | NumberScores) -> None:
    """Write the results as an .npz (see `save_classification`, `STORED`, `NUMBER_ARRAYS`)."""
    if isinstance(found, Classification):
        save_classification(path, found)
        return
    if isinstance(found, NumberScores):
        arrays = {name: getattr(found, field) for name, field in NUMBER_ARRAYS.items()}
        arrays["scale"] = np.array([found.scale.mean, found.scale.deviation])
    else:
        arrays = {name: getattr(found, field) for name, field in STORED.items()}
        arrays["temperature"] = np.array([found.temperature])
    arrays["bad"] = np.array(found.bad, dtype=np.str_).reshape(-1, 2)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_results(path: Path, class_names: Sequence[str]) -> Classification | LabelScores | NumberScores:
    """Read a file that `save_results` wrote. Raises DataError for a damaged or different file."""
    try:
        with closing(
            Npz(path, DataError, only=(*STORED, *NUMBER_ARRAYS, "bad", "labels", "temperature", "scale"))
        ) as file:
            if "numbers" in file.headers:
                return _numbers(file, class_names)
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
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise DataError(f"{path} cannot be read as the outputs of an evaluation: {error}") from error
    return LabelScores(list(class_names), **arrays, bad=bad, temperature=float(temperature[0]))


def _numbers(file: Npz, class_names: Sequence[str]) -> NumberScores:
    arrays = {field: file.read(name, "fi") for name, field in NUMBER_ARRAYS.items()}
    check_rows(arrays, {"index": ("i", 1), "target": ("f", 2), "prediction": ("f", 2)})
    scale = file.read("scale", "f")
    width = len(class_names)
    if any(arrays[name].shape[1] != width for name in ("target", "prediction")) or scale.shape != (2, width):
        raise ValueError(f"predictions are {arrays['prediction'].shape}, and there are {width} targets")
    bad = [(str(id_), str(reason)) for id_, reason in file.read("bad", "U")]
    mean, deviation = (tuple(row) for row in scale.tolist())
    return NumberScores(list(class_names), **arrays, scale=TargetScale(mean, deviation), bad=bad)
