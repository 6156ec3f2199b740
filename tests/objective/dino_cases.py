"""A small DINO, for the tests of what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from masked_cases import vit
from torch import Tensor

from vitrail.durations import Steps
from vitrail.objective.dino import DINOObjective
from vitrail.objective.settings import DINO

TINY = DINO(outputs=24, hidden=32, bottleneck=12, local_crops=3, local_size=0.5, freeze_last_layer=Steps(0))
BALANCED = replace(TINY, centring="sinkhorn", student_temperature=0.07, teacher_temperature=(0.025, 0.025))


def make(seed: int = 0, config: DINO = TINY, **changes: Any) -> DINOObjective:
    """With a teacher that is not its student, and a centre."""
    ours = DINOObjective(vit(**changes), config, seed)
    torch.manual_seed(1)
    with torch.no_grad():
        for part in (ours.model, ours.teacher, ours.head, ours.teacher_head):
            for parameter in part.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        ours.centre.normal_(std=0.1)
    return ours.train()


def taught(ours: DINOObjective, prepared: Any) -> Tensor:
    near, _ = ours.crops(prepared)
    with torch.no_grad():
        return ours.teacher_head(ours.teacher.features(near.flatten(0, 1)))
