"""Regroup sequential blocks into parallel branches, or back: `regroup(model, branches)` (follow-up, section 3.2).

The follow-up reorganises the blocks of a sequential network by pairs, or by threes, into parallel ones, which changes
neither parameters nor FLOPs. Blocks 1, 2 | 3, 4 | ... in the order they run become branches 1, 2 of layers 1, 2, ...,
and back.
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

    Kept are the weights, one to one, the order of attentions and of MLPs, and what is outside of the blocks; there and
    back again gives the same network to the bit. Not kept is the function: in a row, an MLP sees what the attention
    before it and all earlier blocks added, side by side all branches see the same input. The two agree only where
    nothing comes between: no block's MLP, and no attention but the first of a layer, adds anything. The stochastic
    depth of a layer is what the config gives for the new depth. Training mode and device are the model's; its card is
    left behind, for what it says was measured was another function.

    Raises UsageError for axial blocks, a number of blocks that `branches` does not divide, and positions with a table
    for every layer, of which there would be another number.
    """
    config = regrouped(model.config, branches)
    with torch.device(model.norm.weight.device):
        other = ViT(config).to(model.norm.weight.dtype)
    names = {name: _moved(name, model.config.branches, branches) for name in model.state_dict()}
    other.load_state_dict({names[name]: tensor for name, tensor in model.state_dict().items()})
    learning = {names[name]: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(learning[name])
    return other.train(model.training)


def regrouped(config: ViTConfig, branches: int) -> ViTConfig:
    """Return the config of the same blocks in layers of `branches`; raises UsageError as `regroup` does."""
    if not isinstance(config, ViTConfig):
        raise UsageError("a ResNet has no encoder blocks to put side by side")
    if config.block == "axial":
        raise UsageError("axial blocks go along rows, then columns: they cannot stand side by side")
    blocks = config.depth * config.branches
    if branches < 1 or blocks % branches:
        valid = ", ".join(str(count) for count in range(1, blocks + 1) if blocks % count == 0)
        raise UsageError(f"{blocks} blocks do not make layers of {branches} branches; valid: {valid}")
    added = config.positions in ("1d", "2d") and config.place == "every"
    in_logits = config.positions in ("relative", "relative_bias") and config.place != "shared"
    if (added or in_logits) and branches != config.branches:
        raise UsageError(
            f"{config.positions} positions (place {config.place!r}) are a table for each of {config.depth} layers, and "
            f"there would be {blocks // branches} layers: only shared tables, or those at the input, can be kept"
        )
    block = "parallel" if branches > 1 else "sequential"
    return replace(config, depth=blocks // branches, branches=branches, block=block)  # type: ignore[arg-type]


def _moved(name: str, before: int, after: int) -> str:
    """Return the name of a block's tensor after regrouping from `before` to `after` branches."""
    if not (found := _BRANCH.fullmatch(name)):
        return name
    layer, kind, branch, rest = found.groups()
    layer, branch = divmod(int(layer) * before + int(branch), after)
    return f"blocks.{layer}.{kind}.{branch}.{rest}"
