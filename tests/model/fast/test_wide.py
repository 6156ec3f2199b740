"""Branches computed as one compute what they compute one by one (`Block.forward`, written out in test_vit.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.model.build import build, freeze
from vitrail.model.compute import attention_path
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT

TINY = dict(
    width=32, depth=2, heads=2, mlp_dim=48, patch=8, image_size=32, classes=5, block="parallel", branches=2
)  # fmt: skip


def pair(**options: Any) -> tuple[ViT, nn.Module]:
    """The same network twice, branch by branch and joined; no parameter is a special value."""
    torch.manual_seed(0)
    apart = build(ViTConfig.of(**(TINY | options)))
    assert isinstance(apart, ViT)
    for parameter in apart.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    apart.double().eval()
    return apart, freeze(apart, torch.float64, portable=True)


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(branches=3, pool="gap"),
        dict(layer_scale=0.5, gelu="tanh"),
        dict(mlp="swiglu", pool="map"),
        dict(mlp="swiglu", layer_scale=0.5),
        dict(positions="relative"),
        dict(positions="relative_bias", pool="gap", class_token=True, branches=3),
        dict(registers=2, distilled=True, place="every"),
    ],
    ids=str,
)
@torch.no_grad()
def test_equal_to_the_branches_one_by_one(options: dict[str, Any], path: Any) -> None:
    apart, together = pair(**options)
    images = torch.randn(3, 3, 32, 40, dtype=torch.float64)
    with attention_path(path):
        expected, logits = apart(images), together(images)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    assert all(len(block.attentions) == 1 for block in together.blocks)  # type: ignore[union-attr]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return function(*args, **(kwargs or {}))


def test_three_branches_take_the_matrix_products_of_one() -> None:
    def count(model: nn.Module) -> int:
        with torch.no_grad(), Products() as products, attention_path("explicit"):
            model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
        return products.count

    apart, together = pair(branches=3, pool="gap")
    _, single = pair(branches=1, block="sequential", pool="gap")
    assert count(together) == count(single) < count(apart)
