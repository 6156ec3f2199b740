"""Dense layers and LayerNorm with torch's parameters and results, computed faster on a CPU.

The definition of a network is torch's own: `nn.Linear`, `nn.LayerNorm`, and the formulas of `vitrail.model.attention`.
In eager mode on a CPU three computations are faster, with results that are equal to rounding
(tests/model/test_attention.py):

* `linear` calls oneDNN and adds the bias inside the matrix product. torch adds it in a second pass, and sends float32
  to MKL, which is half as fast on AMD.
* `layer_norm` writes bfloat16 directly under autocast. torch writes float32, which the next layer casts.
* `linear_after_gelu` saves the input of the GELU in float32 and computes the GELU again in the backward pass. This
  saves a quarter of a block's activation memory for 2 % of its time.

A fast computation replaces the definition only where nobody can tell, by two rules that are asked in this file alone:

* `is_plain(layer)`: the layer is torch's own, with its own parameters and without hooks. Then `dense` and the code of
  the blocks read the parameters themselves. Otherwise (LoRA, parametrizations, pruning, quantisation, hooks) they call
  the layer.
* `may_be_fast(x)`: no transform of `torch.func`, no trace and no mode follows the operations. A backward pass that is
  differentiated again computes by the definition.

`computed("definition")` switches the fast computations off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.device import has_onednn
from vitrail.torch_private import has_hooks, is_observed, onednn_linear

_HAS_ONEDNN = has_onednn()  # asked once: torch.compile cannot trace the question
_speed: ContextVar[Literal["auto", "definition", "fast"]] = ContextVar("speed", default="auto")


@contextmanager
def computed(how: Literal["auto", "definition", "fast"]) -> Iterator[None]:
    """Context in which networks compute by torch's definitions, or fast even if a mode follows the operations.

    "fast" is for code that counts what the fast computations do (`vitrail.costs`). "auto" is the rule of this file.
    """
    token = _speed.set(how)
    try:
        yield
    finally:
        _speed.reset(token)


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether a layer is exactly a `kind`, with parameters of its own and without hooks.

    Then code may read its parameters instead of calling it, and nobody can tell.
    """
    how = _speed.get()
    if type(layer) is not kind or how == "definition" or has_hooks(layer):
        return False
    return how == "fast" or all(type(parameter) is nn.Parameter for parameter in layer.parameters(recurse=False))


def may_be_fast(x: Tensor) -> bool:
    """Return whether operations with this tensor may differ from torch's own, because nothing follows them."""
    if torch.compiler.is_compiling():
        return False
    how = _speed.get()
    return how == "fast" or (how == "auto" and type(x) in (Tensor, nn.Parameter) and not is_observed())


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with this tensor is computed, with autocast taken into account."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def on_onednn(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether matrix products with this tensor, in this type, call oneDNN directly."""
    return x.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and _HAS_ONEDNN and may_be_fast(x)


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in], bias [out] -> [..., out]; with `gelu` ("none" or "tanh") a GELU comes first.

    Only tensors that the required gradients need are saved: a frozen layer saves its input only if it has a GELU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None) -> Tensor:
        active = x if gelu is None else F.gelu(x, approximate=gelu)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        keep_active = needs_weight and gelu is not None and x.dtype == torch.bfloat16
        keep_x = (needs_x and gelu is not None) or (needs_weight and not keep_active)
        ctx.save_for_backward(x if keep_x else None, weight if needs_x else None, active if keep_active else None)
        ctx.gelu = gelu
        return onednn_linear(active, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, active = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        again = torch.is_grad_enabled()  # this backward pass will be differentiated, which oneDNN's product cannot be
        grad = grads[0].contiguous()
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = F.linear(grad, weight.t()) if again else onednn_linear(grad, weight.t())
            if ctx.gelu is not None:
                grad_x = torch.ops.aten.gelu_backward(grad_x, x, approximate=ctx.gelu)
        if needs_weight:
            if x is not None and (active is None or again):
                active = x if ctx.gelu is None else F.gelu(x, approximate=ctx.gelu)
            grad_weight = rows.t() @ active.flatten(0, -2)
        if needs_bias:  # a product with ones sums rows of bfloat16 twice as fast as sum(), and adds in float32
            grad_bias = (rows.new_ones(1, len(rows)) @ rows)[0]
        return grad_x, grad_weight, grad_bias, None


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gelu: str | None = None) -> Tensor:
    """Apply `_Linear` to tensors of this type. They are cast outside of it, where autograd sees the casts."""
    return _Linear.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), gelu)


