"""Dense layers and LayerNorm with torch's parameters and results, computed faster.

In eager mode on a CPU three computations are faster than torch's, with results that are equal to rounding:

* `linear` calls oneDNN and adds the bias inside the matrix product. torch adds it in a second pass, and sends float32
  to MKL, which is half as fast on AMD.
* `layer_norm` writes bfloat16 directly under autocast. torch writes float32, which the next layer casts.
* `linear` with `gelu` saves the input of the GELU in float32 and computes the GELU again in the backward pass. This
  saves a quarter of a block's activation memory for 2 % of its time.

On a GPU, `cast_together` casts the parameters of a block for autocast in one launch, and `layer_norm` reads the casts.

A fast computation replaces the definition only where nobody can tell, by two rules:

* `is_plain(layer)`: the layer is torch's own, with its own parameters and without hooks. Then its parameters are read
  and it is not called. Otherwise (LoRA, parametrizations, pruning, quantisation, hooks) it is called.
* `may_be_fast(x)`: no transform of `torch.func`, no trace and no mode follows the operations. A backward pass that is
  differentiated again computes by the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.device import has_onednn
from vitrail.model.compute import compute_dtype, how_computed
from vitrail.torch_private import (
    foreach_copy_,
    has_hooks,
    is_observed,
    onednn_linear,
    onednn_types,
    own_parameters,
    parts,
)

_ONEDNN_TYPES = onednn_types() if has_onednn() else ()  # asked once: torch.compile cannot trace the question


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether a layer is exactly a `kind`, with parameters of its own and without hooks.

    Then code may read its parameters instead of calling it, and nobody can tell.
    """
    how = how_computed()
    if type(layer) is not kind or how == "definition" or has_hooks(layer):
        return False
    return how == "fast" or all(type(parameter) is nn.Parameter for parameter in own_parameters(layer))


def may_be_fast(x: Tensor) -> bool:
    """Return whether operations with this tensor may differ from torch's own, because nothing follows them."""
    if torch.compiler.is_compiling():
        return False
    how = how_computed()
    return how == "fast" or (how == "auto" and type(x) in (Tensor, nn.Parameter) and not is_observed())


def on_onednn(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether matrix products with this tensor, in this type, call oneDNN directly."""
    return x.device.type == "cpu" and dtype in _ONEDNN_TYPES and may_be_fast(x)


def applies(x: Tensor) -> bool:
    """Return whether `linear` replaces torch's computation for this tensor."""
    return not torch.compiler.is_compiling() and on_onednn(x, compute_dtype(x))


def applies_to_norm(x: Tensor) -> bool:
    """Return whether `layer_norm` replaces torch's computation for this tensor."""
    if x.device.type != "cpu" or how_computed() == "definition" or torch.compiler.is_compiling():
        return False
    return compute_dtype(x) != torch.float32


def joins_gelu(act: nn.Module, dropout: nn.Dropout) -> bool:
    """Return whether an MLP's activation is a GELU right before the next layer, for `linear` with `gelu`."""
    drops = (dropout.training and dropout.p) or not is_plain(dropout, nn.Dropout)
    return not drops and is_plain(act, nn.GELU)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: str | None = None) -> Tensor:
    """Return `F.linear`, x [..., in], weight [out, in], bias [out] -> [..., out]; with `gelu`, of a GELU of x.

    gelu: How it is computed ("none" or "tanh", as in `F.gelu`). None: there is no GELU.
    """
    dtype = compute_dtype(x)  # tensors are cast outside of `_Linear`, where autograd sees the casts
    return _Linear.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), gelu)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `F.layer_norm` over the last dimension in the type of the next matrix product; statistics are float32."""
    shape, x = (x.shape if weight is None else weight.shape)[-1:], x.to(compute_dtype(x))
    if x.device.type == "cpu":
        return torch.native_layer_norm(x, shape, weight, bias, eps)[0]
    with torch.autocast(x.device.type, enabled=False):  # which would cast to float32, on a GPU
        return torch.native_layer_norm(x, shape, weight, bias, eps)[0]


Cast = tuple[Tensor, Tensor | None]
"""Weight and bias of a layer in the type of autocast."""
_casts: ContextVar[Mapping[nn.Module, Cast]] = ContextVar("casts", default={})  # noqa: B039  # never changed


@contextmanager
def cast_together(block: nn.Module, x: Tensor) -> Iterator[None]:
    """Context in which `cast_of` has the layers of `block` in the type of matrix products with `x`.

    autocast casts parameters one by one, and their gradients back: 300 of the launches of a training step of S/16. In
    float16 norms are not cast, because large residuals would overflow.
    """
    dtype = compute_dtype(x)
    kinds = (nn.Linear, nn.LayerNorm) if dtype == torch.bfloat16 else nn.Linear
    layers: list[Any] = [part for part in parts(block) if isinstance(part, kinds) and is_plain(part, type(part))]
    layers = [layer for layer in layers if layer.weight is not None and layer.weight.dtype == torch.float32]
    parameters = [part for layer in layers for part in (layer.weight, layer.bias) if part is not None]
    cast = iter(_Casts.apply(dtype, *parameters) if parameters else ())
    found = {layer: (next(cast), None if layer.bias is None else next(cast)) for layer in layers}
    token = _casts.set(found)
    try:
        yield
    finally:
        _casts.reset(token)


def joins_casts(x: Tensor) -> bool:
    """Return whether `cast_together` applies to a block with this input."""
    return x.device.type == "cuda" and may_be_fast(x) and compute_dtype(x) in (torch.bfloat16, torch.float16)


def cast_of(layer: nn.Module) -> Cast | None:
    """Return the parameters of a layer as the `cast_together` around this call has cast them, or None."""
    return None if torch.compiler.is_compiling() else _casts.get().get(layer)


class _Casts(torch.autograd.Function):
    """Tensors in another type; one launch for all of them, and one for their gradients."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        cast = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
        foreach_copy_(cast, [parameter.detach() for parameter in parameters])
        frozen = [x for x, learns in zip(cast, ctx.needs_input_grad[1:], strict=True) if not learns]
        ctx.mark_non_differentiable(*frozen)
        ctx.set_materialize_grads(False)
        return tuple(cast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled():  # this backward pass will be differentiated
            return None, *(None if grad is None else grad.float() for grad in grads)
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in given]
        foreach_copy_(wide, given)
        results = iter(wide)
        return None, *(None if grad is None else next(results) for grad in grads)


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


def derivatives(
    definition: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input that needs one, so that it can be differentiated again.

    grad is the gradient of definition(*inputs).
    """
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    gradients = iter(torch.autograd.grad(definition(*inputs), wanted, grad, create_graph=True))
    return tuple(next(gradients) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
