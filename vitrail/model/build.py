"""From a config or a name to a network with fresh weights."""

from __future__ import annotations

from typing import Any

from vitrail.model.resnet.network import ResNet, build_resnet
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.model.vit import ViT


def build(config: ViTConfig | ResNetConfig) -> ViT | ResNet:
    """Return the network of a config, initialised."""
    return ViT(config) if isinstance(config, ViTConfig) else build_resnet(config)


def create(name: str, **overrides: Any) -> ViT | ResNet:
    """Return the network the papers call `name`: `create("B/16", classes=10)`; see `vitrail.model.variants.variant`."""
    return build(variant(name, **overrides))
