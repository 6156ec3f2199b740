"""Small networks whose attention is known, or far from uniform."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.model.attention import Attention
from vitrail.model.record import attentions
from vitrail.model.variants import Rotary, ViTConfig
from vitrail.model.vit import ViT

KINDS: list[dict[str, Any]] = [
    {},
    {"registers": 2},
    {"pool": "gap"},
    {"pool": "map", "registers": 1},
    {"pool": "map", "registers": 1, "pool_prefix": True, "pool_heads": 4},
    {"positions": "relative"},
    {"positions": "relative_bias"},
    {"distilled": True, "registers": 1},
    {"pool": "cls+gap"},
    {"pool": "gap", "class_token": True, "final_norm": "pooled"},
    {"block": "parallel", "branches": 2},
    {"block": "axial", "pool": "gap"},
    {"stem": "resnet", "stem_units": ()},
    {"positions": "none", "rotary": Rotary(coordinates="centred"), "registers": 1, "attention_norm": True},
]
"""Settings that change which maps there are or what is read of them."""


def tiny(**changes: Any) -> ViT:
    """A ViT of 3 layers for 12 x 16 pixels, with weights that make its maps differ."""
    torch.manual_seed(0)
    values: dict[str, Any] = dict(width=16, depth=3, heads=2, mlp_dim=32, patch=4, image_size=(12, 16), classes=3)
    model = ViT(ViTConfig.of(**{**values, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@torch.no_grad()
def uniform(model: ViT) -> ViT:
    """The model with queries of 0: each token attends to all alike, but for the bias of its positions."""
    for _, _, _, attention in attentions(model):
        width = attention.qkv.in_features
        attention.qkv.weight[:width] = 0
        attention.qkv.bias[:width] = 0
    return model


@torch.no_grad()
def identity(**changes: Any) -> ViT:
    """A model without class token whose tokens attend to themselves alone."""
    model = uniform(tiny(positions="relative_bias", pool="gap", **changes))
    rows, columns = model.config.grid
    table = model.positions.bias
    table.zero_()
    table[:, (rows - 1) * (2 * columns - 1) + columns - 1] = 1e4  # the offset of nothing down, nothing across
    return model


@contextmanager
def maps_alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Within the block, the list gets the number of earlier maps that were still alive at each new one."""
    counts: list[int] = []
    made: list[weakref.ref[Tensor]] = []
    compute = Attention.maps

    def counted(self: Attention, *args: Any, **keywords: Any) -> Tensor:
        counts.append(sum(reference() is not None for reference in made))
        maps = compute(self, *args, **keywords)
        made.append(weakref.ref(maps))
        return maps

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "maps", counted)
        yield counts
