"""The networks of tests that are about files and not about networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig


def tiny(**changes: Any) -> ViTConfig:
    """A ViT of two blocks for images of 16 x 16 and three classes."""
    values = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=3)
    return ViTConfig.of(**{**values, **changes})


def fresh(config: ViTConfig | ResNetConfig) -> nn.Module:
    """The same random values at each call: heads and norms start at 0 and 1, nothing that could be mixed up."""
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()
