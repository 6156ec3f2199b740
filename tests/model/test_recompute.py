"""Activation checkpointing as a property of modules: the same gradients and names, with the forward pass twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig

TINY: dict[str, Any] = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=3)
CONFIGS: dict[str, ViTConfig | ResNetConfig] = {
    "plain": ViTConfig.of(**TINY),
    "parallel": ViTConfig.of(**TINY, block="parallel", branches=2),
    "axial": ViTConfig.of(**TINY, block="axial", pool="gap", positions="relative"),
    "resnet": ResNetConfig(width=32, units=(1, 1), classes=3, image_size=(32, 32)),
}


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(images).square().sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputing_changes_neither_gradients_nor_names(name: str) -> None:
    torch.manual_seed(0)
    model: Any = build(CONFIGS[name])
    nn.init.normal_(model.head.weight)  # it starts at zero, and would give no gradient to the rest
    images = torch.randn(2, 3, *CONFIGS[name].image_size)
    parts = list(model.blocks) if hasattr(model, "blocks") else [model]
    names, calls = list(model.state_dict()), list[nn.Module]()
    for part in parts:
        first = next(module for module in part.modules() if not list(module.children()))
        first.register_forward_hook(lambda module, *_: calls.append(module))
    plain = gradients(model, images)
    calls.clear()
    model.set_grad_checkpointing()
    with torch.no_grad():
        model(images)
    once = len(calls)
    assert once  # without gradients there is nothing to recompute
    recomputed = gradients(model, images)
    assert len(calls) == 3 * once
    assert list(model.state_dict()) == names and recomputed.keys() == plain.keys()
    assert all(torch.equal(recomputed[key], plain[key]) for key in plain)
    calls.clear()
    model.set_grad_checkpointing(False)
    gradients(model, images)
    assert len(calls) == once
