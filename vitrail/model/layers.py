"""Dense layers and LayerNorm with torch's parameters and results, computed faster on a CPU.

On a GPU and under `torch.compile` these are exactly `nn.Linear` and `nn.LayerNorm`. In eager mode on a CPU there are
three differences; names and parameters stay, and results are equal to rounding (tests/model/test_attention.py):

* `linear` calls oneDNN and adds the bias inside the matrix product. torch adds it in a second pass, and sends float32
  to MKL, which is half as fast on AMD.
* `layer_norm` writes bfloat16 directly under autocast. torch writes float32, which the next layer casts.
* `linear_after_gelu` saves the input of the GELU in float32 and computes the GELU again in the backward pass. This
  saves a quarter of a block's activation memory for 2 % of its time.

Modules (`Linear`, `LayerNorm`) call these functions; code that computes its weights calls the functions directly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.device import has_onednn
from vitrail.torch_private import onednn_linear

_HAS_ONEDNN = has_onednn()  # asked once: torch.compile cannot trace the question


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with this tensor is computed, with autocast taken into account."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def on_onednn(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether matrix products with this tensor, in this type, call oneDNN directly."""
    return (
        x.device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and _HAS_ONEDNN
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in], bias [out] -> [..., out]; with `gelu` ("none" or "tanh") a GELU comes first.

    Only tensors that the required gradients need are saved: a frozen layer saves its input only if it has a GELU.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gelu: str | None
    ) -> Tensor:
        x, cast = x.to(dtype), weight.to(dtype)
        active = x if gelu is None else F.gelu(x, approximate=gelu)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        keep_active = needs_weight and gelu is not None and dtype == torch.bfloat16
        keep_x = (needs_x and gelu is not None) or (needs_weight and not keep_active)
        ctx.save_for_backward(x if keep_x else None, cast if needs_x else None, active if keep_active else None)
        ctx.dtypes, ctx.gelu = (weight.dtype, None if bias is None else bias.dtype), gelu
        return onednn_linear(active, cast, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, active = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grads[0].contiguous()
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = onednn_linear(grad, weight.t())
            if ctx.gelu is not None:
                grad_x = torch.ops.aten.gelu_backward(grad_x, x, approximate=ctx.gelu)
        if needs_weight:
            if active is None:
                active = x if ctx.gelu is None else F.gelu(x, approximate=ctx.gelu)
            grad_weight = (rows.t() @ active.flatten(0, -2)).to(ctx.dtypes[0])
        if needs_bias:  # a product with ones sums rows of bfloat16 twice as fast as sum(), and adds in float32
            grad_bias = (rows.new_ones(1, len(rows)) @ rows)[0].to(ctx.dtypes[1])
        return grad_x, grad_weight, grad_bias, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    dtype = compute_dtype(x)
    if on_onednn(x, dtype):
        return _Linear.apply(x, weight, bias, dtype, None)
    return F.linear(x, weight, bias)


def linear_after_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """Return `linear` of GELU(x)."""
    dtype = compute_dtype(x)
    if on_onednn(x, dtype):
        return _Linear.apply(x, weight, bias, dtype, approximate)
    return F.linear(F.gelu(x, approximate=approximate), weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `F.layer_norm` over the last dimension in the type of the next matrix product; statistics are float32."""
    dtype = compute_dtype(x)
    if x.device.type != "cpu" or dtype == torch.float32 or torch.compiler.is_compiling():
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return torch.native_layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps)[0]


def device_of_constants() -> str | None:
    """Return the device for constant buffers: the CPU if a network is built on "meta", else None (the default).

    No checkpoint holds these values, so they must be real on "meta" too.
    """
    return "cpu" if torch.get_default_device().type == "meta" else None


class _NoValuesOnMeta:
    """Mixin for a layer of torch that draws no initial values on the meta device, where tensors have no values.

    The first random number on the meta device makes torch import 900 modules, which takes seconds and 150 MB.
    """

    weight: Tensor

    def reset_parameters(self) -> None:
        """Draw torch's initial values."""
        if not self.weight.is_meta:
            super().reset_parameters()  # type: ignore[misc]


class PlainLinear(_NoValuesOnMeta, nn.Linear):
    """`nn.Linear` with torch's own computation."""


class Conv2d(_NoValuesOnMeta, nn.Conv2d):
    """`nn.Conv2d`."""


class Linear(_NoValuesOnMeta, nn.Linear):
    """`nn.Linear` computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return linear(input, self.weight, self.bias)

    def after_gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Return the layer applied to GELU(x)."""
        return linear_after_gelu(x, self.weight, self.bias, approximate)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, computed by `layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., width] -> the same shape, in the type of the next matrix product."""
        return layer_norm(input, self.weight, self.bias, self.eps)
