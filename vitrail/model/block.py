"""Encoder blocks: MSA and MLP with pre-norm residuals (Eq. 2, 3), sequential, parallel, or axial."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitrail.model.attention import Attention, Bias
from vitrail.model.layers import LayerNorm, Linear
from vitrail.model.posemb import Grid, Positions
from vitrail.model.recompute import recomputable
from vitrail.model.variants import ViTConfig


class MLP(nn.Module):
    """Two dense layers with GELU between them; dropout after both (appendix B.1)."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, gelu: str = "erf") -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.approximate = "tanh" if gelu == "tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        hidden = self.fc1(x)
        if self.training and self.dropout.p:
            return self.dropout(self.fc2(self.dropout(F.gelu(hidden, approximate=self.approximate))))
        return self.fc2.after_gelu(hidden, self.approximate)


class SwiGLU(nn.Module):
    """Gated MLP: half of the first layer's features multiply the other half, as gates.

    Shazeer, "GLU Variants Improve Transformer"; DINOv2's giant. `hidden` features are left after the product.
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(width, 2 * hidden)
        self.fc2 = Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        return self.dropout(self.fc2(self.dropout(swiglu(self.fc1(x)))))


def swiglu(hidden: Tensor) -> Tensor:
    """Return silu(gate) * value, [..., 2 * features] -> [..., features]; the gate comes first."""
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


class Residual(nn.Module):
    """Dropout, LayerScale and stochastic depth of a branch, before it is added to the residual."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.gamma = None
        if config.layer_scale is not None:
            self.gamma = nn.Parameter(torch.full((config.width,), float(config.layer_scale)))

    def forward(self, branch: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        if self.gamma is not None:
            branch = branch * self.gamma
        alive = self.alive(branch)
        return branch if alive is None else branch * alive.to(branch.dtype)

    def alive(self, x: Tensor) -> Tensor | None:
        """Return the factors of stochastic depth for each image of x, [batch, 1, 1]; None: nothing is dropped."""
        if not (self.training and self.drop_path):
            return None
        keep = 1 - self.drop_path
        return torch.empty(len(x), 1, 1, device=x.device).bernoulli_(keep) / keep


class AttentionBranch(nn.Module):
    """LN, MSA, dropout: the branch of Eq. 2."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config.width, config.heads)
        self.dropout = nn.Dropout(config.dropout)
        self.residual = Residual(config, drop_path)

    def forward(self, x: Tensor, bias: Bias | None = None, read: int | None = None) -> Tensor:
        """Return the values to add to x [batch, tokens, width], or to its first `read` tokens."""
        return self.residual(self.dropout(self.attention(self.norm(x), bias, read)))


class MLPBranch(nn.Module):
    """LN, MLP: the branch of Eq. 3."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        if config.mlp == "swiglu":
            self.mlp: MLP | SwiGLU = SwiGLU(config.width, config.mlp_dim, config.dropout)
        else:
            self.mlp = MLP(config.width, config.mlp_dim, config.dropout, config.gelu)
        self.residual = Residual(config, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Return the values to add to x [batch, tokens, width]."""
        return self.residual(self.mlp(self.norm(x)))


class Block(nn.Module):
    """One encoder layer: attention branches summed, then MLP branches summed.

    One of each is the paper's block (Eq. 2, 3); n of each is the follow-up's parallel block (section 3), which
    has the parameters and the cost of n blocks in a row.
    """

    recompute = False
    """Whether the backward pass computes the block again instead of storing its activations."""

    def __init__(self, config: ViTConfig, layer: int, positions: Positions, drop_path: float) -> None:
        super().__init__()
        self.layer = layer
        self.attentions = nn.ModuleList(AttentionBranch(config, drop_path) for _ in range(config.branches))
        self.mlps = nn.ModuleList(MLPBranch(config, drop_path) for _ in range(config.branches))
        self._positions = (positions,)  # in a tuple, so that they are a submodule of the ViT only, not of each block

    def bias(self, places: Tensor, grid: Grid) -> Bias:
        """Return the function: queries -> values that this layer adds to the attention logits."""
        return partial(self._positions[0].logits, self.layer, places=places, grid=grid)

    @recomputable
    def forward(self, x: Tensor, places: Tensor, grid: Grid, read: int | None = None) -> Tensor:
        """x [batch, prefix + tokens, width], places: raster index of the grid's tokens.

        With `read`, only the first so many tokens come out (they attend to all): what the last layer owes to
        a class token.
        """
        bias = self.bias(places, grid)
        x = sum((branch(x, bias, read) for branch in self.attentions), start=x[:, :read])
        return sum((branch(x) for branch in self.mlps), start=x)


class AxialBlock(nn.Module):
    """Row attention and MLP, then column attention and MLP (appendix D.6)."""

    recompute = False
    """See `Block`."""

    def __init__(self, config: ViTConfig, layer: int, positions: Positions, drop_path: float) -> None:
        super().__init__()
        self.row = Block(config, layer, positions, drop_path)
        self.column = Block(config, layer, positions, drop_path)

    @recomputable
    def forward(self, x: Tensor, places: Tensor, grid: Grid, read: int | None = None) -> Tensor:
        """x [batch, rows * columns, width]: all tokens of the grid, in raster order; `read` must be None."""
        rows, columns = grid
        x = rearrange(x, "b (h w) d -> (b h) w d", h=rows)
        x = self.row(x, places[:columns], grid)
        x = rearrange(x, "(b h) w d -> (b w) h d", h=rows)
        x = self.column(x, places[::columns], grid)
        return rearrange(x, "(b w) h d -> b (h w) d", w=columns)


def drop_path_rates(config: ViTConfig) -> list[float]:
    """Stochastic depth of each layer: rising linearly from 0, or the same everywhere (DeiT-III, follow-up)."""
    if config.drop_path_shape == "constant" or config.depth == 1:
        return [config.drop_path] * config.depth
    return [config.drop_path * layer / (config.depth - 1) for layer in range(config.depth)]


def build_blocks(config: ViTConfig, positions: Positions) -> nn.ModuleList:
    """Return the encoder's layers."""
    kind = AxialBlock if config.block == "axial" else Block
    return nn.ModuleList(kind(config, layer, positions, rate) for layer, rate in enumerate(drop_path_rates(config)))
