"""Multi-head self-attention (paper, appendix A) and the two ways to compute it.

* "fused" is torch's scaled_dot_product_attention. It is the faster one on a GPU.
* "explicit" is two matrix products with a softmax between them. On a CPU it is 1.7 to 8 times faster in training,
  because oneDNN computes its products. With AMX this is true of bfloat16 alone, and the fused path is the faster one
  in float32 and in prediction (`python -m benchmarks.attention` measures both).

Both agree to rounding, forward and backward. `uses_explicit` chooses, and `attention_path` overrides the choice.
Recording attention maps (`vitrail.model.record`) does not change it.

The module `Attention` computes scaled weights and calls `mix`, which projects tokens to queries, keys and values and
calls `attend`. In the last layer only the tokens that the head reads send queries; there `mix` calls `attend_first`.
Queries are always already scaled by 1/sqrt(features) when they reach these functions. Rotary positions rotate queries
and keys before their product (`rotation_of`). A `QKNorm` normalises them before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.device import has_amx
from vitrail.model.layers import dense, derivatives, is_plain, linear, may_be_fast, new_linear
from vitrail.model.low_rank import Adapted
from vitrail.model.rotary import Rotation
from vitrail.torch_private import softmax_backward

Path = Literal["auto", "fused", "explicit"]
Bias = Callable[[Tensor], Tensor | None]
"""scaled queries [batch, heads, n, features] -> values to add to the logits [batch or 1, heads, n, tokens]

With rotary positions it has a method `rotation` (`vitrail.model.posemb.AtLayer`).
"""

_path: ContextVar[Path] = ContextVar("attention_path", default="auto")

LONGEST_EXPLICIT = 1024
"""Maximum number of tokens for the explicit path. With more tokens, its maps take too much memory."""

_HAS_AMX = has_amx()  # asked once: torch.compile cannot trace the question


@contextmanager
def attention_path(path: Path) -> Iterator[None]:
    """Context in which attention is computed by this path: "fused", "explicit" or "auto"."""
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def uses_explicit(tokens: int, like: Tensor) -> bool:
    """Return whether attention over this many tokens is computed by the explicit path.

    `like` has the device and the type of the queries, and requires a gradient if they do. The rule is fixed and not
    measured at start, so that two runs on one machine give the same bits. A traced program is for any machine: it takes
    the fused path, which torch's older ONNX exporter knows.
    """
    path = _path.get()
    if path != "auto":
        return path == "explicit"
    if like.device.type != "cpu" or tokens > LONGEST_EXPLICIT or torch.jit.is_tracing():
        return False
    return not _HAS_AMX or (like.dtype == torch.bfloat16 and like.requires_grad and torch.is_grad_enabled())


def explicit(qkv: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(q k^T + bias) v: the definition of attention.

    qkv [3, batch, heads, tokens, features] has scaled queries; bias is [batch or 1, heads, tokens, tokens].
    """
    query, key, value = qkv.unbind(0)
    logits = query @ key.transpose(-2, -1)
    return (logits if bias is None else logits + bias).softmax(-1) @ value


