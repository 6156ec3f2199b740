"""Loading the tensors that a self-supervised objective owns besides the network, when a run starts from weights.

Such tensors are the decoder, the [mask] embedding, the classifier of colours or codes, and DINO's projection heads and
teacher. Published weights may contain some of them. Model folders of vitrail contain only the network; the checkpoints
in a run folder contain everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vitrail.config import CLASS, plain
from vitrail.objective.base import Objective
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.mae import MAEObjective
from vitrail.training.checkpoints import checkpoint
from vitrail.training.run import Run
from vitrail.weights.archive import open_archive
from vitrail.weights.load import local
from vitrail.weights.store import is_ours

FRESH = "the prediction head starts fresh"
NETWORK = "model."
"""Prefix of the names of the network's tensors in an objective."""


def load_objective_weights(run: Run, objective: Objective) -> dict[str, str]:
    """Load the tensors that `objective` owns besides the network from the weights that `run` starts from.

    Returns a decision of the run that says what was loaded; {} if there is nothing to load. Raises WeightsError for a
    published decoder of another shape, CheckpointError for a run folder whose checkpoints are damaged.
    """
    owned = [name for name in objective.state_dict() if not name.startswith(NETWORK)]
    if run.weights is None or not owned:
        return {}
    path = local(run.weights)
    if (newest := checkpoint.latest_valid(path / "checkpoints")) is not None:
        return {"pre-training": _from_run(newest, run, objective, owned)}
    load = objective.load_decoder if isinstance(objective, MAEObjective) else None
    load = objective.load_mask if isinstance(objective, BEiTObjective) else load
    if is_ours(path):
        return {"pre-training": f"{FRESH}: a model folder contains only the network, a run folder contains everything"}
    if load is None:
        return {"pre-training": f"{FRESH}: published weights do not contain it"}
    with open_archive(path) as archive:
        tensors = {name: archive[name] for name in archive.names if "decoder" in name or "mask_token" in name}
        return {"pre-training": "; ".join(load(tensors))}


def _kind(settings: dict[str, Any]) -> str:
    """Return the kind of an objective, or the import path of one of the user's own, from its recorded settings."""
    return str(settings.get(CLASS) or settings.get("kind"))


def _from_run(newest: Path, run: Run, objective: Objective, owned: list[str]) -> str:
    """Load the tensors `owned` from a checkpoint, averaged ones if there are any, or none if they do not fit."""
    state = checkpoint.read(newest)
    average = state["average"]
    there = state["model"] | (average["mean"] | average["buffers"] if average["count"] else {})
    known, own = state["identity"], objective.state_dict()
    kind, folder = _kind(plain(run.objective)), newest.parent.parent
    if _kind(known["objective"]) != kind:
        return f"{FRESH}: {folder} was trained with objective {_kind(known['objective'])}, not {kind}"
    for name, value in objective.identity().items():
        if known.get(name) != value:
            return f"{FRESH}: {folder} has another {name}"
    for name in owned:
        if name not in there or there[name].shape != own[name].shape:
            shape = tuple(there[name].shape) if name in there else "missing"
            return f"{FRESH}: {name} is {shape} in {folder}, {tuple(own[name].shape)} here"
    with torch.no_grad():
        for name in owned:
            own[name].copy_(there[name])
    return f"the prediction head continues from {newest} ({len(owned)} tensors)"
