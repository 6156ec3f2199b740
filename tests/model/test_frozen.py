"""A frozen copy computes what the model computes."""

from __future__ import annotations

import pytest
import torch

from vitrail.model.build import build
from vitrail.model.config import ViTConfig
from vitrail.model.frozen import FrozenBlock, freeze

TINY = dict(width=32, depth=3, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(pool="gap"),
        dict(pool="map", positions="sincos"),
        dict(registers=2, layer_scale=0.3),
        dict(positions="relative"),
        dict(positions="relative_bias"),
        dict(positions="relative_bias", pool="gap", class_token=True, final_norm="pooled"),
        dict(distilled=True),
        dict(pool="cls+gap", mlp="swiglu", layer_scale=0.3),
        dict(final_norm="pooled"),
        dict(place="every", gelu="tanh"),
        dict(block="parallel", branches=2),
        dict(block="axial", pool="gap"),
        dict(stem="hmlp"),
        dict(pre_logits=16),
    ],
)
def test_the_same_logits(options: dict) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig(**(TINY | options)))
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    images = torch.randint(0, 256, (3, 3, 32, 40), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(images)
        exact = freeze(model)(images)
        rounded = freeze(model, torch.bfloat16)(images)
    assert ((exact - expected).norm() / expected.norm()).item() < 1e-5
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - expected).norm() / expected.norm()).item() < 0.05
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_blocks_are_packed_where_that_pays() -> None:
    frozen = freeze(build(ViTConfig(**TINY)))
    assert all(isinstance(block, FrozenBlock) for block in frozen.blocks)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
