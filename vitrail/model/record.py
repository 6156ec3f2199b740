"""Record attention maps of chosen layers and heads during a forward pass.

The model computes attention by the fastest path and never returns maps. `tap_attention` hooks the chosen attention
modules and computes their maps again from queries and keys. It passes each map on before the next one is computed,
so memory holds the maps of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError, finite
from vitrail.model.attention import Attention
from vitrail.model.block import AttentionBranch, AxialBlock, Block
from vitrail.model.vit import ViT
from vitrail.ranges import selected


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


def has_maps(model: ViT) -> bool:
    """Return whether all attention modules can show their maps; one of the user's own may lack a method `maps`."""
    return all(hasattr(attention, "maps") for *_, attention in attentions(model))


@contextmanager
def tap_attention(
    model: ViT,
    receive: Callable[[AttentionMap], None],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[None]:
    """Context in which every forward pass calls `receive` with the maps of these layers and heads.

    None means all; negative indices count from the end. To save memory, store only the values you need, not the map
    itself. Raises UsageError for a layer or head that does not exist, and the forward pass raises WeightsError for maps
    with NaN or infinity.
    """
    wanted = selected(layers, model.config.depth, "layer")
    chosen = None if heads is None else selected(heads, model.config.heads, "head")

    def hook(module: Any, inputs: tuple[Any, ...], *, where: tuple[int, int, str | None]) -> None:
        x, bias, _ = inputs
        maps = finite(module.maps(x, bias, chosen), f"attention in layer {where[0]}")
        receive(AttentionMap(*where, maps))

    with ExitStack() as hooks:
        for layer, branch, axis, attention in attentions(model):
            if layer in wanted and not hasattr(attention, "maps"):
                raise UsageError(f"{type(attention).__name__}, an attention of the user's own, has no method `maps`")
            if layer in wanted:
                where = (layer, branch, axis)
                hooks.enter_context(attention.register_forward_pre_hook(partial(hook, where=where)))
        yield


def attention_maps(
    model: ViT, images: Tensor, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> list[AttentionMap]:
    """Return the maps of these layers and heads for a batch of images, all in memory."""
    recorded: list[AttentionMap] = []
    with torch.no_grad(), tap_attention(model, recorded.append, layers, heads):
        model.features(images)
    return recorded
