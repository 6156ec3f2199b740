"""The settings and the images of a run that has been trained, from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import from_yaml
from vitrail.data.settings import SPLIT, Data
from vitrail.errors import DataError, WeightsError
from vitrail.files import read_json_object
from vitrail.training.run import Run

if TYPE_CHECKING:
    from vitrail.data.roles import Splits


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


def held_out(folder: str | Path) -> dict[str, Any]:
    """Return which images a run held out (`vitrail.data.roles.Splits.held_out`); empty if it is no run."""
    try:
        return read_json_object(Path(folder) / "split.json", DataError)
    except DataError:
        return {}


def recorded_splits(
    folder: str | Path, run: Run, data: Data, known_classes: Sequence[str] = (), *, labels: bool = True
) -> tuple[Splits, list[str]]:
    """Return the images of the run in a folder, divided as in its training, and notes about what has changed.

    `data` are the run's settings of the data, or changes of them. known_classes, labels: See `open_data`.

    What was held out of the training images is known by the ids in split.json: images that came later would change
    what is drawn. Changed settings that divide the images draw anew. Raises DataError if none of those images is left.
    """
    from vitrail.data.roles import NONE
    from vitrail.data.sources.open import OpenedData

    arguments = run.seed, labels, known_classes
    opened, held, notes = OpenedData(), held_out(folder).get("ids"), list[str]()
    splits = opened.splits(data, *arguments)
    anew = any(getattr(data, name) != getattr(run.data, name) for name in SPLIT if name != "test")
    if data == run.data and recorded_fingerprint(folder) not in ("", splits.fingerprint):
        notes.append(
            f"warning: {data.path} is not what {folder} was trained on: files were added, removed or changed since then"
        )
    if isinstance(held, list) and held and not anew:
        if splits.held_out.get("ids") != held:
            every = replace(data, validation=NONE, holdout=0.0, fold=None, subset=None, group=None)
            splits, left = _divided(opened.splits(every, *arguments), set(map(str, held)), data, run.seed)
            if not left and splits.test is None:
                raise DataError(
                    f"none of the {len(held):,} images that {folder} held out is left in {data.path}, and the others "
                    "may be those that it was trained on. Name images that it was not trained on"
                )
            notes.append(f"of the {len(held):,} images that {folder} held out, {left:,} are left: they are used")
    elif splits.held_out.get("ids") not in (None, held):
        notes.append(
            f"warning: the images held out of {data.path} may be training images of {folder}: they are divided "
            "otherwise than in its training, or its split.json is missing"
        )
    return splits, notes


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


def _divided(splits: Splits, held: set[str], data: Data, seed: int) -> tuple[Splits, int]:
    """Return splits whose validation images are the training images with the ids `held`, and the number of these."""
    import numpy as np

    from vitrail.data.item import Subset, ids
    from vitrail.data.split import subset

    is_held = np.array([name in held for name in ids(splits.train, np.arange(len(splits.train)))])
    rest, found = (Subset(splits.train, np.flatnonzero(rows)) for rows in (~is_held, is_held))
    rest = rest if data.subset is None else Subset(rest, subset(rest, data.subset, seed))
    return replace(splits, train=rest, validation=found if len(found) else None), len(found)
