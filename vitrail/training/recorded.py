"""The settings of a run that has been trained, from its folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vitrail.config import from_yaml
from vitrail.data.settings import Data
from vitrail.errors import DataError, WeightsError
from vitrail.files import read_json_object
from vitrail.training.run import Run


def recorded_run(folder: str | Path) -> Run | None:
    """Return the settings of the run in a folder, or None if it is no run. Raises UsageError.

    Its images, its weights and its teacher are `located`.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        return None
    run, directory = from_yaml(folder / "config.yaml", Run()), ""
    with suppress(DataError, OSError):  # a run that was copied without its run.json
        directory = str(read_json_object(folder / "run.json", DataError).get("directory") or "")
    weights, teacher = (place and _found(place, directory) for place in (run.weights, run.teacher))
    return replace(run, data=located(run.data, directory), weights=weights, teacher=teacher)


def recorded_fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of the images that the run in a folder was trained on; "" if it is not known."""
    try:
        data = read_json_object(Path(folder) / "run.json", DataError).get("data")
    except (DataError, OSError):
        return ""
    return str(data.get("fingerprint") or "") if isinstance(data, dict) else ""


def are_other_weights(asked: str | None, recorded: str | None) -> bool:
    """Return whether the weights that are asked for are others than those of a recorded run, wherever they are.

    Recorded weights that are nowhere any more are taken to have moved. Raises WeightsError.
    """
    from vitrail.weights.load import weights_fingerprint  # which needs torch

    if asked is None or recorded is None or asked == recorded:
        return asked != recorded
    try:
        before = weights_fingerprint(recorded)
    except WeightsError:
        return False
    return weights_fingerprint(asked) != before


def located(data: Data, directory: str) -> Data:
    """Return the settings of data with a path that is found from here.

    directory: The working directory of the training, from which a relative path counts. If nothing is there any more,
    it counts from here.
    """
    return replace(data, path=_found(data.path, directory))


def _found(place: str, directory: str) -> str:
    path, here = Path(directory or ".") / place, Path(place)
    return place if not place or not path.exists() or (here.exists() and here.samefile(path)) else str(path)
