"""Compute the branches of a parallel block as one wider branch (follow-up, section 3.2).

n attentions of h heads with the same input are one attention of n * h heads, and n MLPs are one MLP with n times as
many hidden features. The scale and the shift of each branch's norm are folded into the projection that follows, and
LayerScale into the layer before it. The last matrix product also adds up the branches. So a block of n branches takes
as many matrix products, norms and additions as a block of one branch.

The model stores the weights of the separate branches; `freeze` joins them once (`vitrail study three-table4` measures
it). In training every step would have to join them, which costs about as much as it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.model.attention import Attention
from vitrail.model.block import MLP, AttentionBranch, Block, MLPBranch, Residual, SwiGLU
from vitrail.model.fast.attention import scaled
from vitrail.model.fast.layers import is_plain
from vitrail.model.layers import LayerNorm, QuickGELU
from vitrail.model.posemb import Bias, rotation_of
from vitrail.model.rotary import Rotation


class Dense(NamedTuple):
    """A dense layer: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor


class Wide(NamedTuple):
    """All branches of one kind as two dense layers, which follow a norm without scale and shift."""

    inner: Dense
    """qkv of all branches (all queries, already scaled, then all keys, then all values), or fc1."""
    outer: Dense
    """The output projections or fc2 of all branches: weight [width, branches * in], bias [branches, width]."""

    def to(self, dtype: torch.dtype) -> Wide:
        """Return both layers in another type."""
        inner, outer = (Dense(layer.weight.to(dtype), layer.bias.to(dtype)) for layer in self)
        return Wide(inner, outer)


def wide_attention(branches: Sequence[Any]) -> Wide:
    """Return the `AttentionBranch`es of a block as one."""
    inner = [_fold_norm(branch.norm, *scaled(branch.attention)) for branch in branches]
    outer = [_fold_gamma(branch.attention.out, branch.residual.gamma) for branch in branches]
    return Wide(_concatenate(inner, parts=3), _sum_of(outer))


def wide_mlp(branches: Sequence[Any]) -> Wide:
    """Return the `MLPBranch`es of a block as one. For SwiGLU, all gates come before all values."""
    inner = [_fold_norm(branch.norm, branch.mlp.fc1.weight, branch.mlp.fc1.bias) for branch in branches]
    outer = [_fold_gamma(branch.mlp.fc2, branch.residual.gamma) for branch in branches]
    return Wide(_concatenate(inner, parts=1 if isinstance(branches[0].mlp, MLP) else 2), _sum_of(outer))


def _fold_gamma(layer: nn.Linear, gamma: Tensor | None) -> Dense:
    """Return the layer with its output multiplied by `gamma` [out]."""
    if gamma is None:
        return Dense(layer.weight, layer.bias)
    return Dense(layer.weight * gamma[:, None], layer.bias * gamma)


def _fold_norm(norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> Dense:
    """Return a layer with the scale and the shift of the norm before it folded into its weight and bias."""
    return Dense(weight * norm.weight, weight @ norm.bias + bias)


def _concatenate(layers: Sequence[Dense], parts: int) -> Dense:
    """Return layers of the same input as one layer: first the first of `parts` parts of all outputs, then the next."""
    return Dense(
        *(
            torch.cat([p for part in zip(*(t.chunk(parts) for t in tensors), strict=True) for p in part])
            for tensors in zip(*layers, strict=True)
        )
    )


def _sum_of(layers: Sequence[Dense]) -> Dense:
    """Return layers of different inputs, whose outputs are added, as one layer; the biases stay apart."""
    weights, biases = zip(*layers, strict=True)
    return Dense(torch.cat(weights, dim=1), torch.stack(biases))


class ForBranches:
    """The attention bias for the heads of all branches, from the bias for one branch's heads."""

    def __init__(self, bias: Bias, branches: int) -> None:
        self.bias, self.branches = bias, branches

    def __call__(self, query: Tensor) -> Tensor | None:
        """See `Bias`."""
        parts = [self.bias(part) for part in query.chunk(self.branches, dim=1)]
        present = [part for part in parts if part is not None]
        return torch.cat(present, dim=1) if present else None

    def rotation(self) -> Rotation | None:
        """See `rotation_of`."""
        rotation = rotation_of(self.bias)
        return None if rotation is None else rotation.for_branches(self.branches)


_KINDS = (
    *(AttentionBranch, Attention, MLPBranch, MLP, SwiGLU, Residual),
    *(LayerNorm, nn.Linear, nn.Dropout, nn.GELU, QuickGELU, nn.SiLU),
)
"""Types of all modules in the branches of a block."""


def can_join(block: nn.Module) -> bool:
    """Return whether the branches may be computed from their parameters: all layers are plain and none drops out.

    Norms behind the branches cannot be folded into a layer, because LayerScale and the sum of the branches follow them.
    Norms inside of attentions and MLPs are not folded.
    """
    assert isinstance(block, Block)
    branches: list[Any] = [*block.attentions, *block.mlps]
    inner = [getattr(branch, "attention", getattr(branch, "mlp", None)) for branch in branches]
    if any(branch.norm_after or getattr(part, "norm", None) for branch, part in zip(branches, inner, strict=True)):
        return False
    parts = [part for branches in (block.attentions, block.mlps) for branch in branches for part in branch.modules()]
    if block.training and any(isinstance(part, nn.Dropout) and part.p for part in parts):
        return False
    if not all(type(part) in _KINDS and is_plain(part, type(part)) for part in parts):
        return False
    mlps: list[Any] = [branch.mlp for branch in block.mlps]
    acts = {(type(mlp), type(mlp.act), getattr(mlp.act, "approximate", "")) for mlp in mlps}
    return len(acts) == 1 and acts.pop()[:2] in ((MLP, nn.GELU), (MLP, QuickGELU), (SwiGLU, nn.SiLU))
