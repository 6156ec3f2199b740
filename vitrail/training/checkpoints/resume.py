"""Resuming a run: its settings as they were decided, and its weights where they are now."""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import from_yaml, plain
from vitrail.errors import CheckpointError, WeightsError
from vitrail.training.checkpoints.state import differing
from vitrail.training.folder import RunFolder
from vitrail.training.python_objects import PythonObjects
from vitrail.training.run import LORA, Run
from vitrail.weights.base import BaseWeights
from vitrail.weights.load import local
from vitrail.weights.store import WEIGHTS


def resumed_run(run: Run, folder: RunFolder, objects: PythonObjects) -> tuple[Run, str | None]:
    """Return the run to continue in `folder`, and the weights it is built from (`starting_weights`).

    Raises WeightsError if only a part of the network is trained and its base model cannot be found, UsageError if the
    run needs objects that were not `given`, CheckpointError if it has another network or prepares images otherwise.
    """
    objects.check_resume(folder)
    recorded = from_yaml(folder.path / "config.yaml", Run())
    run = relocated(inherit(run, recorded), recorded, folder)
    _check_kept(run, recorded, folder)
    return run, starting_weights(run, recorded, folder)


def _check_kept(run: Run, recorded: Run, folder: RunFolder) -> None:
    """Raise CheckpointError for settings that a checkpoint does not compare, and that a resumed run cannot change.

    The network of a run from weights is theirs, whatever name is given. Images that are prepared otherwise would be
    measured otherwise than the best model, whose card says how.
    """
    kept = {"preprocess": recorded.preprocess is not None, "model": run.weights is not None and run.model is not None}
    differences = [
        line
        for name, compared in kept.items()
        if compared
        for line in differing(plain(getattr(recorded, name)), plain(getattr(run, name)), name)
    ]
    if differences:
        raise CheckpointError(
            f"the run in {folder.path} has other settings, which a resumed run keeps:\n  "
            + "\n  ".join(differences)
            + "\nRemove them, or start a new run from its weights (--from)."
        )


def inherit(run: Run, recorded: Run) -> Run:
    """Return `run` with its automatic settings as in `recorded`: a resumed run decides nothing again."""
    automatic = ("image_size", "preprocess", "batch_size", "accumulate", "precision", "workers", "cache")
    decided = {name: getattr(recorded, name) for name in (*automatic, *LORA) if getattr(run, name) in (None, "auto")}
    return replace(run, **decided)


def relocated(run: Run, recorded: Run, folder: RunFolder) -> Run:
    """Return `run` with the present place of its base model as weights: the run folder or the base may have moved.

    `recorded` is the run in the folder's config.yaml. If `run` names other weights, these are used, so that `--from`
    can give the new place. Raises WeightsError if the base is in none of the recorded places.
    """
    noted = folder.facts().get("base")
    if recorded.tune == "all" or noted is None or run.weights != recorded.weights:
        return run
    return replace(run, weights=BaseWeights.read(noted, folder.path / "run.json").located(folder.path))


def starting_weights(run: Run, recorded: Run, folder: RunFolder) -> str | None:
    """Return the weights that a resumed run is built from, before its checkpoint replaces all of them.

    These are `run.weights`. If they are gone and the whole network is trained, the folder's newest model takes their
    place, so that a resumed run needs only its folder and its data. `recorded` is the run in the folder's config.yaml;
    weights that differ from its own are returned as they are.
    """
    own = folder.last
    if run.weights is None or run.tune != "all" or run.weights != recorded.weights or not (own / WEIGHTS).is_file():
        return run.weights
    try:
        local(run.weights)
    except WeightsError:
        return str(own)
    return run.weights
