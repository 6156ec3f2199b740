"""Blocks of inference copies (`vitrail.model.build.freeze`): they do once what does not depend on the image.

A trained network repeats work in every call that only training needs. Frozen blocks remove it, in four ways:

1. Folding. The scale of the queries, the scale and shift of a norm, and LayerScale are multiplied into the weights
   of the dense layers next to them (`vitrail.model.fast.wide` does this).
2. Packing, on a CPU only. oneDNN stores a weight matrix in its own layout; without `Packed` it would convert the
   matrix in every call. The residual is added, and the GELU applied, inside the matrix product.
3. Joining. The branches of a parallel block become one wide branch, in bfloat16 and on a GPU. In float32 on a CPU
   they stay separate, because wider activations do not fit into the cache.
4. Rounding. All values are folded in the type of the model first, then rounded once to `dtype`.

On a GPU a network without parallel branches keeps its blocks. With `portable`, folding and joining happen everywhere
and packing nowhere, for export to other runtimes.

`freeze_blocks` at the end of the file replaces each `Block` of a ViT by a `FrozenBlock`: `FrozenAttention`s, then
`FrozenMLP`s, whose dense layers are all `Packed` or all `Plain`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.block import MLP, Block, SwiGLU, swiglu
from vitrail.model.fast.attention import attend_all, attend_first
from vitrail.model.fast.layers import on_onednn
from vitrail.model.fast.wide import ForBranches, Wide, can_join, wide_attention, wide_mlp
from vitrail.model.layers import LayerNorm
from vitrail.model.native import Grids
from vitrail.model.posemb import AtLayer, Bias, Grid, Positions, Queried
from vitrail.torch_private import onednn_linear, onednn_linear_add, onednn_linear_gelu, onednn_pack


class Packed(nn.Module):
    """A dense layer whose weight [out, in] is stored in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = onednn_pack(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the weight in the common layout: oneDNN's own can be neither pickled nor copied."""
        return {**self.__dict__, "weight": self.weight.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "weight": onednn_pack(state["weight"])})

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return onednn_linear(x, self.weight, self.bias)

    def with_gelu(self, x: Tensor, approximate: str) -> Tensor:
        """Return the GELU of the layer applied to x [..., in], in one pass."""
        return onednn_linear_gelu(x, self.weight, self.bias, approximate)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [..., out] + the layer applied to x [..., in], in one pass."""
        return onednn_linear_add(x, residual, self.weight, self.bias)


class Plain(nn.Module):
    """A dense layer that calls `F.linear`, for GPUs and for export."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            weight.detach().clone(), requires_grad=False
        )  # a copy: often a slice of a larger tensor
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)

    def with_gelu(self, x: Tensor, approximate: str) -> Tensor:
        """Return the GELU of the layer applied to x [..., in]."""
        return F.gelu(self(x), approximate=approximate)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [..., out] + the layer applied to x [..., in]."""
        return residual + self(x)


Layer = type[Packed] | type[Plain]


class FrozenAttention(nn.Module):
    """One or more attention branches as one. In the `last` layer, only the tokens that the head reads send queries."""

    def __init__(self, wide: Wide, heads: int, layer: Layer, last: bool) -> None:
        super().__init__()
        self.heads = heads
        width = len(wide.inner.weight) // 3
        self.qkv = None if last else layer(*wide.inner)
        self.query = layer(*(tensor[:width] for tensor in wide.inner)) if last else None
        self.key_value = layer(*(tensor[width:] for tensor in wide.inner)) if last else None
        self.out = layer(wide.outer.weight, wide.outer.bias.sum(0))

    def forward(self, x: Tensor, normed: Tensor, bias: Bias, num_queries: int | None) -> Tensor:
        """Return x [batch, tokens or num_queries, width] + the attention of normed [batch, tokens, width]."""
        if self.qkv is not None:
            mixed = attend_all(self.qkv(normed), self.heads, bias)
            # the last layer of a network for masks, which has all tokens to read, when its features are asked for
            return self.out.added_to(x, mixed if num_queries is None else mixed[:, :num_queries].contiguous())
        assert self.query is not None and self.key_value is not None
        mixed = attend_first(self.query(normed[:, :num_queries]), self.key_value(normed), self.heads, bias)
        return self.out.added_to(x, mixed)


class FrozenMLP(nn.Module):
    """One or more MLP branches as one."""

    def __init__(self, wide: Wide, mlp: MLP | SwiGLU, layer: Layer) -> None:
        super().__init__()
        self.fc1, self.fc2 = layer(*wide.inner), layer(wide.outer.weight, wide.outer.bias.sum(0))
        self.activate: Callable[[Tensor], Tensor] = mlp.act if isinstance(mlp, MLP) else swiglu

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return x [batch, tokens, width] + the MLP of normed, which has the same shape."""
        if isinstance(self.activate, nn.GELU):
            hidden = self.fc1.with_gelu(normed, self.activate.approximate)
        else:
            hidden = self.activate(self.fc1(normed))
        return self.fc2.added_to(x, hidden)


