"""Encoder blocks: MSA and MLP with pre-norm residuals (Eq. 2, 3), sequential, parallel, or axial.

z'_l = MSA(LN(z_{l-1})) + z_{l-1}     (2)  AttentionBranch, added by Block
z_l  = MLP(LN(z'_l)) + z'_l           (3)  MLPBranch, added by Block

`Residual` holds what a branch may have before it is added: LayerScale and stochastic depth.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitrail.model.attention import Attention, QKNorm
from vitrail.model.compute import HAS_FAST, recomputable
from vitrail.model.layers import (
    Constants,
    dense,
    dense_after_gelu,
    device_of_constants,
    new_gelu,
    new_linear,
    new_norm,
)
from vitrail.model.native import Grids
from vitrail.model.own_part import build_part
from vitrail.model.posemb import AtLayer, Bias, Grid, Positions, Queried
from vitrail.model.variants import ViTConfig
from vitrail.torch_private import mark_dynamic

GRAPHS = 64
"""Graphs that compiled blocks may have together, a few for each network of a run; a progressive run needs 8."""

if HAS_FAST:
    from vitrail.model.fast import layers as fast


class MLP(nn.Module):
    """Two dense layers with GELU between them; dropout after both (appendix B.1)."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, gelu: str = "erf") -> None:
        super().__init__()
        self.fc1 = new_linear(width, hidden)
        self.fc2 = new_linear(hidden, width)
        self.act = new_gelu(gelu)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        hidden = dense(self.fc1, x)
        if HAS_FAST and fast.joins_gelu(self.act, self.dropout):
            return dense_after_gelu(self.fc2, hidden, self.act.approximate)  # type: ignore[arg-type]
        return self.dropout(dense(self.fc2, self.dropout(self.act(hidden))))


class SwiGLU(nn.Module):
    """Gated MLP: half of the first layer's features multiply the other half, as gates.

    Shazeer, "GLU Variants Improve Transformer"; DINOv2's giant. `hidden` features are left after the product. EVA-02's
    larger models have a `norm` there.
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1 = new_linear(width, 2 * hidden)
        self.fc2 = new_linear(hidden, width)
        self.act: nn.Module = nn.SiLU()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        hidden = self.dropout(swiglu(dense(self.fc1, x), self.act))
        return self.dropout(dense(self.fc2, hidden if self.norm is None else self.norm(hidden)))


def swiglu(hidden: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Return act(gate) * value, [..., 2 * features] -> [..., features]; the gate comes first."""
    gate, value = hidden.chunk(2, dim=-1)
    return act(gate) * value


class Residual(Constants):
    """LayerScale and stochastic depth of a branch, before it is added to the residual."""

    kept: Tensor
    """1 - `drop_path`, which torch.compile reads: a number would make a graph of each layer."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__(kept=torch.tensor(1 - drop_path, device=device_of_constants()))
        self.drop_path, self.drops = drop_path, config.drop_path > 0
        self.gamma = None
        if config.layer_scale is not None:
            self.gamma = nn.Parameter(torch.full((config.width,), float(config.layer_scale)))

    def forward(self, branch: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        if self.gamma is not None:
            branch = branch * self.gamma  # LayerScale
        if self.training and (self.drops if torch.compiler.is_compiling() else self.drop_path):
            branch = branch * self._factors(branch).to(branch.dtype)
        return branch

    def _factors(self, branch: Tensor) -> Tensor:
        """Stochastic depth: return the factor of each image [batch, 1, 1], which keeps its branch or loses it."""
        factors = torch.empty(len(branch), 1, 1, device=branch.device)
        if torch.compiler.is_compiling():
            return (factors.uniform_() < self.kept) / self.kept
        keep = 1 - self.drop_path
        return factors.bernoulli_(keep) / keep


class AttentionBranch(nn.Module):
    """LN, MSA, dropout: the branch of Eq. 2. With `config.norm_after` the LN comes last."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm = new_norm(config.origin, config.width)
        self.norm_after = config.origin.norm_after
        self.attention = build_attention(config)
        self.dropout = nn.Dropout(config.dropout)
        self.residual = Residual(config, drop_path)

    def forward(self, x: Tensor, bias: Bias | None = None, num_queries: int | None = None) -> Tensor:
        """Return the values to add to x [batch, tokens, width], or to its first `num_queries` tokens."""
        if self.norm_after:
            return self.residual(self.norm(self.dropout(self.attention(x, bias, num_queries))))
        return self.residual(self.dropout(self.attention(self.norm(x), bias, num_queries)))


class MLPBranch(nn.Module):
    """LN, MLP: the branch of Eq. 3. With `config.norm_after` the LN comes last."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm = new_norm(config.origin, config.width)
        self.norm_after = config.origin.norm_after
        if config.origin.mlp == "swiglu":
            norm = new_norm(config.origin, config.mlp_dim) if config.origin.mlp_norm else None
            self.mlp: MLP | SwiGLU = SwiGLU(config.width, config.mlp_dim, config.dropout, norm)
        else:
            self.mlp = MLP(config.width, config.mlp_dim, config.dropout, config.origin.gelu)
        self.residual = Residual(config, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values to add to x [batch, tokens, width]."""
        if self.norm_after:
            return self.residual(self.norm(self.mlp(x)))
        return self.residual(self.mlp(self.norm(x)))