class _ExplicitAttention(torch.autograd.Function):
    """`explicit` with a bias of one image. It saves the maps, and writes all gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = qkv.flatten(1, 2)
        logits = torch.bmm(query, key.transpose(1, 2))
        if bias is not None:
            logits.view(*qkv.shape[1:-1], -1).add_(bias)
        maps = logits.softmax(-1)
        ctx.save_for_backward(qkv, bias, maps)
        return torch.bmm(maps, value).view(qkv.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, bias, maps = ctx.saved_tensors
        if torch.is_grad_enabled():  # this backward pass will be differentiated
            return derivatives(explicit, (qkv, bias), grads[0])
        query, key, value = qkv.flatten(1, 2)
        grad = grads[0].flatten(0, 1)
        grads_qkv = torch.empty_like(qkv)
        grad_query, grad_key, grad_value = grads_qkv.flatten(1, 2)
        torch.bmm(maps.transpose(1, 2), grad, out=grad_value)
        grad_logits = softmax_backward(torch.bmm(grad, value.transpose(1, 2)), maps, -1, maps.dtype)
        torch.bmm(grad_logits, key, out=grad_query)
        torch.bmm(grad_logits.transpose(1, 2), query, out=grad_key)
        if not ctx.needs_input_grad[1]:
            return grads_qkv, None
        return grads_qkv, grad_logits.view(*qkv.shape[1:-1], -1).sum(0, keepdim=True)


def attend(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the attention of all heads [batch, tokens, heads * features].

    qkv [batch, tokens, 3, heads, features] has scaled queries. bias [batch or 1, heads, tokens, tokens] is added to
    the logits.
    """
    qkv = qkv.permute(2, 0, 3, 1, 4)
    mask = None if bias is None else bias.to(qkv.dtype)
    if not uses_explicit(qkv.shape[3], qkv):
        query, key, value = qkv
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    elif may_be_fast(qkv) and (mask is None or len(mask) == 1):
        out = _ExplicitAttention.apply(qkv.contiguous(), mask)
    else:
        out = explicit(qkv, mask)
    return out.transpose(1, 2).flatten(2)


def rotation_of(bias: Bias | None) -> Rotation | None:
    """Return the rotation of queries and keys that comes with a bias, None without rotary positions."""
    rotation = getattr(bias, "rotation", None)
    return None if rotation is None else rotation()


def _rotated(qkv: Tensor, bias: Bias | None) -> Tensor:
    """Rotate queries and keys of qkv [batch, tokens, 3, heads, features] by the rotation of `bias`, if it has one."""
    rotation = rotation_of(bias)
    return qkv if rotation is None else torch.cat([rotation.turn(qkv[:, :, :2]), qkv[:, :, 2:]], dim=2)


def attend_first(query: Tensor, key_value: Tensor, heads: int, bias: Bias | None = None) -> Tensor:
    """Return the attention of n queries to all tokens [batch, n, width], for the last layer.

    query [batch, n, width] is already scaled; key_value is [batch, tokens, 2 * width].
    """
    query = query.unflatten(-1, (heads, -1))
    extra = bias(query.transpose(1, 2)) if bias else None
    mask = None if extra is None else extra.to(query.dtype)
    if rotation := rotation_of(bias):
        keys, values = key_value.chunk(2, dim=-1)
        query, keys = rotation.turn(query), rotation.turn(keys.unflatten(-1, (heads, -1))).flatten(2)
        key_value = torch.cat([keys, values], dim=-1)
    if uses_explicit(key_value.shape[1], key_value):
        keys, values = key_value.chunk(2, dim=-1)
        return _explicit_first(query, keys, values, mask)
    key, value = key_value.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, scale=1.0).transpose(1, 2).flatten(2)


