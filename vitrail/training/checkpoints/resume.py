"""A run that goes on: its settings as they were decided, and its weights where they are now."""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import from_yaml
from vitrail.errors import WeightsError
from vitrail.training.folder import RunFolder
from vitrail.training.run import Run
from vitrail.weights.base import Base
from vitrail.weights.load import local
from vitrail.weights.store import WEIGHTS


def resumed_run(run: Run, folder: RunFolder) -> tuple[Run, str | None]:
    """Return `run` as it goes on in its folder, and where its first tensors are (`start_of`).

    Raises WeightsError where the weights of a run of which only a part learns are gone.
    """
    recorded = from_yaml(folder.path / "config.yaml", Run())
    run = relocated(inherit(run, recorded), recorded, folder)
    return run, start_of(run, recorded, folder)


def inherit(run: Run, recorded: Run) -> Run:
    """Return `run` with what it leaves open decided as in `recorded`: a resumed run decides nothing anew."""
    automatic = ("image_size", "preprocess", "batch_size", "accumulate", "precision", "workers", "cache")
    left_open = {name: getattr(recorded, name) for name in automatic if getattr(run, name) in (None, "auto")}
    return replace(run, **left_open)


def relocated(run: Run, recorded: Run, folder: RunFolder) -> Run:
    """Return a run to go on with that starts from its base where that is now: the run, or both, may have moved.

    `recorded` is the run as its folder has it; other weights in `run` are taken as they are, so that `--from` can
    say where the base has gone. Raises WeightsError where the base is in none of the places it was noted at.
    """
    noted = folder.read_json("run.json").get("base")
    if recorded.tune == "all" or noted is None or run.weights != recorded.weights:
        return run
    return replace(run, weights=Base.read(noted, folder.path / "run.json").located(folder.path))


def start_of(run: Run, recorded: Run, folder: RunFolder) -> str | None:
    """Return where a run to go on has its first tensors from, all of which its checkpoint is going to replace.

    That is `run.weights`, or, where these are gone and all of the network learns, the newest model of its own: besides
    its data it needs no more than its folder. `recorded` is the run as its folder has it: weights that it did not have
    are for `load` to find, or to miss.
    """
    own = folder.last
    if run.weights is None or run.tune != "all" or run.weights != recorded.weights or not (own / WEIGHTS).is_file():
        return run.weights
    try:
        local(run.weights)
    except WeightsError:
        return str(own)
    return run.weights
