"""The layers of all networks: torch's own dense layer and norms, and how they are created.

`dense` and `LayerNorm` are torch's computations. Where `vitrail.model.fast.layers` applies, they are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.compute import HAS_FAST
from vitrail.model.variants import Origin

if HAS_FAST:
    from vitrail.model.fast import layers as fast


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    if HAS_FAST and fast.applies(x):
        return fast.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def dense(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x) of a dense layer."""
    if HAS_FAST and (cast := fast.cast_of(layer)):
        return F.linear(x, *cast)
    if HAS_FAST and fast.is_plain(layer) and fast.applies(x):
        return fast.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]
    return layer(x)  # type: ignore[no-any-return]


def dense_after_gelu(layer: nn.Module, x: Tensor, approximate: str = "none") -> Tensor:
    """Return layer(GELU(x)) of a dense layer."""
    if HAS_FAST and fast.is_plain(layer) and fast.applies(x):
        return fast.linear(x, layer.weight, layer.bias, gelu=approximate)  # type: ignore[arg-type]
    return dense(layer, F.gelu(x, approximate=approximate))


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


class ConvTranspose2d(_NoValuesOnMeta, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d`."""


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


def new_norm(origin: Origin, features: int) -> nn.Module:
    """Return the norm over the last dimension of a config's kind and epsilon."""
    return (RMSNorm if origin.norm == "rms" else LayerNorm)(features, eps=origin.norm_eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., width] -> the same shape; fast, in the type of the next matrix product."""
        if HAS_FAST and fast.applies_to_norm(input):
            return fast.layer_norm(input, self.weight, self.bias, self.eps)
        if HAS_FAST and (cast := fast.cast_of(self)):
            return fast.layer_norm(input, *cast, self.eps)
        return super().forward(input)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, computed in the type of its weight: autocast may give it bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        return super().forward(x.to(self.weight.dtype))