def _explicit_first(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """query [batch, n, heads, features], key and value [batch, tokens, width] -> [batch, n, width].

    Each query is copied once per head, with zeros outside of that head's features. So keys and values need not be
    split into heads, which would copy them.
    """
    count, heads = query.shape[1:3]
    alone = torch.diag_embed(query.movedim(2, -1), dim1=2, dim2=3).flatten(3).flatten(1, 2)  # [batch, n * heads, width]
    logits = alone @ key.transpose(1, 2)
    if bias is not None:
        logits = logits + bias.transpose(1, 2).flatten(1, 2)
    out = (logits.softmax(-1, dtype=query.dtype) @ value).unflatten(1, (count, heads)).unflatten(-1, (heads, -1))
    return out.diagonal(dim1=2, dim2=3).movedim(-1, 2).flatten(2)


def attend_all(qkv: Tensor, heads: int, bias: Bias | None = None) -> Tensor:
    """Return the attention of all tokens [batch, tokens, width]: qkv [batch, tokens, 3 * width] has scaled queries."""
    qkv = qkv.unflatten(-1, (3, heads, -1))
    return attend(_rotated(qkv, bias), bias(qkv[:, :, 0].transpose(1, 2)) if bias else None)


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


def mix(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    heads: int,
    bias: Bias | None = None,
    read: int | None = None,
    update: tuple[Tensor, Tensor] | None = None,
    norm: QKNorm | None = None,
) -> Tensor:
    """Return attention without the output projection: x [batch, tokens, in] -> [batch, tokens or read, width].

    weight [3 * width, in] and offset project tokens to scaled queries, keys and values; before a `norm`, queries are
    not scaled yet. `bias` and `read` are as in `Attention.forward`. update: down [rank, in] and up [3 * width, rank],
    whose product is added to `weight`.
    """
    down, up = update or (None, None)

    def project(tokens: Tensor, weight: Tensor, offset: Tensor, up: Tensor | None) -> Tensor:
        out = linear(tokens, weight, offset)
        return out if down is None or up is None else out + linear(linear(tokens, down), up)

    if read is None:
        qkv = project(x, weight, offset, up)
        return attend_all(qkv if norm is None else norm(qkv), heads, bias)
    width = len(weight) // 3
    query, rest = (None, None) if up is None else (up[:width], up[width:])
    queries = project(x[:, :read], weight[:width], offset[:width], query)
    key_value = project(x, weight[width:], offset[width:], rest)
    if norm is not None:
        queries, key_value = norm.queries(queries), norm.keys_values(key_value)
    return attend_first(queries, key_value, heads, bias)


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

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the projection, with the queries' part multiplied by 1/sqrt(features).

        Scaling the weight costs nothing per token; for 64 features it is exact. A `qk_norm` scales the queries itself.
        """
        rows = self._scales(self.qkv.weight[:, 0])
        bias = rows if self.key_bias else self._scales(rows, keys=0.0)
        return self.qkv.weight * rows[:, None], self.qkv.bias * bias

    def _scales(self, qkv: Tensor, keys: float = 1.0) -> Tensor:
        """Return the factors of queries, keys and values [3 * width], with the type and the device of `qkv`."""
        width = qkv.shape[-1] // 3
        queries = (width // self.heads) ** -0.5 if self.qk_norm is None else 1.0
        parts = (queries, keys, 1.0)
        return torch.cat([qkv.new_full((width,), factor) for factor in parts])

    def project(self, x: Tensor) -> Tensor:
        """Return scaled queries, keys and values [batch, tokens, 3 * width], after `qk_norm`."""
        if is_plain(self.qkv):
            qkv = linear(x, *self.scaled())
        else:
            qkv = self.qkv(x)
            if not self.key_bias:
                qkv = qkv - self.qkv.bias * (self._scales(qkv) - self._scales(qkv, keys=0.0))
            qkv = qkv * self._scales(qkv)
        return qkv if self.qk_norm is None else self.qk_norm(qkv)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, bias: Bias | None = None, read: int | None = None) -> Tensor:
        """See the class. `bias` computes values to add to the logits from the scaled queries.

        With `read`, only the first `read` tokens send queries and are returned; they still attend to all tokens.
        """
        if is_plain(self.qkv):
            mixed = mix(x, *self.scaled(), self.heads, bias, read, norm=self.qk_norm)
        elif isinstance(self.qkv, Adapted) and is_plain(self.qkv, Adapted):
            update = self.qkv.lora.factors(self._scales(self.qkv.bias))
            mixed = mix(x, *self.scaled(), self.heads, bias, read, update, self.qk_norm)
        else:
            mixed = attend_all(self.project(x), self.heads, bias)[:, :read]
        return dense(self.out, mixed if self.norm is None else self.norm(mixed))

    def maps(self, x: Tensor, bias: Bias | None = None, heads: list[int] | None = None) -> Tensor:
        """Return the attention maps [batch, heads, tokens, tokens] in float32 of these heads; None means all heads."""
        qkv = self.project(x).unflatten(-1, (3, self.heads, -1))
        extra = bias(qkv[:, :, 0].transpose(1, 2)) if bias else None
        q, k, _ = _rotated(qkv, bias).permute(2, 0, 3, 1, 4)
        if heads is not None:
            q, k = q[:, heads], k[:, heads]
            extra = None if extra is None else extra[:, heads]
        logits = (q @ k.transpose(-1, -2)).float()
        return (logits if extra is None else logits + extra).softmax(-1)
