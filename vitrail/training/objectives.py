"""Build the objective of a run from its settings, with or without labels."""

from __future__ import annotations

from torch import nn

from vitrail.objective.base import Objective
from vitrail.objective.beit.objective import BEiTObjective
from vitrail.objective.beit.tokenizer import ImageTokenizer, TokenizerObjective, load_tokenizer
from vitrail.objective.dino.objective import DINOObjective
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Tokenizer
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.checkpoints.objective_weights import load_objective_weights
from vitrail.training.resolve import Resolved


def build_objective(resolved: Resolved, model: nn.Module, classes: int) -> Objective:
    """Return the objective of a resolved run, which owns `model` as `build_model` gave it; `classes` are the data's.

    If the starting weights hold parts of the objective besides the network, these are loaded too, and noted in
    `resolved.decisions`.
    Raises UsageError where settings contradict each other or the model, and what `load_objective_weights` raises.
    """
    objective = _fresh(resolved, model, classes)
    if resolved.start == resolved.run.weights:  # else the run is resumed, and its checkpoint holds everything
        resolved.decisions.update(load_objective_weights(resolved.run, objective))
    return objective


def _fresh(resolved: Resolved, model: nn.Module, classes: int) -> Objective:
    run, settings = resolved.run, resolved.run.objective
    if isinstance(settings, MaskedPatch):
        return MaskedPatchObjective(model, settings, run.seed)
    if isinstance(settings, MAE):
        return MAEObjective(model, settings, run.seed)
    if isinstance(settings, BEiT):
        return BEiTObjective(model, settings, run.seed, load_tokenizer(settings.tokenizer))
    if isinstance(settings, DINO):
        cubic = resolved.preprocess.interpolation == "bicubic"
        return DINOObjective(model, settings, run.seed, flip=run.augment.flip, cubic=cubic)
    if isinstance(settings, Tokenizer):
        assert isinstance(model, ImageTokenizer)
        return TokenizerObjective(model)
    return SupervisedObjective(model, settings, run.augment, classes, run.seed)
