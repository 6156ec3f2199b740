"""Dense layers and LayerNorm: torch's own, computed the way a CPU does it fastest.

On a GPU and under `torch.compile` these are exactly `nn.Linear` and `nn.LayerNorm`. In eager mode on a CPU

* matrix products go to oneDNN with the bias fused (torch adds it in a pass of its own, and sends float32 to
  MKL, half as fast on AMD), and the two products of the backward pass are laid out the way oneDNN likes;
* LayerNorm under autocast writes bfloat16 at once instead of float32 that the next layer casts;
* in float32, the GELU before a dense layer is computed again in the backward pass instead of being kept: a
  quarter of a block's activation memory for 2 % of its time, which pays for the attention maps that are kept.

Same parameters, same names, same results to rounding (tests/model/test_layers.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type a matrix product with this tensor runs in, autocast included."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def on_onednn(x: Tensor, dtype: torch.dtype) -> bool:
    """Are products of this type computed by calling oneDNN directly?"""
    return (
        x.device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]; no autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _backward(x: Tensor, weight: Tensor, grad: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of `_product` for its three inputs, each only where needed."""
    grad_x = _product(grad, weight.t()) if needs[0] else None
    rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
    grad_weight = (rows.t() @ grad_rows).t() if needs[1] else None
    grad_bias = None
    if needs[2]:  # a product with ones sums the rows twice as fast as sum() in bfloat16, and adds in float32
        grad_bias = (grad_rows.new_ones(1, len(grad_rows)) @ grad_rows)[0]
    return grad_x, grad_weight, grad_bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.dtypes = dtype, None if bias is None else bias.dtype
        return _product(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        grad_x, grad_weight, grad_bias = _backward(x, weight.to(dtype), grads[0].contiguous(), needs)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class _GELULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, approximate: str) -> Tensor:
        x = x.to(dtype)
        active = F.gelu(x, approximate=approximate)
        ctx.save_for_backward(x, weight, bias, active if dtype == torch.bfloat16 else None)
        ctx.dtype, ctx.approximate = dtype, approximate
        return _product(active, weight.to(dtype), bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, active = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        if active is None:
            active = F.gelu(x, approximate=ctx.approximate) if needs[1] else x
        grad, grad_weight, grad_bias = _backward(active, weight.to(ctx.dtype), grads[0].contiguous(), needs)
        if grad is not None:
            grad = torch.ops.aten.gelu_backward(grad, x, approximate=ctx.approximate)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad, grad_weight, grad_bias, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    dtype = compute_dtype(x)
    if on_onednn(x, dtype):
        return _Linear.apply(x, weight, bias, dtype)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return linear(input, self.weight, self.bias)

    def after_gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """The layer applied to GELU(x)."""
        dtype = compute_dtype(x)
        if on_onednn(x, dtype):
            return _GELULinear.apply(x, self.weight, self.bias, dtype, approximate)
        return F.linear(F.gelu(x, approximate=approximate), self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension; its statistics are always float32."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., width] -> the same shape, in the type the next matrix product takes."""
        dtype = compute_dtype(input)
        if input.device.type != "cpu" or dtype == torch.float32 or torch.compiler.is_compiling():
            return super().forward(input)
        shape = list(self.normalized_shape)
        return torch.native_layer_norm(input.to(dtype), shape, self.weight, self.bias, self.eps)[0]
