"""Small networks and batches for the tests of masked objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT

TRUE = torch.tensor(True)
"""A step that was finite, for `Objective.after_step`."""
SMALL = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=0)


@dataclass
class Images:
    images: Tensor
    labels: Tensor
    index: Tensor


def images(count: int = 4, side: int = 32, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, side, side), generator=rng, dtype=torch.uint8)


def batch(count: int = 4, side: int = 32, seed: int = 0) -> Images:
    return Images(images(count, side, seed), torch.zeros(count, dtype=torch.int64), 10 + torch.arange(count))


def vit(seed: int = 0, **changes: Any) -> ViT:
    torch.manual_seed(seed)
    return ViT(ViTConfig.of(**{**SMALL, **changes}))
