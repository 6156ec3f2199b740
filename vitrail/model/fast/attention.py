"""Multi-head self-attention (Eq. 5-8) computed faster than by its definition, with results equal to rounding.

* The factor of the queries is multiplied into the weights, which costs nothing per token. A GPU's kernel multiplies by
  it, which costs nothing at all (`_projection`).
* In the last layer only the tokens that the head reads send queries (`attend_first`).
* There are two paths from queries, keys and values to outputs (`attend`). "fused" is torch's
  scaled_dot_product_attention. It is the faster one on a GPU. "explicit" is two matrix products with a softmax between
  them. On a CPU it is 1.7 to 8 times faster in training, because oneDNN computes its products. With AMX this is true of
  bfloat16 alone, and the fused path is the faster one in float32 and in prediction (`python -m benchmarks.attention`
  measures both). `uses_explicit` chooses, and `vitrail.model.compute.attention_path` overrides the choice.

Queries are already scaled by 1/sqrt(features) when they reach the functions that attend, or these get the scale.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.device import has_amx
from vitrail.model.compute import chosen_path, how_computed
from vitrail.model.fast.layers import cast_of, derivatives, is_plain, may_be_fast
from vitrail.model.layers import dense, linear
from vitrail.model.low_rank import Adapted
from vitrail.model.posemb import Bias, rotated, rotation_of
from vitrail.torch_private import softmax_backward

LONGEST_EXPLICIT = 1024
"""Maximum number of tokens for the explicit path. With more tokens, its maps take too much memory."""

_HAS_AMX = has_amx()  # asked once: torch.compile cannot trace the question


def applies() -> bool:
    """Return whether `attention` replaces the definition."""
    return how_computed() != "definition"


def attention(module: Any, x: Tensor, bias: Bias | None, num_queries: int | None) -> Tensor:
    """Return what the `Attention` `module` computes of x [batch, tokens, width] (`Attention.forward`)."""
    if is_plain(module.qkv) and not module.has_own_project:
        weight, offset, scale = _projection(module, x)
        mixed = qkv_attention(x, weight, offset, module.heads, bias, num_queries, norm=module.qk_norm, scale=scale)
    elif is_plain(module.qkv, Adapted) and not module.has_own_project:
        update = module.qkv.lora.factors(module.factors(module.qkv.bias))
        mixed = qkv_attention(x, *scaled(module), module.heads, bias, num_queries, update, module.qk_norm)
    else:  # only calling its layer, or a method of the user's own, computes what it computes
        mixed = attend_all(module.project(x), module.heads, bias)[:, :num_queries]
    return dense(module.out, mixed if module.norm is None else module.norm(mixed))


def _projection(module: Any, x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return weight and bias of an `Attention`'s projection of x, and the scale that its queries still need."""
    if x.device.type == "cpu" or chosen_path() == "explicit":
        return *scaled(module), 1.0
    parameters: Any = cast_of(module.qkv) or (module.qkv.weight, module.qkv.bias)
    weight, offset = parameters
    width = len(weight) // 3
    if not module.key_bias:
        offset = offset - F.pad(offset[width : 2 * width], (width, width))
    return weight, offset, module.scale(width)


