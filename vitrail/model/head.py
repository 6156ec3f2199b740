"""Pooling of tokens to one feature vector, and the classifier: class token, mean or attention pooling (D.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.block import MLP
from vitrail.model.layers import LayerNorm, Linear
from vitrail.model.variants import ViTConfig


class ClassToken(nn.Module):
    """The output of the class token (Eq. 4), then of the distillation token. No other token is read."""

    def __init__(self, tokens: int = 1) -> None:
        super().__init__()
        self.reads: int | None = tokens

    def forward(self, tokens: Tensor, prefix: int) -> Tensor:
        """[batch, prefix + n, width] -> [batch, reads * width]"""
        return tokens[:, : self.reads].flatten(1)


class AveragePool(nn.Module):
    """Mean over the grid's tokens (D.3)."""

    reads: int | None = None

    def forward(self, tokens: Tensor, prefix: int) -> Tensor:
        """[batch, prefix + n, width] -> [batch, width]"""
        return tokens[:, prefix:].mean(dim=1)


class ClassTokenAndAverage(nn.Module):
    """The class token's output, then the mean over the grid's tokens (DINOv2's linear classifier)."""

    reads: int | None = None

    def forward(self, tokens: Tensor, prefix: int) -> Tensor:
        """[batch, prefix + n, width] -> [batch, 2 * width]"""
        return torch.cat([tokens[:, 0], tokens[:, prefix:].mean(dim=1)], dim=1)


class MAPHead(nn.Module):
    """Multi-head attention pooling (Scaling Vision Transformers): a learned probe attends to the grid's tokens."""

    reads: int | None = None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.query = Linear(config.width, config.width)
        self.key_value = Linear(config.width, 2 * config.width)
        self.out = Linear(config.width, config.width)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config.width, config.mlp_dim, gelu=config.gelu)

    def forward(self, tokens: Tensor, prefix: int) -> Tensor:
        """[batch, prefix + n, width] -> [batch, width]"""
        maps, value = self.weigh(tokens[:, prefix:])
        pooled = self.out((maps @ value).reshape(tokens.shape[0], -1))
        return pooled + self.mlp(self.norm(pooled))

    def weigh(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probe's maps [batch, heads, 1, n] over the grid's tokens [batch, n, width], and their values."""
        batch, _, width = grid.shape
        query = self.query(self.probe).view(1, 1, self.heads, -1).transpose(1, 2)
        key, value = self.key_value(grid).view(batch, -1, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return (query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1), value


Pooling = ClassToken | AveragePool | ClassTokenAndAverage | MAPHead


def build_pool(config: ViTConfig) -> Pooling:
    """Return the pooling of a config: (tokens, prefix) -> features.

    `reads` is how many of the first tokens it looks at; None: all.
    """
    if config.pool == "map":
        return MAPHead(config)
    if config.pool == "cls":
        return ClassToken(1 + config.distilled)
    return AveragePool() if config.pool == "gap" else ClassTokenAndAverage()


class PreLogits(nn.Module):
    """The tanh hidden layer of the pre-training head (section 3.1)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = Linear(width, hidden)

    def forward(self, features: Tensor) -> Tensor:
        """[batch, width] -> [batch, hidden]"""
        return torch.tanh(self.hidden(features))


def build_heads(
    config: ViTConfig, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[Linear | None, Linear | None]:
    """Return the classifier, and the distillation token's in a distilled model; None without classes."""
    inputs, classes = config.head_width, config.classes
    head = Linear(inputs, classes, device=device, dtype=dtype) if classes else None
    dist = Linear(inputs, classes, device=device, dtype=dtype) if classes and config.distilled else None
    return head, dist
