"""Muon: the momentum of a matrix, made orthogonal (Jordan et al. 2024, "Muon: An optimizer for hidden layers").

The rule is for the matrices of hidden layers. Everything else is updated by AdamW, as in that publication. Steps have
the length that AdamW's steps usually have, 0.2 * sqrt(max(rows, columns)) times the learning rate, so that AdamW's
learning rate and weight decay can be used (Liu et al. 2025, "Muon is scalable for LLM training", equation 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.device import fast_bf16
from vitrail.model.attention import Attention
from vitrail.model.block import Block, SwiGLU
from vitrail.model.low_rank import LowRank

MOMENTUM = 0.95
"""Share of the momentum that each step keeps, as published."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in the published polynomial, which moves singular values into 0.7 ... 1.2."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""Norm by which a momentum is divided at least, so that zeros stay zeros."""
LENGTH = 0.2
"""Usual root mean square of AdamW's update before the learning rate (Liu et al.)."""


class Muon(torch.optim.Optimizer):
    """Muon for groups with `parts`, AdamW for groups with `parts=0`.

    `parts` is the number of matrices that each weight [rows, columns] of a group stores one below the other. The update
    of a matrix x with gradient g is m <- 0.95 m + 0.05 g, then x <- x - lr * weight_decay * x - lr * 0.2 *
    sqrt(max(rows, columns)) * orthogonal(0.05 g + 0.95 m). If parameters are sharded over the processes, each process
    gathers the updates, makes them orthogonal and moves its part of the weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        parts: int = 0,
    ) -> None:
        # by the mark "fused", torch loads the steps of a checkpoint onto the device, where the fused kernel needs them
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, parts=parts, fused=True)
        super().__init__(params, defaults)

    _step_supports_amp_scaling = True  # torch's mark of kernels that read `found_inf`
    found_inf: Tensor | None = None
    """Float scalar on the device of the weights. If it is 1, the next step changes nothing."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        momenta: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["parts"]:
                momenta.append((group, parameters, self._momenta(parameters)))
            elif parameters:
                self._adamw(group, parameters)
        orthogonalise_([part for group, _, updates in momenta for x in updates for part in x.chunk(group["parts"])])
        for group, parameters, updates in momenta:
            self._move(group, parameters, updates)

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        """Add the gradients to the momenta. Return Nesterov's momenta, whole ones if parameters are sharded."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        here, given = [[world.local(tensor) for tensor in tensors] for tensors in (momenta, gradients)]
        if self.found_inf is not None:  # a momentum does not change if it is its own gradient
            given = [torch.where(self.found_inf > 0, old, new) for old, new in zip(here, given, strict=True)]
        torch_private.foreach_lerp_(here, given, 1 - MOMENTUM)
        updates = torch_private.foreach_lerp(given, here, MOMENTUM)
        return [world.whole(update, like=momentum) for update, momentum in zip(updates, momenta, strict=True)]

    def _move(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        """Shrink the weights and subtract the updates, unless `found_inf` is 1."""
        if world.is_sharded(parameters[0]):
            updates = [world.copied_like(update, like) for update, like in zip(updates, parameters, strict=True)]
        updates = [world.local(update) for update in updates]
        parameters = [world.local(parameter) for parameter in parameters]
        if self.found_inf is not None:
            torch_private.foreach_mul_(updates, 1 - self.found_inf)
        if group["weight_decay"]:
            shrinking: float | Tensor = 1 - group["lr"] * group["weight_decay"]
            if self.found_inf is not None:
                shrinking = torch.where(self.found_inf > 0, 1.0, shrinking)
            torch_private.foreach_mul_(parameters, shrinking)
        torch_private.foreach_add_(parameters, updates, alpha=-group["lr"])

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update the parameters of one group by torch's fused AdamW."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch_private.foreach_add_(steps, 1)
        torch_private.fused_adamw_(
            [world.local(parameter) for parameter in parameters],
            [world.local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [world.local(state["exp_avg"]) for state in states],
            [world.local(state["exp_avg_sq"]) for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            torch_private.foreach_sub_(steps, [self.found_inf] * len(steps))


def orthogonalise_(matrices: list[Tensor]) -> None:
    """Replace each matrix by about the nearest orthogonal one times 0.2 * sqrt(max(rows, columns)), in place.

    Matrices of the same shape are multiplied as one batch, which is faster on CPUs and on GPUs.
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for shape, found in by_shape.items():
        results = newton_schulz(torch.stack(found)).to(found[0].dtype) * (LENGTH * max(shape) ** 0.5)
        torch_private.foreach_copy_(found, list(results.unbind()))


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return matrices [number, rows, columns] with all singular values moved near 1.

    Computed and returned in bfloat16, as published, where the device is fast at it, else in float32. The polynomial
    multiplies from the shorter side, so that nothing is transposed in memory.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16 if fast_bf16(matrices.device) else torch.float32)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        squares = x.mT @ x if is_tall else x @ x.mT
        factors = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factors, beta=a) if is_tall else torch.baddbmm(x, factors, x, beta=a)
    return x


def stacked_matrices(module: nn.Module) -> dict[Tensor, int]:
    """Return {weight: number of matrices that it stores one below the other} for the dense layers of encoder blocks.

    Query, key and value are three linear maps, and gate and value of a SwiGLU are two (Eq. 5; Shazeer 2020). They are
    stored as one weight for speed alone. Made orthogonal together they would share their singular values, so that the
    map with the largest gradient would take the others' part of the step. The heads of a map stay together, as in the
    publications. The factors of low-rank updates are no layers of their own, and are left out.
    """
    found: dict[Tensor, int] = {}
    factors = {part for parent in module.modules() if isinstance(parent, LowRank) for part in parent.modules()}
    for block in (part for part in module.modules() if isinstance(part, Block)):
        for part in block.modules():
            if part in factors:
                continue
            if isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
                found[part.in_proj_weight] = 3
            elif isinstance(part, nn.Linear):
                found.setdefault(part.weight, 1)
            elif isinstance(part, Attention):
                found[part.qkv.weight] = 3
            elif isinstance(part, SwiGLU):
                found[part.fc1.weight] = 2
    return found
