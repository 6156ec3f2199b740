"""A network in a sentence: the papers' name where it has one, its sizes, and what else differs from the paper's ViT."""

from __future__ import annotations

from dataclasses import fields

from torch import nn

from vitrail.model.variants import NAMES, ResNetConfig, ViTConfig, variant

_SIZES = ("width", "depth", "heads", "mlp_dim", "patch")
_FIXED = (*_SIZES, "stem", "stem_units", "block", "branches", "axial", "units")
"""What a name of the papers fixes."""
_ELSEWHERE = ("image_size", "channels", "classes", "mean", "std", "resize_mode", "drop_path_shape", "std_conv")
"""Said apart, or no part of what the network is."""


def architecture(config: ViTConfig | ResNetConfig) -> str:
    """Return "ViT B/16 (width 768, depth 12, 12 heads, MLP 3072, patch 16), 224 x 224 pixels, 1000 classes"."""
    name = _name(config)
    height, width = config.image_size
    size = f"{height} x {width} pixels" + (f", {config.classes} classes" if config.classes else ", no classifier")
    if isinstance(config, ResNetConfig):
        stages = "-".join(map(str, config.units))
        return f"{f'ResNet {name}'.strip()} (stages {stages}, width {config.width}), {size}"
    heads = f"{config.heads} heads" if config.heads > 1 else "1 head"
    shape = f"width {config.width}, depth {config.depth}, {heads}, MLP {config.mlp_dim}, patch {config.patch}"
    said = (*_ELSEWHERE, *(_FIXED if name else _SIZES))
    default = ViTConfig()
    other = [
        f"{field.name} {getattr(config, field.name)}"
        for field in fields(config)
        if field.name not in said and getattr(config, field.name) != getattr(default, field.name)
    ]
    return ", ".join([f"{f'ViT {name}'.strip()} ({shape})", size, *other])


def parameters(model: nn.Module) -> int:
    """Return the number of a network's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _name(config: ViTConfig | ResNetConfig) -> str:
    """The papers' name of a network of these sizes; "" where it has none."""
    for name in NAMES:
        known = variant(name)
        if type(known) is type(config):
            same = {part: getattr(known, part) for part in _FIXED if hasattr(known, part)}
            if all(getattr(config, part) == value for part, value in same.items()):
                return name
    return ""
