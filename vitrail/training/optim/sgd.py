"""SGD with decoupled weight decay."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail import torch_private, world


class SGD(torch.optim.SGD):
    """SGD with momentum and decoupled weight decay, as in BiT, computed by torch's fused kernel.

    torch's own step adds the weight decay to the gradient, so that it passes through the momentum. Its fused kernel
    does not know parameters that are sharded over the processes, so each process gives it its part of them.
    """

    found_inf: Tensor | None = None
    """Float scalar on the device of the weights. If it is 1, the next step changes nothing."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters if group["momentum"] else []:
                if self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [world.local(self.state[p]["momentum_buffer"]) for p in parameters if group["momentum"]]
            gradients = [world.local(parameter.grad) for parameter in parameters]
            parameters = [world.local(parameter) for parameter in parameters]
            if group["weight_decay"]:
                torch_private.foreach_mul_(parameters, self._shrinking(group["lr"] * group["weight_decay"]))
            torch_private.fused_sgd_(
                parameters,
                gradients,
                buffers,
                weight_decay=0.0,
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=self.found_inf,
            )

    def _shrinking(self, share: float) -> float | Tensor:
        """Return the factor by which weights shrink: 1 if the update is not finite."""
        return 1 - share if self.found_inf is None else torch.where(self.found_inf > 0, 1.0, 1 - share)
