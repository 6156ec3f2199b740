"""Regroup sequential blocks into parallel branches, or back: `regroup(model, branches)` (follow-up, section 3.2).

The follow-up turns pairs, or triples, of sequential blocks into parallel ones. This changes neither parameters nor
FLOPs. With 2 branches, blocks 1, 2 | 3, 4 | ... become the branches of layers 1, 2, ..., and back.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from vitrail.errors import UsageError
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT

_BRANCH = re.compile(r"blocks\.(\d+)\.(attentions|mlps)\.(\d+)\.(.+)")


def regroup(model: ViT, branches: int) -> ViT:
    """Return a copy of `model` with the same blocks in layers of `branches` branches; 1 makes it sequential.

    All weights and their order are unchanged. To regroup and to regroup back gives the same network to the bit. But the
    network computes another function: sequential blocks see the outputs of all earlier ones, while parallel branches
    see the same input. Stochastic depth is the config's for the new depth. The copy has the model's training mode and
    device, but no card, because the accuracy in the card is that of another function.

    Raises UsageError for axial blocks, for a number of blocks that `branches` does not divide, and for positions with a
    table for every layer, because their number would change.
    """
    config = regrouped(model.config, branches)
    with torch.device(model.like.device):
        other = ViT(config).to(model.like.dtype)
    names = {name: _moved(name, model.config.branches, branches) for name in model.state_dict()}
    other.load_state_dict({names[name]: tensor for name, tensor in model.state_dict().items()})
    learning = {names[name]: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(learning[name])
    return other.train(model.training)


def regrouped(config: ViTConfig, branches: int) -> ViTConfig:
    """Return the config of the same blocks in layers of `branches`; raises UsageError as `regroup` does."""
    if not isinstance(config, ViTConfig):
        raise UsageError("a ResNet has no encoder blocks to regroup; give a Vision Transformer")
    if config.block == "axial":
        raise UsageError("axial blocks attend along rows, then columns: they cannot become parallel branches")
    blocks = config.depth * config.branches
    if branches < 1 or blocks % branches:
        valid = ", ".join(str(count) for count in range(1, blocks + 1) if blocks % count == 0)
        raise UsageError(f"{blocks} blocks cannot be grouped into layers of {branches} branches; valid: {valid}")
    block = "parallel" if branches > 1 else "sequential"
    changed = replace(config, depth=blocks // branches, branches=branches, block=block)  # type: ignore[arg-type]
    if config.origin.rotary and config.origin.rotary.frequencies == "mixed" and changed.depth != config.depth:
        raise UsageError("mixed rotary frequencies are those of one layer each: such a network cannot be regrouped")
    if config.positions not in ("none", "sincos") and changed.position_tables != config.position_tables:
        raise UsageError(
            f"{config.positions} positions (place {config.place!r}) have a table for each of {config.depth} layers, "
            f"and there would be {blocks // branches} layers: only models with shared tables, or with positions at the "
            "input, can be regrouped"
        )
    return changed


def _moved(name: str, before: int, after: int) -> str:
    """Return the name of a block's tensor after regrouping from `before` to `after` branches."""
    if not (match := _BRANCH.fullmatch(name)):
        return name
    layer, kind, branch, rest = match.groups()
    layer, branch = divmod(int(layer) * before + int(branch), after)
    return f"blocks.{layer}.{kind}.{branch}.{rest}"
