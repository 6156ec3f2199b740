"""Layer-wise decay of the learning rate: the nearer a parameter is to the image, the slower it learns.

A parameter's rate is lr * decay ** (layers + 1 - depth), as in the fine-tuning of BEiT (Bao et al. 2022) and MAE (He
et al. 2022, table 9). The stem, tokens and positions have depth 0. Block i, counted from 0, has depth i + 1.
Everything after the blocks has depth layers + 1 and learns at lr. Decoupled weight decay is scaled in the same way.

Published code differs in two places. Here both are as in BEiT and MAE, because the published results belong to that:

* The final norm learns with the head. timm's `param_groups_layer_decay` counts it as part of the last block.
* Positions that all layers share (`place` "shared") have no depth of their own and learn at lr, as BEiT's shared
  table does. timm counts them as part of the patch embedding.

The branches of a parallel block and the two halves of an axial block have their block's depth. A stem of many stages,
such as a hybrid's ResNet, has depth 0 as a whole. Positions with a table for each layer are one parameter here; each
layer's table has that layer's depth (`slow_rows`). Parts of an objective besides the network (decoder, projection,
classifier of tokens) learn at lr. The [mask] embedding, which replaces patch embeddings, has depth 0.
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

EMBEDDING = ("stem", "cls", "dist", "registers", "patch_norm", "pre_norm")
"""Parts of a `ViT` that have depth 0, positions aside."""

Factors = Mapping[nn.Parameter, tuple[float, ...]]


def layer_factors(module: nn.Module, decay: float) -> dict[nn.Parameter, tuple[float, ...]]:
    """Return the factor of the learning rate for each parameter of `module`; the largest is 1.

    `module` is a ViT, or an objective that owns one as `model`. A parameter has one factor, or one for each row if its
    rows belong to different layers. Raises UsageError for a network without encoder blocks.
    """
    encoder = module if isinstance(module, ViT) else getattr(module, "model", module)
    if not isinstance(encoder, ViT):
        raise UsageError(
            f"optim.layer_decay is {decay}, but it needs the blocks of a Vision Transformer, and a "
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
    """Return the depth of a table of positions, or of each of its rows."""
    positions, layers = encoder.positions, len(encoder.blocks)
    if positions.config.place == "shared":
        return [layers + 1]
    if positions.at_input and not isinstance(positions, Relative | RelativeBias):
        return [0]
    return list(range(1, layers + 1))


def by_factor(parameters: Iterable[nn.Parameter], factors: Factors) -> dict[float, list[nn.Parameter]]:
    """Return {factor: parameters}, smallest first; without `factors` all have factor 1.

    A parameter whose rows have different factors has the largest of them.
    """
    found: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(max(factors.get(parameter, (1.0,))), []).append(parameter)
    return dict(sorted(found.items()))


def slow_rows(optimizer: torch.optim.Optimizer, factors: Factors) -> None:
    """Let every step of `optimizer`, grouped `by_factor`, move each row of a parameter by the row's own factor.

    Parameters with several factors are tables of positions, which have no weight decay and no trust ratio, and which
    Muon leaves to AdamW. There the steps of AdamW, SGD and LAMB are proportional to the learning rate, value by value.
    So each row moves by its share of the step at the fastest row's rate.
    """
    several = [parameter for parameter, values in factors.items() if len(values) > 1 and parameter.requires_grad]
    rows = {parameter: _shares(parameter, factors[parameter]) for parameter in several}
    if not rows:
        return
    before: dict[nn.Parameter, Tensor] = {}

    def note(*_: Any) -> None:
        before.update({parameter: world.local(parameter).detach().clone() for parameter in rows})

    @torch.no_grad()
    def shorten(*_: Any) -> None:
        for parameter, start in before.items():
            moved = world.local(parameter).detach()
            moved.copy_(start.lerp(moved, rows[parameter]))

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(shorten)


def _shares(parameter: nn.Parameter, factors: tuple[float, ...]) -> Tensor:
    """Return the factor of each row in this process divided by the largest factor, in a shape that broadcasts."""
    here = world.local(parameter)
    shares = torch.tensor(factors, dtype=here.dtype, device=here.device) / max(factors)
    if world.is_sharded(parameter):  # FSDP2 splits as `chunk` does; the last processes may have no rows
        pieces = shares.chunk(world.size())
        shares = pieces[world.rank()] if world.rank() < len(pieces) else shares[:0]
    return shares.view(-1, *[1] * (parameter.dim() - 1))
