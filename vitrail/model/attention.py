"""Multi-head self-attention (paper, appendix A): `Attention.forward` is Eq. 5-8.

[q, k, v] = z U_qkv                            (5)  Attention.project
A = softmax(q k^T / sqrt(D_h))                 (6)  Attention.forward, Attention.maps
SA(z) = A v                                    (7)  Attention.forward
MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa         (8)  Attention.forward

Queries are scaled by 1/sqrt(D_h) where they are made. Positions may add a `Bias` to the logits and rotate queries and
keys (`vitrail.model.posemb`), and a `QKNorm` normalises queries and keys before that. `vitrail.model.fast.attention`
computes the same faster. Recording attention maps (`vitrail.model.record`) does not change how they are computed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.compute import HAS_FAST
from vitrail.model.layers import linear, new_linear
from vitrail.model.posemb import Bias, rotated

if HAS_FAST:
    from vitrail.model.fast import attention as fast


class Attention(nn.Module):
    """Multi-head self-attention (appendix A, Eq. 5-8): tokens [batch, tokens, width] -> the same shape.

    Without `key_bias` the keys' part of the bias is not used. It has no gradient, so it stays zero. A `norm` acts on
    the heads' outputs, before the output projection; `qk_norm` acts on queries and keys.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_bias: bool = True,
        norm: nn.Module | None = None,
        qk_norm: QKNorm | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.key_bias, self.norm, self.qk_norm = heads, key_bias, norm, qk_norm
        self.qkv = new_linear(width, 3 * width)
        self.out = new_linear(width, width)

    def forward(self, x: Tensor, bias: Bias | None = None, num_queries: int | None = None) -> Tensor:
        """See the class. `bias` computes values to add to the logits from the scaled queries.

        With `num_queries`, only the first `num_queries` tokens are returned; they still attend to all tokens.
        """
        if HAS_FAST and fast.applies():
            return fast.attention(self, x, bias, num_queries)
        query, key, value, added = self._heads(x, bias)  # Eq. 5
        logits = query @ key.transpose(-2, -1)
        maps = (logits if added is None else logits + added.to(logits.dtype)).softmax(dim=-1)  # Eq. 6
        heads = (maps @ value).transpose(1, 2).flatten(2)[:, :num_queries]  # Eq. 7 for every head, side by side
        return self.out(heads if self.norm is None else self.norm(heads))  # type: ignore[no-any-return]  # Eq. 8

    def maps(self, x: Tensor, bias: Bias | None = None, heads: list[int] | None = None) -> Tensor:
        """Return the attention maps [batch, heads, tokens, tokens] in float32 of these heads; None means all heads."""
        query, key, _, added = self._heads(x, bias)
        if heads is not None:
            query, key = query[:, heads], key[:, heads]
            added = None if added is None else added[:, heads]
        logits = (query @ key.transpose(-2, -1)).float()
        return (logits if added is None else logits + added).softmax(-1)

    def project(self, x: Tensor) -> Tensor:
        """Return scaled queries, keys and values [batch, tokens, 3 * width], after `qk_norm`."""
        if HAS_FAST and fast.is_plain(self.qkv):
            qkv = linear(x, *fast.scaled(self))
        else:
            qkv = self.qkv(x)
            if not self.key_bias:
                width = qkv.shape[-1] // 3
                qkv = qkv - F.pad(self.qkv.bias[width : 2 * width], (width, width)).to(qkv.dtype)
            qkv = qkv * self.factors(qkv)
        return qkv if self.qk_norm is None else self.qk_norm(qkv)  # type: ignore[no-any-return]

    def factors(self, like: Tensor, keys: float = 1.0) -> Tensor:
        """Return the factors of queries, keys and values [3 * width], with the type and the device of `like`.

        That of the queries is 1/sqrt(features), unless a `qk_norm` scales them.
        """
        width = like.shape[-1] // 3
        return torch.cat([like.new_full((width,), factor) for factor in (self.scale(width), keys, 1.0)])

    def scale(self, width: int) -> float:
        """Return the factor of queries of this width, all heads together: 1/sqrt(features), or 1 with a `qk_norm`."""
        return (width // self.heads) ** -0.5 if self.qk_norm is None else 1.0

    @property
    def has_own_project(self) -> bool:
        """Whether a subclass overrides `project`, so that its queries, keys and values are not those of the weights."""
        return type(self).project is not Attention.project

    def _heads(self, x: Tensor, bias: Bias | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values [batch, heads, tokens, features], and values to add to the logits."""
        qkv = self.project(x).unflatten(-1, (3, self.heads, -1))
        added = bias(qkv[:, :, 0].transpose(1, 2)) if bias else None
        query, key, value = rotated(qkv, bias).permute(2, 0, 3, 1, 4)
        return query, key, value, added


class QKNorm(nn.Module):
    """Norms of queries and keys before their product ("Scaling Vision Transformers to 22 Billion Parameters", 2.1).

    Each norm is over groups of `features` features: those of a head, or all of a token. Queries are scaled afterwards,
    because a norm removes the scale of its input.
    """

    def __init__(self, query: nn.Module, key: nn.Module, features: int, scale: float) -> None:
        super().__init__()
        self.query, self.key = query, key
        self.features, self.scale = features, scale

    def queries(self, x: Tensor) -> Tensor:
        """Return normalised, scaled queries: [..., width] -> the same shape."""
        return self._normed(self.query, x) * self.scale

    def keys_values(self, x: Tensor) -> Tensor:
        """Return keys and values [..., 2 * width] with the keys normalised."""
        keys, values = x.chunk(2, dim=-1)
        return torch.cat([self._normed(self.key, keys), values], dim=-1)

    def forward(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and values [..., 3 * width] with queries and keys as above."""
        width = qkv.shape[-1] // 3
        return torch.cat([self.queries(qkv[..., :width]), self.keys_values(qkv[..., width:])], dim=-1)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.unflatten(-1, (-1, self.features))).flatten(-2).to(x.dtype)  # type: ignore[no-any-return]
