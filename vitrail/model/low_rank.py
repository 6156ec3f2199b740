"""Low-rank updates of dense layers (LoRA, Hu et al. 2021, section 4.1): W + (alpha / rank) B A; only A and B learn.

`down` is the paper's A [rank, in] and `up` its B [out, rank]. `down` starts with Kaiming's uniform values, as in the
authors' code, and `up` with zeros, so that a network computes what it computed before its first step. In training, W
and the update are two paths: the gradient of W, a third of the layer's work, is never computed. Afterwards `merged`
adds the update to W, and the network is a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import dense, linear, new_linear

DOWN, UP = ".lora.down.weight", ".lora.up.weight"
"""Endings of the names of an update's two factors; before them stands the name of the layer."""


class LowRank(nn.Module):
    """The update of a layer, x [..., in] -> [..., out]: both factors, and `scale` = alpha / rank."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.down = new_linear(layer.in_features, rank, bias=False, like=layer.weight)
        self.up = new_linear(rank, layer.out_features, bias=False, like=layer.weight)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return dense(self.up, dense(self.down, x)) * self.scale

    def factors(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return down [rank, in] and up [out, rank], which contains the scale and `rows` [out], a factor per output."""
        return self.down.weight, self.up.weight * (rows * self.scale)[:, None]


class Adapted(nn.Linear):
    """A dense layer with the parameters of `layer` and an update of low rank, x [..., in] -> [..., out]."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora = LowRank(layer, rank, scale)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return linear(input, self.weight, self.bias) + self.lora(input)


def adapt(model: nn.Module, parts: Iterable[nn.Module], rank: int, scale: float) -> int:
    """Give every dense layer of `model` within its submodules `parts` an update, in place. Return their number.

    Raises UsageError if the rank is larger than a layer's smaller side: its update would not be of low rank.
    """
    layers = {layer for part in parts for layer in part.modules() if type(layer) is nn.Linear}
    smallest = min((min(layer.weight.shape) for layer in layers), default=rank)
    if rank > smallest:
        raise UsageError(
            f"lora_rank is {rank}, and the smallest adapted layer has {smallest} inputs or outputs: give a rank from 1 "
            f"to {smallest}"
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in layers:
                setattr(parent, name, Adapted(child, rank, scale))  # type: ignore[arg-type]
    return len(layers)


def separated(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of `model` without its updates, and the factors of the updates, both by name.

    Here `up` contains the scale: the update of a weight is up @ down.
    """
    scales = {f"{name}{UP}": layer.lora.scale for name, layer in model.named_modules() if isinstance(layer, Adapted)}
    state = model.state_dict()
    factors = {name: value * scales.get(name, 1.0) for name, value in state.items() if name.endswith((DOWN, UP))}
    return {name: value for name, value in state.items() if name not in factors}, factors


def misfit(factors: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> str:
    """Return the first name in `factors`, name -> shape, that is no part of an update of `weights`; "" for none."""
    for name in sorted(factors):
        layer = name.removesuffix(UP).removesuffix(DOWN)
        down, up = factors.get(layer + DOWN, ()), factors.get(layer + UP, ())
        weight = weights.get(f"{layer}.weight")
        fits = weight is not None and len(down) == len(up) == 2 and (up[0], down[1]) == tuple(weight.shape)
        if layer == name or not fits or up[1] != down[0]:
            return name
    return ""


def updated(tensors: Mapping[str, Tensor], factors: Collection[str]) -> dict[str, Tensor]:
    """Return `tensors` without the `factors` among them, which are added to the weights that they update."""
    weights = {name: tensor for name, tensor in tensors.items() if name not in factors}
    for layer in {name.removesuffix(UP) for name in factors if name.endswith(UP)}:
        weight = f"{layer}.weight"
        weights[weight] = merged(tensors[weight], tensors[layer + DOWN], tensors[layer + UP])
    return weights


def merged(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return weight [out, in] + up [out, rank] @ down [rank, in], the same bits on every machine.

    The ranks are added one by one, in float64: a matrix product rounds in an order of its own, and weights are compared
    by their checksum when another model is tuned from them.
    """
    total = weight.to(torch.float64)
    for column, row in zip(up.to(torch.float64).T, down.to(torch.float64), strict=True):
        total = total + column[:, None] * row
    return total.to(weight.dtype)
