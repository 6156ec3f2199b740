"""Small networks of every kind, with the card they would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.exports.write import Exported
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, Rotary, ViTConfig
from vitrail.weights.card import Card

Programs = Callable[..., Exported]
"""Name of a small network, kind of program, what else `export_model` takes -> the program in a folder."""
NAMES = ["ant", "bee", "cat", "dog", "elk"]
TINY: dict[str, Any] = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(12, 16), classes=len(NAMES))

VITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled, parallel": dict(
        **dict(depth=1, distilled=True, registers=1, block="parallel", branches=2, positions="relative"),
    ),
    "map, hmlp": dict(
        **dict(pool="map", pool_heads=4, pool_mlp_dim=12, pool_prefix=True),
        **dict(positions="2d", place="every", stem="hmlp", registers=1, gelu="tanh"),
    ),
    "BEiT": dict(depth=1, pool="gap", class_token=True, positions="relative_bias", final_norm="pooled"),
    "DINOv3": dict(
        **dict(depth=1, positions="none", rotary=Rotary(base=100.0, coordinates="centred", pairs="halves")),
        **dict(registers=2, key_bias=False, layer_scale=0.3),
    ),
    "axial, levit": dict(depth=1, block="axial", pool="gap", positions="relative", stem="levit", stem_norm="layer"),
    "hybrid, swiglu": dict(
        **dict(depth=1, stem="resnet", stem_units=(1,), image_size=(16, 24), pre_logits=8),
        **dict(pool="cls+gap", mlp="swiglu", positions="sincos", layer_scale=0.3),
    ),
}
RESNETS: dict[str, ResNetConfig] = {
    "BiT": ResNetConfig(units=(1, 1), width=8, classes=len(NAMES), image_size=(40, 24)),
    "AxialResNet": ResNetConfig(units=(0, 1), width=16, classes=len(NAMES), image_size=(36, 20), axial=True),
}
ALL = [*VITS, *RESNETS]


def config(name: str) -> ViTConfig | ResNetConfig:
    return RESNETS[name] if name in RESNETS else ViTConfig.of(**{**TINY, **VITS[name]})


def made(name: str = "plain", **changes: Any) -> Any:
    """A network whose outputs depend on the image, with a card."""
    torch.manual_seed(0)
    wanted = replace(config(name), **changes)
    model: Any = build(wanted)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.0, std=0.3)
    preprocess = Preprocess(wanted.image_size, crop=0.8)
    model.card = Card(wanted, list(NAMES) if wanted.classes else [], preprocess, licence="mit")
    return model.eval()
