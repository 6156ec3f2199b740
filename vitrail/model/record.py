"""Record attention maps and block outputs of chosen layers and heads during a forward pass.

The model computes attention by the fastest path and never returns maps. `tap_attention` hooks the chosen attention
modules and computes their maps again from queries and keys. It passes each map on before the next one is computed,
so memory holds the maps of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.attention import Attention
from vitrail.model.block import AttentionBranch, AxialBlock, Block
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class AttentionMap:
    """Maps of one attention module: `maps` [batch, heads, tokens, tokens]; rows are queries and sum to 1.

    `branch` is the number of the branch in a parallel block. `axis` is "row" or "column" in an axial block (there
    the batch is images x rows, or images x columns), else None.
    """

    layer: int
    branch: int
    axis: str | None
    maps: Tensor


def attentions(model: ViT) -> Iterator[tuple[int, int, str | None, Attention]]:
    """Yield all attention modules of the encoder in the order in which they run: (layer, branch, axis, module)."""
    for layer, block in enumerate(model.blocks):
        parts: list[tuple[str | None, nn.Module]] = [(None, block)]
        if isinstance(block, AxialBlock):
            parts = [("row", block.row), ("column", block.column)]
        for axis, part in parts:
            assert isinstance(part, Block)
            for branch, attention in enumerate(part.attentions):
                assert isinstance(attention, AttentionBranch)
                yield layer, branch, axis, attention.attention


@contextmanager
def tap_attention(
    model: ViT,
    receive: Callable[[AttentionMap], None],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[None]:
    """Context in which every forward pass calls `receive` with the maps of these layers and heads.

    None means all; negative indices count from the end. To save memory, store only the values you need, not the map
    itself. Raises UsageError for a layer or head that does not exist.
    """
    wanted = _indices(layers, model.config.depth, "layer")
    chosen = None if heads is None else _indices(heads, model.config.heads, "head")
    handles = []
    for layer, branch, axis, attention in attentions(model):
        if layer not in wanted:
            continue

        def hook(
            module: nn.Module, inputs: tuple[Any, ...], *, where: tuple[int, int, str | None] = (layer, branch, axis)
        ) -> None:
            assert isinstance(module, Attention)
            x, bias, _ = inputs
            receive(AttentionMap(*where, module.maps(x, bias, chosen)))

        handles.append(attention.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attention_maps(
    model: ViT, images: Tensor, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> list[AttentionMap]:
    """Return the maps of these layers and heads for a batch of images, all in memory."""
    found: list[AttentionMap] = []
    with torch.no_grad(), tap_attention(model, found.append, layers, heads):
        model.features(images)
    return found


def block_outputs(model: ViT, images: Tensor, layers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """Return the output tokens [batch, prefix + grid, width] of these layers (before the final LayerNorm)."""
    outputs: dict[int, Tensor] = {}
    handles = []
    for layer in _indices(layers, model.config.depth, "layer"):

        def hook(module: nn.Module, inputs: Any, output: Tensor, *, where: int = layer) -> None:
            outputs[where] = output

        handles.append(model.blocks[layer].register_forward_hook(hook))
    try:
        with torch.no_grad():
            model.encode(model.embed(images), model.grid(images))  # all tokens of the last layer too
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _indices(chosen: Sequence[int] | None, count: int, what: str) -> list[int]:
    if chosen is None:
        return list(range(count))
    wrong = [index for index in chosen if not -count <= index < count]
    if wrong:
        raise UsageError(f"no {what} {wrong[0]}: this model has {count}, numbered 0 to {count - 1}")
    return [index % count for index in chosen]
