"""Layer-wise decay of the learning rate: the nearer a parameter is to the image, the slower it learns.

A parameter's rate is lr * decay ** (layers + 1 - depth), as BEiT (Bao et al. 2022) and MAE (He et al. 2022, table 9)
fine-tune: depth 0 is what makes tokens, block i counted from 0 has depth i + 1, everything behind the blocks has
layers + 1 and learns at lr. Whatever else follows the learning rate, such as decoupled weight decay, follows this one.

Published code agrees but in two places, and this follows BEiT's and MAE's, whose figures belong to it:

* the final norm learns with the head; timm's `param_groups_layer_decay` counts it to the last block;
* positions that all layers share (`place` "shared") have no depth of their own and learn at lr, as BEiT's shared
  table does; timm counts that one to the patch embedding.

The branches of a parallel block and the two halves of an axial one have their block's depth; a stem of many stages, a
hybrid's ResNet included, is depth 0 as a whole. Positions with a table for each layer are one parameter here, of which
each layer's table has that layer's depth (`slow_rows`). What an objective owns besides the network (decoder,
projection, classifier of tokens) learns at lr; its [mask], which stands where patch embeddings would, has depth 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import world
from vitrail.errors import UsageError
from vitrail.model.posemb import Relative, RelativeBias
from vitrail.model.vit import ViT

EMBEDDING = ("stem", "cls", "dist", "registers")
"""Parts of a `ViT` that have depth 0, positions aside."""

Factors = Mapping[nn.Parameter, tuple[float, ...]]


def layer_factors(module: nn.Module, decay: float) -> dict[nn.Parameter, tuple[float, ...]]:
    """Return by what the learning rate of each parameter of `module` is multiplied, 1 the largest.

    `module` is a ViT or an objective that owns one as `model`. There is one factor for a parameter, or one for each of
    its rows, where these belong to different layers. Raises UsageError for a network without encoder blocks.
    """
    encoder = module if isinstance(module, ViT) else getattr(module, "model", module)
    if not isinstance(encoder, ViT):
        raise UsageError(
            f"optim.layer_decay is {decay}: it goes by the blocks of a Vision Transformer, and a "
            f"{type(encoder).__name__} has none: leave it out"
        )
    last = len(encoder.blocks) + 1
    depths = {parameter: [last] for parameter in module.parameters()}
    for name, parameter in encoder.named_parameters():
        part, _, rest = name.partition(".")
        if part in EMBEDDING:
            depths[parameter] = [0]
        elif part == "blocks":
            depths[parameter] = [int(rest.partition(".")[0]) + 1]
        elif part == "positions":
            depths[parameter] = _of_positions(encoder)
    if encoder is not module and isinstance(mask := getattr(module, "mask", None), nn.Parameter):
        depths[mask] = [0]
    return {parameter: tuple(decay ** (last - depth) for depth in depths[parameter]) for parameter in depths}


def _of_positions(encoder: ViT) -> list[int]:
    """The depth of a table of positions, or of each row of it."""
    positions, layers = encoder.positions, len(encoder.blocks)
    if positions.config.place == "shared":
        return [layers + 1]
    if positions.at_input and not isinstance(positions, Relative | RelativeBias):
        return [0]
    return list(range(1, layers + 1))


def by_factor(parameters: Iterable[nn.Parameter], factors: Factors) -> dict[float, list[nn.Parameter]]:
    """Return {factor: parameters}, smallest first; one whose rows differ is where the fastest of them is."""
    found: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(max(factors[parameter]), []).append(parameter)
    return dict(sorted(found.items()))


def slow_rows(optimizer: torch.optim.Optimizer, factors: Factors) -> None:
    """Make every step of `optimizer`, grouped `by_factor`, move rows whose factors differ each by its own.

    AdamW's, SGD's and LAMB's steps on such tables, which have no weight decay and no trust ratio, are proportional to
    the rate, value by value: so each row goes its share of the way that it would go at the fastest row's rate.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rows = {parameter: _shares(parameter, factors[parameter]) for parameter in held if len(factors[parameter]) > 1}
    if not rows:
        return
    before: dict[nn.Parameter, Tensor] = {}

    def note(*_: Any) -> None:
        before.update({parameter: world.local(parameter).detach().clone() for parameter in rows})

    @torch.no_grad()
    def shorten(*_: Any) -> None:
        while before:  # once: a step that calls the one it is derived from brings both hooks twice
            parameter, start = before.popitem()
            moved = world.local(parameter).detach()
            moved.copy_(start.lerp(moved, rows[parameter]))

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(shorten)


def _shares(parameter: nn.Parameter, factors: tuple[float, ...]) -> Tensor:
    """The factors of the rows that are in this process, over the largest, in the shape to go with them."""
    here = world.local(parameter)
    shares = torch.tensor(factors, dtype=here.dtype, device=here.device) / max(factors)
    if world.is_sharded(parameter):  # FSDP2 cuts as `chunk` does; the last processes may have nothing
        pieces = shares.chunk(world.size())
        shares = pieces[world.rank()] if world.rank() < len(pieces) else shares[:0]
    return shares.view(-1, *[1] * (parameter.dim() - 1))