class Block(nn.Module):
    """One encoder layer: attention branches summed, then MLP branches summed.

    One of each is the paper's block (Eq. 2, 3). n of each is the follow-up's parallel block (section 3), which has the
    parameters and the cost of n sequential blocks.
    """

    recompute = False
    """Whether the backward pass computes the block again instead of storing its activations."""
    compiled = False
    """Whether torch.compile computes the block."""

    def __init__(self, config: ViTConfig, layer: int, positions: Positions, drop_path: float) -> None:
        super().__init__()
        self.layer = layer
        self.attentions = nn.ModuleList(AttentionBranch(config, drop_path) for _ in range(config.branches))
        self.mlps = nn.ModuleList(MLPBranch(config, drop_path) for _ in range(config.branches))
        self._positions = (positions,)  # in a tuple, so that they are a submodule of the ViT only, not of each block

    def bias(self, places: Any, grid: Any) -> Bias:
        """Return the function: queries -> values that this layer adds to the attention logits."""
        return AtLayer(self._positions[0], self.layer, places, grid)

    def forward(
        self,
        x: Tensor,
        places: Tensor | None = None,
        grid: Grid | Grids | Queried | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """x [batch, prefix + tokens, width] -> the same shape.

        `places` are the raster indices of the grid's tokens. Only positions that change the attention logits need them
        and the `grid`; strips and queries need theirs. With `num_queries`, only the first `num_queries` tokens are
        returned; they still attend to all. The last layer uses this.
        """
        needed = self._positions[0].reaches_attention or isinstance(grid, Grids | Queried)
        bias = self.bias(places, grid) if needed else None
        if not self.compiled:
            return _forward(self, x, bias, num_queries)
        mark_dynamic(x, 0)  # no size of a batch has a graph of its own
        return _compiled()(self, x, bias, num_queries)


@recomputable
def _forward(block: Block, x: Tensor, bias: Bias | None, num_queries: int | None) -> Tensor:
    """Eq. 2 and 3: the part of a block that does not read the number of its layer, so that all share one graph."""
    with fast.cast_together(block, x) if HAS_FAST and fast.joins_casts(x) else nullcontext():
        kept = x if num_queries is None else x[:, :num_queries]
        x = sum((msa(x, bias, num_queries) for msa in block.attentions), start=kept)  # Eq. 2
        return sum((mlp(x) for mlp in block.mlps), start=x)  # Eq. 3


@cache
def _compiled() -> Callable[..., Tensor]:
    """Return `_forward` compiled, once for all blocks of all networks; torch.compile takes a second to import."""
    return torch.compile(_forward, fullgraph=True)


def compile_blocks(module: nn.Module) -> bool:
    """Let torch.compile compute all blocks in `module`, in place, from the first call on. False if there are none."""
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    for block in blocks:
        block.compiled = True
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no GPU
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\._inductor")  # of its own code
    config: Any = torch.compiler.config  # at torch's limit of 8, one more kind of batch would end the run
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    return bool(blocks)


class AxialBlock(nn.Module):
    """Row attention and MLP, then column attention and MLP (appendix D.6)."""

    recompute = False
    """See `Block`."""

    def __init__(self, config: ViTConfig, layer: int, positions: Positions, drop_path: float) -> None:
        super().__init__()
        self.row = Block(config, layer, positions, drop_path)
        self.column = Block(config, layer, positions, drop_path)

    @recomputable
    def forward(self, x: Tensor, places: Tensor, grid: Grid, num_queries: int | None = None) -> Tensor:
        """x [batch, rows * columns, width], all tokens in raster order -> the same shape. `num_queries` is ignored."""
        rows, columns = grid
        x = rearrange(x, "b (h w) d -> (b h) w d", h=rows)
        x = self.row(x, places[:columns], grid)
        x = rearrange(x, "(b h) w d -> (b w) h d", h=rows)
        x = self.column(x, places[::columns], grid)
        return rearrange(x, "(b w) h d -> b (h w) d", w=columns)


def build_attention(config: ViTConfig) -> Attention:
    """Return the attention of a config, or a module of the user's own that is called in the same way."""
    if config.attention is None:
        key_bias, qk_norm = config.origin.key_bias, _qk_norm(config)
        norm = new_norm(config.origin, config.width) if config.origin.attention_norm else None
        return Attention(config.width, config.heads, key_bias=key_bias, norm=norm, qk_norm=qk_norm)
    attention: Attention = build_part(config.attention, config, {}, nn.Module, ("tokens", "bias", "num_queries"))
    return attention


def _qk_norm(config: ViTConfig) -> QKNorm | None:
    if config.origin.qk_norm == "none":
        return None
    head = config.width // config.heads
    features = head if config.origin.qk_norm == "head" else config.width
    query, key = (new_norm(config.origin, features) for _ in range(2))
    return QKNorm(query, key, features, head**-0.5)


def drop_path_rates(config: ViTConfig) -> list[float]:
    """Return the stochastic depth of each layer: linear from 0, or constant (DeiT-III, follow-up)."""
    if config.drop_path_shape == "constant" or config.depth == 1:
        return [config.drop_path] * config.depth
    return [config.drop_path * layer / (config.depth - 1) for layer in range(config.depth)]


def build_blocks(config: ViTConfig, positions: Positions) -> nn.ModuleList:
    """Return the encoder's layers."""
    kind = AxialBlock if config.block == "axial" else Block
    return nn.ModuleList(kind(config, layer, positions, rate) for layer, rate in enumerate(drop_path_rates(config)))
