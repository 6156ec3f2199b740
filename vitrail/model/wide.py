"""The branches of a parallel block computed as one branch that is wider (follow-up, section 3.2).

n attentions of h heads that read the same tokens are one attention of n * h heads, and n MLPs are one MLP with n
times as many hidden features. What differs between their norms, a scale and a shift, goes into the projections behind
them; LayerScale goes into the layers it scales; and the sum over the branches is part of the last matrix product. So a
block of n branches takes as many matrix products, norms and additions as one of a single branch. Dropping a branch for
an image zeroes its part of what goes into that last product.

The weights stay those of the separate branches, so putting them together is work of every step: `freeze` does it once
and for all (`vitrail.model.frozen`). In training on a CPU it costs about what it saves, for wider activations leave the
cache (`python -m benchmarks.parallel` measures it, on a GPU too), so training does it only where `Run.wide_branches`
says so. Same results and gradients to rounding, same parameters, same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.attention import Bias, mix
from vitrail.model.block import MLP, Block, swiglu
from vitrail.model.layers import layer_norm, linear, linear_after_gelu
from vitrail.model.posemb import Grid
from vitrail.model.recompute import recomputable


class Dense(NamedTuple):
    """A dense layer: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor


class Wide(NamedTuple):
    """All branches of one kind as one: what goes in, behind a norm without scale and shift, and what comes out."""

    inner: Dense
    """qkv of all branches (all queries, already scaled, then all keys, then all values), or fc1."""
    outer: Dense
    """The output projections or fc2 of all branches: weight [width, branches * in], bias [branches, width]."""

    def to(self, dtype: torch.dtype) -> Wide:
        """All of it in another type."""
        inner, outer = (Dense(layer.weight.to(dtype), layer.bias.to(dtype)) for layer in self)
        return Wide(inner, outer)


def wide_attention(branches: Sequence[Any]) -> Wide:
    """The `AttentionBranch`es of a block as one; differentiable."""
    inner = [_behind(branch.norm, *branch.attention.scaled()) for branch in branches]
    outer = [_scaled(branch.attention.out, branch.residual.gamma) for branch in branches]
    return Wide(_side_by_side(inner, parts=3), _added_up(outer))


def wide_mlp(branches: Sequence[Any]) -> Wide:
    """The `MLPBranch`es of a block as one; differentiable. Of SwiGLU, all gates come before all values."""
    inner = [_behind(branch.norm, branch.mlp.fc1.weight, branch.mlp.fc1.bias) for branch in branches]
    outer = [_scaled(branch.mlp.fc2, branch.residual.gamma) for branch in branches]
    return Wide(_side_by_side(inner, parts=1 if isinstance(branches[0].mlp, MLP) else 2), _added_up(outer))


def _scaled(layer: nn.Linear, gamma: Tensor | None) -> Dense:
    """A layer whose output is multiplied by `gamma` [out]."""
    if gamma is None:
        return Dense(layer.weight, layer.bias)
    return Dense(layer.weight * gamma[:, None], layer.bias * gamma)


def _behind(norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> Dense:
    """A layer that takes over the scale and the shift of the norm in front of it."""
    return Dense(weight * norm.weight, weight @ norm.bias + bias)


def _side_by_side(layers: Sequence[Dense], parts: int) -> Dense:
    """Layers of the same input as one; the first of `parts` of the outputs of all come first."""
    return Dense(
        *(
            torch.cat([p for part in zip(*(t.chunk(parts) for t in tensors), strict=True) for p in part])
            for tensors in zip(*layers, strict=True)
        )
    )


def _added_up(layers: Sequence[Dense]) -> Dense:
    weights, biases = zip(*layers, strict=True)
    return Dense(torch.cat(weights, dim=1), torch.stack(biases))


def for_branches(bias: Bias, branches: int) -> Bias:
    """What is added to the logits of each branch's heads, for the heads of all of them."""

    def of_all(query: Tensor) -> Tensor | None:
        parts = [bias(part) for part in query.chunk(branches, dim=1)]
        present = [part for part in parts if part is not None]
        return torch.cat(present, dim=1) if present else None

    return of_all


def compute_together(model: nn.Module) -> None:
    """From now on compute the branches of every parallel block of `model` as one, in place.

    Names, parameters and state_dict stay as they are. A block whose parts somebody hooks (a tap, a wrapper), or that
    drops out features in training, still goes branch by branch.
    """
    for block in model.modules():
        if isinstance(block, Block) and len(block.attentions) > 1:
            block.forward = partial(_forward, block)  # type: ignore[method-assign]


@recomputable
def _forward(block: Block, x: Tensor, places: Tensor, grid: Grid, read: int | None = None) -> Tensor:
    """`Block.forward`."""
    if _apart(block):
        return unwrap(Block.forward)(block, x, places, grid, read)
    attentions: list[Any] = list(block.attentions)
    mlps: list[Any] = list(block.mlps)
    count, eps = len(attentions), attentions[0].norm.eps

    (weight, offset), out = wide_attention(attentions)
    bias = for_branches(block.bias(places, grid), count)
    normed = layer_norm(x, None, None, eps)
    mixed = mix(normed, weight, offset, count * attentions[0].attention.heads, bias, read)
    x = x[:, :read] + _summed(mixed, out, _alive(attentions, x))

    (weight, offset), out = wide_mlp(mlps)
    hidden = linear(layer_norm(x, None, None, eps), weight, offset)
    alive = _alive(mlps, x)
    mlp = mlps[0].mlp
    if not isinstance(mlp, MLP):
        return x + _summed(swiglu(hidden), out, alive)
    if alive is None:
        return x + linear_after_gelu(hidden, out.weight, out.bias.sum(0), mlp.approximate)
    return x + _summed(F.gelu(hidden, approximate=mlp.approximate), out, alive)


def _apart(block: Block) -> bool:
    """Must this block be computed branch by branch?"""
    parts = [part for branches in (block.attentions, block.mlps) for part in branches.modules()]
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in parts):
        return True
    return block.training and any(isinstance(part, nn.Dropout) and part.p for part in parts)


def _alive(branches: Sequence[Any], x: Tensor) -> Tensor | None:
    """Stochastic depth of each image and branch [batch, 1, branches, 1]; None: nothing is dropped."""
    drawn = [branch.residual.alive(x) for branch in branches]
    return None if drawn[0] is None else torch.stack(drawn, dim=2)


def _summed(x: Tensor, layer: Dense, alive: Tensor | None) -> Tensor:
    """The branches' sum [batch, tokens, width] of what goes into their last layers, [batch, tokens, branches * in]."""
    if alive is None:
        return linear(x, layer.weight, layer.bias.sum(0))
    branches = len(layer.bias)
    kept = (x.unflatten(-1, (branches, -1)) * alive.to(x.dtype)).flatten(2)
    biases = (layer.bias * alive[:, 0]).sum(1, keepdim=True)
    return linear(kept, layer.weight) + biases.to(x.dtype)
