"""From a run's settings to its objective: learning from labels, or one of those that need none."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vitrail.objective.base import Objective
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.config import DINO, MAE, BEiT, MaskedPatch, Tokenizer
from vitrail.objective.dino import DINOObjective
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.supervised import SupervisedObjective
from vitrail.objective.tokenizer import ImageTokenizer, TokenizerObjective, load_tokenizer
from vitrail.train.resolve import Resolved
from vitrail.train.run import Run
from vitrail.weights.archive import open_archive
from vitrail.weights.load import local
from vitrail.weights.store import is_ours


def build_objective(resolved: Resolved, model: nn.Module, classes: int) -> Objective:
    """Return the objective of a resolved run, which owns `model` as `build_model` gave it; `classes` are the data's.

    What the weights started from hold besides the network goes on training, too; `resolved.decisions` says so.
    Raises UsageError where settings contradict each other or the model.
    """
    run, settings = resolved.run, resolved.run.objective
    if isinstance(settings, MaskedPatch):
        return MaskedPatchObjective(model, settings, run.seed)
    if isinstance(settings, MAE):
        mae = MAEObjective(model, settings, run.seed)
        resolved.decisions.update(_continued(run, mae.load_decoder))
        return mae
    if isinstance(settings, BEiT):
        beit = BEiTObjective(model, settings, run.seed, load_tokenizer(settings.tokenizer))
        resolved.decisions.update(_continued(run, beit.load_mask))
        return beit
    if isinstance(settings, DINO):
        if run.weights is not None:
            resolved.decisions["pre-training"] = "student and teacher start from the weights, their projections afresh"
        cubic = resolved.preprocess.interpolation == "bicubic"
        return DINOObjective(model, settings, run.seed, flip=run.augment.flip, cubic=cubic)
    if isinstance(settings, Tokenizer):
        assert isinstance(model, ImageTokenizer)
        return TokenizerObjective(model)
    return SupervisedObjective(model, settings, run.augment, classes, run.seed)


def _continued(run: Run, load: Callable[..., list[str]]) -> dict[str, str]:
    """Let the objective take what it owns besides the encoder from foreign weights; returns the decisions."""
    if run.weights is None:
        return {}
    path = local(run.weights)
    if is_ours(path):
        return {"pre-training": "vitrail's model folders hold the encoder alone; what predicts starts afresh"}
    with open_archive(path) as archive:
        tensors = {name: archive[name] for name in archive.names if "decoder" in name or "mask_token" in name}
        return {"pre-training": "; ".join(load(tensors))}
