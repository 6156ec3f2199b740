"""An optimiser of one's own: `vitrail train digits --optim lion:Lion --optim.lr 1e-4`."""

from dataclasses import dataclass

import torch

from vitrail import Optim
from vitrail.ranges import Decay, Positive


class SignedMomentum(torch.optim.Optimizer):
    """The update of Lion (Chen et al. 2023): the sign of a momentum, with decoupled weight decay."""

    @torch.no_grad()
    def step(self, closure=None):
        """Move each parameter that has a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                mean = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(torch.lerp(weight.grad, mean, first).sign(), alpha=group["lr"])
                mean.lerp_(weight.grad, 1 - second)


@dataclass(frozen=True)
class Lion(Optim):
    """Lion. Its learning rate is three to ten times smaller than that of AdamW."""

    lr: Positive = 1e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Share of the momentum in the update, and decay rate of the momentum."""

    def build(self, groups):
        """Return the optimiser of these groups of parameters."""
        return SignedMomentum(groups, {"lr": self.lr, "betas": self.betas})
