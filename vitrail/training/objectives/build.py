"""Building the objective of a run from its settings, with or without labels."""

from __future__ import annotations

import numpy as np
from torch import nn

from vitrail.data.labels.numbers import Numbers
from vitrail.data.labels.sets import Labels, LabelSets, class_counts
from vitrail.data.loading.sampler import places_per_class
from vitrail.errors import UsageError
from vitrail.objective.base import Objective, Task
from vitrail.objective.self_supervised import SelfSupervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.checkpoints.objective_weights import load_objective_weights
from vitrail.training.given import Losses
from vitrail.training.resolve import Resolved
from vitrail.words import shown


def build_objective(
    resolved: Resolved,
    model: nn.Module,
    classes: int,
    losses: Losses | None = None,
    labels: Labels | None = None,
) -> Objective:
    """Return the objective of a resolved run. It owns `model`, which `build_model` returned.

    classes: Number of classes of the data. losses: A function in place of the loss of the settings. labels: Those of
    the training images, for settings that need the number of images of each class. If the starting weights
    contain parts of the objective besides the network, these are loaded too, and noted in `resolved.decisions`. Raises
    UsageError if settings contradict each other or the model, and what `load_objective_weights` raises.
    """
    run = resolved.run
    if isinstance(labels, LabelSets | Numbers):
        counts = class_counts(labels, classes)
    else:
        counts = np.empty(0) if labels is None else places_per_class(labels, classes, run.data.sampler)
    objective = run.objective.build(
        model, Task(run.seed, classes, run.augment, resolved.preprocess, tuple(counts.tolist()), resolved.scale)
    )
    needed = Objective if run.supervised else SelfSupervised
    if not isinstance(objective, needed):
        raise UsageError(
            f"{type(run.objective).__name__}.build returned {shown(objective)}; it must return a {needed.__name__} "
            f"({needed.__module__}), because labels is {run.supervised}"
        )
    if losses is not None and isinstance(objective, SupervisedObjective):
        objective.losses = losses
    if resolved.start == run.weights:  # otherwise the run is resumed, and its checkpoint contains everything
        resolved.decisions.update(load_objective_weights(run, objective))
    return objective
