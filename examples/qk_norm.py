"""An attention of one's own: `vitrail train digits --vit.attention qk_norm:QKNorm`.

It shows how an attention is replaced. The same norms are built in, too: `vitrail.create("S/16", qk_norm="head")`.
"""

from dataclasses import dataclass

import torch
from torch import nn

from vitrail import OwnPart
from vitrail.model.attention import Attention
from vitrail.ranges import Positive


class NormedAttention(Attention):
    """Attention with a LayerNorm on queries and keys, which keeps the logits small (Dehghani et al. 2023, ViT-22B)."""

    def project(self, x):
        """Return scaled queries, keys and values [batch, tokens, 3 * width]."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key = self.norm_query(query) * query.shape[-1] ** -0.5, self.norm_key(key)
        return torch.stack([query, key, value.to(query.dtype)], dim=-3).flatten(-3)


@dataclass(frozen=True)
class QKNorm(OwnPart):
    """Attention with normalised queries and keys."""

    eps: Positive = 1e-6
    """Constant under the root of the norms."""

    def build(self, config):
        """Return the attention of one block."""
        attention, features = NormedAttention(config.width, config.heads), config.width // config.heads
        attention.norm_query, attention.norm_key = (nn.LayerNorm(features, eps=self.eps) for _ in range(2))
        return attention
