"""LAMB: Adam's direction, with a length in proportion to the weights (You et al. 2020, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail import torch_private, world


class LAMB(torch.optim.Optimizer):
    """The update of each tensor x is -lr * |x| / |u| * u, with u = m / (sqrt(v) + eps) + weight_decay * x.

    m and v are Adam's moments, bias-corrected. The trust ratio |x| / |u| is 1 where either norm is 0. A group
    with `adapt=False` leaves it out: published code and recipes (A2, DeiT-III) do so for biases and norms. Parameters
    may be cut over the processes: each updates its part, and the norms are those of the whole.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adapt=adapt, step=0)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                group["step"] += 1
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "first": torch.zeros_like(parameter),
                    "second": torch.zeros_like(parameter),
                }
        gradients = [world.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        first = [world.local(self.state[parameter]["first"]) for parameter in parameters]
        second = [world.local(self.state[parameter]["second"]) for parameter in parameters]
        cut = world.is_sharded(parameters[0])
        parameters = [world.local(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        torch_private.foreach_lerp_(first, gradients, 1 - beta1)
        torch_private.foreach_mul_(second, beta2)
        torch_private.foreach_addcmul_(second, gradients, gradients, 1 - beta2)

        # u = (m / c1) / (sqrt(v / c2) + eps), built in one set of temporaries
        correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        update = list(torch_private.foreach_sqrt(second))
        torch_private.foreach_div_(update, math.sqrt(correction2))
        torch_private.foreach_add_(update, group["eps"])
        torch_private.foreach_mul_(update, correction1)
        torch_private.foreach_reciprocal_(update)
        torch_private.foreach_mul_(update, first)
        if group["weight_decay"]:
            torch_private.foreach_add_(update, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            torch_private.foreach_mul_(update, _trust_ratios(parameters, update, cut))
        torch_private.foreach_add_(parameters, update, alpha=-group["lr"])


def _trust_ratios(parameters: list[Tensor], update: list[Tensor], cut: bool) -> list[Tensor]:
    """One of each tensor; where they are `cut`, these are parts, and the norms are of all processes' together."""
    norms = torch.stack([*torch_private.foreach_norm(parameters), *torch_private.foreach_norm(update)])
    if cut:
        norms = world.sum_(norms.square()).sqrt()
    weights, lengths = norms.chunk(2)
    return list(torch.where((weights > 0) & (lengths > 0), weights / lengths, 1).unbind())
