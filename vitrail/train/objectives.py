"""From a run's settings to its objective: learning from labels, or one of those that need none."""

from __future__ import annotations

from torch import nn

from vitrail.objective.base import Objective
from vitrail.objective.config import MaskedPatch
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.supervised import SupervisedObjective
from vitrail.train.resolve import Resolved


def build_objective(resolved: Resolved, model: nn.Module, classes: int) -> Objective:
    """Return the objective of a resolved run, which owns `model` as `build_model` gave it; `classes` are the data's.

    Raises UsageError where settings contradict each other or the model.
    """
    run, settings = resolved.run, resolved.run.objective
    if isinstance(settings, MaskedPatch):
        return MaskedPatchObjective(model, settings, run.seed)
    return SupervisedObjective(model, settings, run.augment, classes, run.seed)
