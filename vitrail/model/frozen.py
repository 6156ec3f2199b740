"""A network that will not learn any more, laid out for speed: `freeze(model)`.

On a CPU every weight matrix is packed once the way oneDNN wants it (it would otherwise be packed again in every
call), the scale of the queries is folded into their projection, and residuals are added inside the matrix
product that makes them. On other devices freezing is eval mode in the type asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.attention import Attention, Bias, attend, attend_first
from vitrail.model.block import MLP, AttentionBranch, Block, MLPBranch, swiglu
from vitrail.model.layers import on_onednn
from vitrail.model.posemb import Grid
from vitrail.model.vit import ViT


class Packed(nn.Module):
    """A dense layer whose weight [out, in] is in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [..., out] + the layer applied to x [..., in], in one pass."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class FrozenAttention(nn.Module):
    """`Attention` up to its output projection, packed; in the last layer only the tokens that are read query."""

    def __init__(self, attention: Attention, last: bool) -> None:
        super().__init__()
        self.heads = attention.heads
        weight, bias = attention.scaled()
        width = attention.qkv.in_features
        self.qkv = None if last else Packed(weight, bias)
        self.query = Packed(weight[:width], bias[:width]) if last else None
        self.key_value = Packed(weight[width:], bias[width:]) if last else None

    def forward(self, x: Tensor, bias: Bias, read: int | None) -> Tensor:
        """What goes into the output projection, [batch, tokens or read, width]."""
        if self.qkv is not None:
            qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
            return attend(qkv, bias(qkv[:, :, 0].transpose(1, 2)))
        assert self.query is not None and self.key_value is not None
        return attend_first(self.query(x[:, :read]), self.key_value(x), self.heads, bias)


class FrozenBlock(nn.Module):
    """`Block` of one attention and one MLP; LayerScale is folded into the layers it scales."""

    def __init__(self, block: Block, last: bool) -> None:
        super().__init__()
        (attention,), (mlp,) = block.attentions, block.mlps
        assert isinstance(attention, AttentionBranch) and isinstance(mlp, MLPBranch)
        self.bias = block.bias
        self.attention_norm, self.mlp_norm = attention.norm, mlp.norm
        self.attention = FrozenAttention(attention.attention, last)
        self.out = Packed(*scaled(attention.attention.out, attention.residual.gamma))
        self.fc1 = Packed(mlp.mlp.fc1.weight, mlp.mlp.fc1.bias)
        self.fc2 = Packed(*scaled(mlp.mlp.fc2, mlp.residual.gamma))
        self.activate: Callable[[Tensor], Tensor] = swiglu
        if isinstance(mlp.mlp, MLP):
            self.activate = partial(F.gelu, approximate=mlp.mlp.approximate)

    def forward(self, x: Tensor, places: Tensor, grid: Grid, read: int | None = None) -> Tensor:
        """See `Block.forward`."""
        mixed = self.attention(self.attention_norm(x), self.bias(places, grid), read)
        x = self.out.added_to(x[:, :read].contiguous(), mixed)
        return self.fc2.added_to(x, self.activate(self.fc1(self.mlp_norm(x))))


def scaled(layer: nn.Linear, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer whose output is multiplied by `gamma` [out]."""
    if gamma is None:
        return layer.weight, layer.bias
    return layer.weight * gamma[:, None], layer.bias * gamma


@torch.no_grad()
def freeze(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a copy of a model for inference in `dtype`: images -> logits in that type.

    The same outputs to rounding; on a CPU 1.1 to 1.2 times as fast (B/16, batch 1 and 8). It cannot
    be trained, saved or tapped. ViTs with parallel or axial blocks, and ResNets, gain only the type.
    """
    frozen = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
    if not isinstance(frozen, ViT) or not on_onednn(frozen.norm.weight, dtype):
        return frozen
    if frozen.config.block == "sequential":
        last = len(frozen.blocks) - 1 if frozen.pool.reads else None
        for layer, block in enumerate(frozen.blocks):
            assert isinstance(block, Block)
            frozen.blocks[layer] = FrozenBlock(block, layer == last)
    return frozen
