"""The output tokens of blocks, read by hooks: what the networks of other libraries are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.model.vit import ViT


def block_outputs(model: ViT, images: Tensor, layers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """Return the output tokens [batch, prefix + grid, width] of these layers (before the final LayerNorm)."""
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, output: found.append(output)) for block in model.blocks]
    with torch.no_grad():
        model.encode(model.embed(images), model.grid(images))  # all tokens of the last layer too
    for hook in hooks:
        hook.remove()
    return {layer % len(found): found[layer] for layer in (range(len(found)) if layers is None else layers)}