def derivatives(
    definition: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input that needs one, so that it can be differentiated again.

    grad is the gradient of definition(*inputs).
    """
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(definition(*inputs), wanted, grad, create_graph=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    dtype = compute_dtype(x)
    if on_onednn(x, dtype):
        return _onednn(x, weight, bias, dtype)
    return F.linear(x, weight, bias)


def linear_after_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """Return `linear` of GELU(x)."""
    dtype = compute_dtype(x)
    if on_onednn(x, dtype):
        return _onednn(x, weight, bias, dtype, approximate)
    return F.linear(F.gelu(x, approximate=approximate), weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `F.layer_norm` over the last dimension in the type of the next matrix product; statistics are float32."""
    dtype, shape = compute_dtype(x), (x.shape if weight is None else weight.shape)[-1:]
    if x.device.type != "cpu" or dtype == torch.float32 or torch.compiler.is_compiling():
        return F.layer_norm(x, shape, weight, bias, eps)
    return torch.native_layer_norm(x.to(dtype), shape, weight, bias, eps)[0]


def dense(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x), computed by `linear` if the layer is plain."""
    return linear(x, layer.weight, layer.bias) if is_plain(layer) else layer(x)  # type: ignore[arg-type]


def dense_after_gelu(layer: nn.Module, x: Tensor, approximate: str = "none") -> Tensor:
    """Return layer(GELU(x)), computed by `linear_after_gelu` if the layer is plain."""
    if is_plain(layer):
        return linear_after_gelu(x, layer.weight, layer.bias, approximate)  # type: ignore[arg-type]
    return layer(F.gelu(x, approximate=approximate))


def device_of_constants() -> torch.device:
    """Return torch's default device for new tensors, but the CPU in place of "meta".

    It is the device for buffers that no checkpoint holds: they need values even if the parameters get theirs later.
    """
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def created_on(device: torch.device | str | None) -> AbstractContextManager[Any]:
    """Return a context in which new tensors are created on `device`. None means torch's default device."""
    return nullcontext() if device is None else torch.device(device)


class Constants(nn.Module):
    """A module with buffers that follow from its settings and are in no checkpoint.

    They get their values again when `to_empty` gives the module new memory.
    """

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        self._values = values
        for name, value in values.items():
            self.register_buffer(name, value.to(device_of_constants()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constants:
        super()._apply(fn, recurse)
        for name, value in self._values.items():
            moved = getattr(self, name)
            if not moved.is_meta:
                setattr(self, name, value.to(moved))
        return self


class _NoValuesOnMeta:
    """Mixin for a layer of torch that draws no initial values on the meta device, where tensors have no values.

    The first random number on the meta device makes torch import 900 modules, which takes seconds and 150 MB.
    """

    weight: Tensor

    def reset_parameters(self) -> None:
        """Draw torch's initial values."""
        if not self.weight.is_meta:
            super().reset_parameters()  # type: ignore[misc]


class Conv2d(_NoValuesOnMeta, nn.Conv2d):
    """`nn.Conv2d`."""


def new_linear(inputs: int, outputs: int, *, bias: bool = True, like: Tensor | None = None) -> nn.Linear:
    """Return an `nn.Linear` with the device and the type of `like`, on the meta device without drawing values.

    It is torch's own class (unlike `Conv2d`), because tools that replace dense layers look for exactly this type.
    """
    like = torch.empty(0) if like is None else like
    if not like.is_meta:
        return nn.Linear(inputs, outputs, bias=bias, device=like.device, dtype=like.dtype)
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = inputs, outputs
    layer.weight = nn.Parameter(like.new_empty(outputs, inputs))
    layer.register_parameter("bias", nn.Parameter(like.new_empty(outputs)) if bias else None)
    return layer


def zero_linear(inputs: int, outputs: int, like: Tensor | None = None) -> nn.Linear:
    """Return a dense layer that starts at zero, with the device and the type of `like`."""
    layer = new_linear(inputs, outputs, like=like)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the approximation of GELU in OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> the same shape."""
        return x * torch.sigmoid(1.702 * x)


def new_gelu(kind: str) -> nn.Module:
    """Return the activation that a config's `gelu` names: "erf", "tanh" or "quick"."""
    return QuickGELU() if kind == "quick" else nn.GELU(approximate="tanh" if kind == "tanh" else "none")


def new_norm(kind: str, features: int, eps: float) -> nn.Module:
    """Return the norm over the last dimension that a config's `norm` names: "layer" or "rms"."""
    return RMSNorm(features, eps=eps) if kind == "rms" else LayerNorm(features, eps=eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, computed by `layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., width] -> the same shape, in the type of the next matrix product."""
        return layer_norm(input, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, computed in the type of its weight: autocast may give it bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        return super().forward(x.to(self.weight.dtype))