def scaled(module: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of an `Attention`'s projection, with the queries' part multiplied by 1/sqrt(features).

    For 64 features this is exact. A `qk_norm` scales the queries itself. Without `key_bias` the keys' part is zero.
    """
    rows = module.factors(module.qkv.weight[:, 0])
    bias = rows if module.key_bias else module.factors(rows, keys=0.0)
    return module.qkv.weight * rows[:, None], module.qkv.bias * bias


def qkv_attention(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    heads: int,
    bias: Bias | None = None,
    num_queries: int | None = None,
    update: tuple[Tensor, Tensor] | None = None,
    norm: Any = None,
    scale: float = 1.0,
) -> Tensor:
    """Return attention without the output projection: x [batch, tokens, in] -> [batch, tokens or num_queries, width].

    weight [3 * width, in] and offset project tokens to scaled queries, keys and values; before a `norm`, a `QKNorm`,
    queries are not scaled yet. `bias` and `num_queries` are as in `Attention.forward`. update: down [rank, in] and up
    [3 * width, rank], whose product is added to `weight`. The queries still need the factor `scale`.
    """
    down, up = update or (None, None)

    def project(tokens: Tensor, weight: Tensor, offset: Tensor, up: Tensor | None) -> Tensor:
        out = linear(tokens, weight, offset)
        return out if down is None or up is None else out + linear(linear(tokens, down), up)

    if num_queries is None:
        qkv = project(x, weight, offset, up)
        return attend_all(qkv if norm is None else norm(qkv), heads, bias, scale)
    parts = [len(weight) // 3, len(weight) // 3 * 2]
    of_queries, rest = (None, None) if up is None else up.split(parts)
    query_weight, weight = weight.split(parts)
    query_offset, offset = offset.split(parts)
    queries = project(x[:, :num_queries], query_weight, query_offset, of_queries)
    key_value = project(x, weight, offset, rest)
    if norm is not None:
        queries, key_value = norm.queries(queries), norm.keys_values(key_value)
    return attend_first(queries, key_value, heads, bias, scale)


def attend_all(qkv: Tensor, heads: int, bias: Bias | None = None, scale: float = 1.0) -> Tensor:
    """Return the attention of all tokens [batch, tokens, width] from qkv [batch, tokens, 3 * width].

    The queries still need the factor `scale`.
    """
    qkv = qkv.unflatten(-1, (3, heads, -1))
    added = bias(_scaled(qkv[:, :, 0].transpose(1, 2), scale)) if bias else None
    return attend(rotated(qkv, bias), added, scale)


def _scaled(query: Tensor, scale: float) -> Tensor:
    return query if scale == 1 else query * scale


def attend_first(query: Tensor, key_value: Tensor, heads: int, bias: Bias | None = None, scale: float = 1.0) -> Tensor:
    """Return the attention of n queries to all tokens [batch, n, width], for the last layer.

    query [batch, n, width] still needs the factor `scale`; key_value is [batch, tokens, 2 * width].
    """
    query = _scaled(query.unflatten(-1, (heads, -1)), scale)
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
    wide = torch.diag_embed(query.movedim(2, -1), dim1=2, dim2=3).flatten(3).flatten(1, 2)  # [batch, n * heads, width]
    logits = wide @ key.transpose(1, 2)
    if bias is not None:
        logits = logits + bias.transpose(1, 2).flatten(1, 2)
    out = (logits.softmax(-1, dtype=query.dtype) @ value).unflatten(1, (count, heads)).unflatten(-1, (heads, -1))
    return out.diagonal(dim1=2, dim2=3).movedim(-1, 2).flatten(2)


def uses_explicit(tokens: int, like: Tensor) -> bool:
    """Return whether attention over this many tokens is computed by the explicit path.

    `like` has the device and the type of the queries, and requires a gradient if they do. The rule is fixed and not
    measured at start, so that two runs on one machine give the same bits. A traced program is for any machine: it takes
    the fused path, which torch's older ONNX exporter knows.
    """
    path = chosen_path()
    if path != "auto":
        return path == "explicit"
    if like.device.type != "cpu" or tokens > LONGEST_EXPLICIT or torch.jit.is_tracing():
        return False
    return not _HAS_AMX or (like.dtype == torch.bfloat16 and like.requires_grad and torch.is_grad_enabled())


def explicit(qkv: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(q k^T + bias) v: Eq. 6 and 7.

    qkv [3, batch, heads, tokens, features] has scaled queries; bias is [batch or 1, heads, tokens, tokens].
    """
    query, key, value = qkv.unbind(0)
    logits = query @ key.transpose(-2, -1)
    return (logits if bias is None else logits + bias).softmax(-1) @ value


class _ExplicitAttention(torch.autograd.Function):
    """`explicit` with a bias of one image, or without a gradient.

    It saves the maps, and writes all gradients into one tensor.
    """

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


def attend(qkv: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return the attention of all heads [batch, tokens, heads * features].

    qkv [batch, tokens, 3, heads, features]; the fused path multiplies the queries by `scale`. bias [batch or 1, heads,
    tokens, tokens] is added to the logits.
    """
    mask = None if bias is None else bias.to(qkv.dtype)
    if not uses_explicit(qkv.shape[1], qkv):  # of parts along this dimension the gradients are joined without a copy
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(2)
    qkv = qkv.permute(2, 0, 3, 1, 4)
    if may_be_fast(qkv) and (mask is None or len(mask) == 1 or not mask.requires_grad):
        out = _ExplicitAttention.apply(qkv.contiguous(), mask)
    else:
        out = explicit(qkv, mask)
    return out.transpose(1, 2).flatten(2)
