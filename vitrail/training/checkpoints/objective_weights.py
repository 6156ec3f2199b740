"""What goes on learning besides the network where a run without labels starts from weights.

That is what predicts: a decoder, the [mask] embedding, the classifier of colours or codes, DINO's projections and
teacher. Published weights may hold some of it. Of our own, model folders hold the network alone; a run folder also has
its checkpoints, which hold it all.
"""

from __future__ import annotations

from pathlib import Path

import torch

from vitrail.objective.base import Objective
from vitrail.objective.beit.objective import BEiTObjective
from vitrail.objective.mae import MAEObjective
from vitrail.training.checkpoints import checkpoint
from vitrail.training.run import Run
from vitrail.weights.archive import open_archive
from vitrail.weights.load import local
from vitrail.weights.store import is_ours

NETWORK = "model."
"""What the names of the network's tensors begin with in an objective."""


def load_objective_weights(run: Run, objective: Objective) -> dict[str, str]:
    """Let `objective` take from the weights that `run` starts from what it owns besides the network.

    Returns what was done as a decision of the run; {} where nothing could be. Raises WeightsError for a published
    decoder of another shape, CheckpointError for a run folder whose checkpoints are damaged.
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
        return {"pre-training": "what predicts is fresh: a model folder holds the network alone, a run folder all"}
    if load is None:
        return {"pre-training": "what predicts is fresh: of that nothing is published"}
    with open_archive(path) as archive:
        tensors = {name: archive[name] for name in archive.names if "decoder" in name or "mask_token" in name}
        return {"pre-training": "; ".join(load(tensors))}


def _from_run(newest: Path, run: Run, objective: Objective, owned: list[str]) -> str:
    """Take all that is owned from a checkpoint, averages where there are any, or nothing where it does not fit."""
    state = checkpoint.read(newest)
    average = state["average"]
    there = state["model"] | (average["mean"] | average["buffers"] if average["count"] else {})
    known, own = state["identity"], objective.state_dict()
    kind = run.objective.kind
    if known["objective"]["kind"] != kind:
        return f"what predicts is fresh: {newest.parent.parent} learned by {known['objective']['kind']}, not {kind}"
    for name, value in objective.identity().items():
        if known.get(name) != value:
            return f"what predicts is fresh: {newest.parent.parent} has another {name}"
    for name in owned:
        if name not in there or there[name].shape != own[name].shape:
            shape = tuple(there[name].shape) if name in there else "missing"
            return f"what predicts is fresh: {name} is {shape} in {newest.parent.parent}, {tuple(own[name].shape)} here"
    with torch.no_grad():
        for name in owned:
            own[name].copy_(there[name])
    return f"what predicts goes on, {len(owned)} tensors of {newest}"
