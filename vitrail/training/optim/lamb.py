"""LAMB: Adam's direction, with a length in proportion to the weights (You et al. 2020, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail import torch_private, world


class LAMB(torch.optim.Optimizer):
    """The update of each tensor x is -lr * |x| / |u| * u, with u = m / (sqrt(v) + eps) + weight_decay * x.

    m and v are Adam's bias-corrected moments. The trust ratio |x| / |u| is 1 if either norm is 0. A group with
    `adapt=False` has no trust ratio: published code and recipes (A2, DeiT-III) use none for biases and norms. If
    parameters are sharded over the processes, each process updates its part, with the norms of whole tensors.
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

    _step_supports_amp_scaling = True  # torch's mark of kernels that read `found_inf`
    found_inf: Tensor | None = None
    """Float scalar on the device of the weights. If it is 1, the next step changes nothing."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)

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
        is_sharded = world.is_sharded(parameters[0])
        parameters = [world.local(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        one = torch.ones((), device=parameters[0].device)
        finite = one if self.found_inf is None else 1 - self.found_inf
        # the number of steps stays on the device too: only the device knows which updates were finite
        steps = torch.as_tensor(group["step"], dtype=one.dtype, device=one.device)
        group["step"] = steps + finite

        # one step of Adam with learning rate -1, from weight_decay * x, gives u
        update = list(torch_private.foreach_mul(parameters, group["weight_decay"]))
        torch_private.fused_adam_(
            update,
            gradients,
            first,
            second,
            [],
            [steps + 1] * len(update),
            lr=-1.0,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if group["adapt"]:
            torch_private.foreach_mul_(update, _trust_ratios(parameters, update, finite, is_sharded))
        else:
            torch_private.foreach_mul_(update, finite)
        torch_private.foreach_add_(parameters, update, alpha=-group["lr"])


def _trust_ratios(parameters: list[Tensor], update: list[Tensor], finite: Tensor, is_sharded: bool) -> list[Tensor]:
    """Return the trust ratio of each tensor times `finite`, from the norms of whole tensors if they are sharded."""
    norms = torch.stack([*torch_private.foreach_norm(parameters), *torch_private.foreach_norm(update)])
    if is_sharded:
        norms = world.sum_(norms.square()).sqrt()
    weights, lengths = norms.chunk(2)
    return list((torch.where((weights > 0) & (lengths > 0), weights / lengths, 1) * finite).unbind())