class FrozenBlock(nn.Module):
    """A `Block` whose norms only normalise; their scales and shifts, and LayerScale, are in the dense layers.

    With `together`, its branches are computed as one.
    """

    def __init__(
        self, block: Block, positions: Positions, dtype: torch.dtype, layer: Layer, *, last: bool, together: bool
    ) -> None:
        super().__init__()
        attentions: list[Any] = list(block.attentions)
        mlps: list[Any] = list(block.mlps)
        self.layer, self._positions = block.layer, (positions,)
        self.branches = len(attentions) if together else 1
        width, eps = attentions[0].attention.qkv.in_features, attentions[0].norm.eps
        self.norm = LayerNorm(width, eps=eps, elementwise_affine=False)
        heads = self.branches * attentions[0].attention.heads
        self.attentions, self.mlps = nn.ModuleList(), nn.ModuleList()
        for at in range(0, len(attentions), self.branches):  # folded in the model's type, then rounded
            wide = wide_attention(attentions[at : at + self.branches]).to(dtype)
            self.attentions.append(FrozenAttention(wide, heads, layer, last))
        for at in range(0, len(mlps), self.branches):
            wide = wide_mlp(mlps[at : at + self.branches]).to(dtype)
            self.mlps.append(FrozenMLP(wide, mlps[at].mlp, layer))

    def forward(
        self,
        x: Tensor,
        places: Tensor | None = None,
        grid: Grid | Grids | Queried | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """See `Block.forward`."""
        bias: Bias = AtLayer(self._positions[0], self.layer, places, grid)
        if self.branches > 1:
            bias = ForBranches(bias, self.branches)
        normed, x = self.norm(x), x[:, :num_queries].contiguous()
        for attention in self.attentions:
            x = attention(x, normed, bias, num_queries)
        normed = self.norm(x)
        for mlp in self.mlps:
            x = mlp(x, normed)
        return x


def freeze_blocks(model: Any, frozen: Any, dtype: torch.dtype, *, portable: bool) -> None:
    """Replace the blocks of `frozen`, a copy of the `ViT` `model` in `dtype`, by `FrozenBlock`s where that is faster.

    Axial blocks, and blocks with layers that are not plain (hooks, LoRA, quantisation), stay. With `portable`, the
    blocks have only torch's own layers.
    """
    if frozen.config.block == "axial":
        return
    packed = on_onednn(frozen.like, dtype) and not portable
    # packed, only bfloat16 joins; not packed, export and a GPU do
    joins = dtype == torch.bfloat16 if packed else portable or frozen.like.device.type != "cpu"
    together = joins and frozen.config.branches > 1
    if not (packed or together or portable):
        return
    last = len(frozen.blocks) - 1 if frozen.pool.reads and not frozen.config.segmentation else None
    for index, block in enumerate(model.blocks):
        if not can_join(frozen.blocks[index]):  # only calling its layers computes what they compute
            continue
        frozen.blocks[index] = FrozenBlock(
            block, frozen.positions, dtype, Packed if packed else Plain, last=index == last, together=together
        )
