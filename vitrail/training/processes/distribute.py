"""What is applied to the single-device model from outside, in this order:

1. activation checkpointing, on each block: what is recomputed must be inside what is compiled;
2. torch.compile, on each block: blocks that differ only in their weights share one compiled graph;
3. several threads, each with micro-batches of its own (`training.processes.threads`); or several processes, whose
   gradients are summed while they are computed; or, with `Run.shard`, FSDP2 on each block and on the objective
   (`training.processes.sharding`). Communication stays outside of what is recomputed.

The names in the model's state_dict stay the same: a checkpoint does not depend on how it was trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vitrail import world
from vitrail.model.vit import ViT
from vitrail.objective.base import Objective
from vitrail.training.processes.parallel import Parallel, Replicated, Sharded, SingleProcess
from vitrail.training.processes.sharding import GatheredCopy, sharded
from vitrail.training.run import Run

GRAPHS = 8
"""Graphs that each block may have."""


def prepare(model: nn.Module, run: Run) -> None:
    """Apply activation checkpointing and compilation to `model`, in place, as `run` asks for.

    A network without encoder blocks (a ResNet) is treated as one block.
    """
    blocks = checkpointed_parts(model)
    if run.compile:
        # stochastic depth and relative positions make each block a graph of its own, several with other shapes and in
        # evaluation; torch leaves all after the first 8 uncompiled
        config: Any = torch.compiler.config
        config.recompile_limit = max(config.recompile_limit, GRAPHS * len(blocks))
    for block in blocks:
        if run.activation_checkpointing:
            block.recompute = True
        if run.compile:
            block.compile()


def checkpointed_parts(model: Any) -> list[Any]:
    """Return the modules that are prepared one by one: the encoder blocks of a ViT, or else the whole network."""
    return list(model.blocks) if isinstance(model, ViT) else [model]


def distribute(objective: Objective, run: Run) -> Parallel:
    """Return `objective`, which is on its device, prepared and distributed over the processes of the run."""
    if sharded(run):
        whole = GatheredCopy(objective)
        prepare(objective.model, run)
        return Sharded(objective, whole)
    prepare(objective.model, run)
    return Replicated(objective) if world.size() > 1 else SingleProcess(objective)
