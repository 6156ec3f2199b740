"""Pooling of tokens to one feature vector, and the classifier: class token, mean or attention pooling (D.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.block import MLP
from vitrail.model.layers import dense, new_linear, new_norm, zero_linear
from vitrail.model.native import Grids
from vitrail.model.own_part import build_part
from vitrail.model.queries import Queries
from vitrail.model.segmentation import LayeredPixels, LinearPixels, PixelHead
from vitrail.model.variants import ViTConfig


class ClassToken(nn.Module):
    """The output of the class token (Eq. 4), then of the distillation token. No other token is read."""

    def __init__(self, tokens: int = 1) -> None:
        super().__init__()
        self.reads: int | None = tokens

    def forward(self, tokens: Tensor, prefix: int, grids: Grids | None = None) -> Tensor:
        """[batch, prefix + n, width] -> [batch, reads * width]"""
        return tokens[:, : self.reads].flatten(1)


class AveragePool(nn.Module):
    """Mean over the grid's tokens (D.3)."""

    reads: int | None = None

    def forward(self, tokens: Tensor, prefix: int, grids: Grids | None = None) -> Tensor:
        """[batch, prefix + n, width] -> [batch, width]; the empty tokens of strips do not count."""
        if grids is None:
            return tokens[:, prefix:].mean(dim=1)
        filled = grids.filled()[:, :, None].to(tokens.dtype)
        return (tokens[:, prefix:] * filled).sum(1) / filled.sum(1)


class ClassTokenAndAverage(nn.Module):
    """The class token's output, then the mean over the grid's tokens (DINOv2's linear classifier)."""

    reads: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragePool()

    def forward(self, tokens: Tensor, prefix: int, grids: Grids | None = None) -> Tensor:
        """[batch, prefix + n, width] -> [batch, 2 * width]"""
        return torch.cat([tokens[:, 0], self.average(tokens, prefix, grids)], dim=1)


class MAPHead(nn.Module):
    """Multi-head attention pooling (Scaling Vision Transformers): a learned probe attends to the grid's tokens.

    With `config.pool_prefix` it attends to the tokens in front, too. With pool "probe" the probe itself is the query,
    and no MLP follows (AIMv2).
    """

    reads: int | None = None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads, self.reads_prefix = config.origin.pool_heads or config.heads, config.origin.pool_prefix
        self.probe = nn.Parameter(torch.zeros(1, 1, config.width))
        whole = config.pool == "map"
        self.query: nn.Module = new_linear(config.width, config.width) if whole else nn.Identity()
        self.key_value = new_linear(config.width, 2 * config.width)
        self.out = new_linear(config.width, config.width)
        self.norm = new_norm(config.origin, config.width) if whole else None
        hidden = config.origin.pool_mlp_dim or config.mlp_dim
        self.mlp = MLP(config.width, hidden, gelu=config.origin.gelu) if whole else None

    def forward(self, tokens: Tensor, prefix: int, grids: Grids | None = None) -> Tensor:
        """[batch, prefix + n, width] -> [batch, width]; the probe does not see the empty tokens of strips."""
        first = self.first(prefix)
        unseen = None if grids is None else grids.mask(prefix - first, tokens)
        maps, value = self.weigh(tokens[:, first:], unseen)
        pooled = dense(self.out, (maps @ value).reshape(tokens.shape[0], -1))
        return pooled if self.mlp is None or self.norm is None else pooled + self.mlp(self.norm(pooled))

    def first(self, prefix: int) -> int:
        """Return the number of the first token to which the probe attends, if `prefix` tokens precede the grid's."""
        return 0 if self.reads_prefix else prefix

    def weigh(self, tokens: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the probe's maps [batch, heads, 1, n] over tokens [batch, n, width], and the values of the tokens.

        `added` [batch, 1, 1, n] is added to the logits.
        """
        batch, _, width = tokens.shape
        query = dense(self.query, self.probe).view(1, 1, self.heads, -1).transpose(1, 2)
        both = dense(self.key_value, tokens).view(batch, -1, 2, self.heads, width // self.heads)
        key, value = both.permute(2, 0, 3, 1, 4)
        logits = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        return (logits if added is None else logits + added).softmax(-1), value


Pooling = ClassToken | AveragePool | ClassTokenAndAverage | MAPHead


def build_pool(config: ViTConfig) -> Pooling:
    """Return the pooling of a config: (tokens, prefix) -> features.

    Its attribute `reads` is the number of tokens at the front that it reads; None means all tokens.
    """
    if config.pool in ("map", "probe"):
        return MAPHead(config)
    if config.pool == "cls":
        return ClassToken(1 + config.origin.distilled)
    return AveragePool() if config.pool == "gap" else ClassTokenAndAverage()


class PreLogits(nn.Module):
    """The tanh hidden layer of the pre-training head (section 3.1)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = new_linear(width, hidden)

    def forward(self, features: Tensor) -> Tensor:
        """[batch, width] -> [batch, hidden]"""
        return torch.tanh(dense(self.hidden, features))


PIXEL_HEADS: dict[str, type[PixelHead]] = {"linear": LinearPixels, "layers": LayeredPixels, "queries": Queries}
"""`ViTConfig.segmentation` -> head."""


def build_heads(config: ViTConfig, like: Tensor | None = None) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the classifier and, in a distilled model, the distillation token's classifier. Linear ones start at zero.

    They have the device and the type of `like`. Without classes there are none.
    """
    if not config.classes:
        return None, None
    if config.segmentation:
        head = PIXEL_HEADS[config.segmentation](config)
        return head if like is None else head.to(like.device, like.dtype), None
    return _build_head(config, like), _build_head(config, like) if config.origin.distilled else None


def _build_head(config: ViTConfig, like: Tensor | None) -> nn.Module:
    if config.head is None:
        return zero_linear(config.head_width, config.classes, like)
    head: nn.Module = build_part(config.head, config, {}, nn.Module, ("features",))
    return head if like is None else head.to(like.device, like.dtype)
