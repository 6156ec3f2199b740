"""The update rules that torch lacks: SGD with decoupled weight decay, LAMB, and Muon.

All run on torch's fused kernels, for which the device decides whether an update is finite. If parameters are sharded
over the processes, each process updates its part of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail import torch_private, world
from vitrail.device import fast_bf16

MOMENTUM = 0.95
"""Share of the momentum that each step of Muon keeps, as published."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in the published polynomial, which moves singular values into 0.7 ... 1.2."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""Norm by which a momentum is divided at least, so that zeros stay zeros."""
LENGTH = 0.2
"""Usual root mean square of AdamW's update before the learning rate (Liu et al.)."""


class FusedRule(torch.optim.Optimizer):
    """An optimiser that updates the parameters of a group together, unless the device says that this is not finite."""

    _step_supports_amp_scaling = True  # torch's mark of kernels that read `found_inf`
    found_inf: Tensor | None = None
    """Float scalar on the device of the weights. If it is 1, the next step changes nothing."""
    grad_scale: Tensor | None = None
    """Float scalar on the device of the weights, by which the next step divides the gradients."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if parameters := with_gradients(group):
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update the parameters of one group, all of which have gradients."""
        raise NotImplementedError

    def _states(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Return this process's part of the state `name` of each parameter, which begins as zeros."""
        for parameter in parameters:
            if self.state[parameter].get(name) is None:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [world.local_part(self.state[parameter][name]) for parameter in parameters]

    def _shrink(self, parameters: list[Tensor], share: float) -> None:
        """Multiply weights by 1 - share, unless the update is not finite."""
        factor: float | Tensor = 1 - share
        if self.found_inf is not None:
            factor = torch.where(self.found_inf > 0, 1.0, factor)
        torch_private.foreach_mul_(parameters, factor)


def with_gradients(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _here(parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return this process's part of parameters and of their gradients."""
    gradients = [world.local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [world.local_part(parameter) for parameter in parameters], gradients


class SGD(FusedRule, torch.optim.SGD):  # type: ignore[misc]
    """SGD with momentum and decoupled weight decay, as in BiT, computed by torch's fused kernel.

    torch's own step adds the weight decay to the gradient, so that it passes through the momentum. Its fused kernel
    does not know parameters that are sharded over the processes, so each process gives it its part of them.
    """

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        buffers = self._states(parameters, "momentum_buffer") if group["momentum"] else []
        parameters, gradients = _here(parameters)
        if group["weight_decay"]:
            self._shrink(parameters, group["lr"] * group["weight_decay"])
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
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )


class LAMB(FusedRule):
    """Adam's direction, with a length in proportion to the weights (You et al. 2020, algorithm 2).

    The update of each tensor x is -lr * |x| / |u| * u, with u = m / (sqrt(v) + eps) + weight_decay * x. m and v are
    Adam's bias-corrected moments. The trust ratio |x| / |u| is 1 if either norm is 0; the norms are those of whole
    tensors. A group with `adapt=False` has no trust ratio: published code and recipes (A2, DeiT-III) use none for
    biases and norms.
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

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        first, second = self._states(parameters, "first"), self._states(parameters, "second")
        like = parameters[0]
        parameters, gradients = _here(parameters)
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
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        if group["adapt"]:
            torch_private.foreach_mul_(update, _trust_ratios(parameters, update, finite, like))
        else:
            torch_private.foreach_mul_(update, finite)
        torch_private.foreach_add_(parameters, update, alpha=-group["lr"])


def _trust_ratios(parameters: list[Tensor], update: list[Tensor], finite: Tensor, like: Tensor) -> list[Tensor]:
    """Return the trust ratio of each tensor times `finite`, from the norms of whole tensors if `like` is sharded."""
    norms = torch.stack([*torch_private.foreach_norm(parameters), *torch_private.foreach_norm(update)])
    if world.is_sharded(like):
        norms = world.sum_parts_(norms.square(), like).sqrt()
    weights, lengths = norms.chunk(2)
    return list((torch.where((weights > 0) & (lengths > 0), weights / lengths, 1) * finite).unbind())


class Muon(FusedRule):
    """Muon (Jordan et al. 2024, "An optimizer for hidden layers") for groups with `parts`, AdamW with `parts=0`.

    The momentum of a matrix is made orthogonal. The rule is for the matrices of hidden layers. Everything else is
    updated by AdamW, as in that publication. Steps have the length that AdamW's steps usually have, 0.2 *
    sqrt(max(rows, columns)) times the learning rate, so that AdamW's learning rate and weight decay can be used (Liu et
    al. 2025, "Muon is scalable for LLM training", equation 4).

    `parts` is the number of matrices that each weight [rows, columns] of a group stores one below the other. The update
    of a matrix x with gradient g is m <- 0.95 m + 0.05 g, then x <- x - lr * weight_decay * x - lr * 0.2 *
    sqrt(max(rows, columns)) * orthogonal(0.05 g + 0.95 m). Each process makes its share of the matrices orthogonal and
    gathers the others. If parameters are sharded over the processes, each process gathers the updates before, and moves
    its part of the weights.
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

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; the matrices of all groups are made orthogonal together."""
        momenta: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]] = []
        for group in self.param_groups:
            parameters = with_gradients(group)
            if parameters and group["parts"]:
                momenta.append((group, parameters, self._momenta(parameters)))
            elif parameters:
                self._update(group, parameters)
        orthogonalise_([part for group, _, updates in momenta for x in updates for part in x.chunk(group["parts"])])
        for group, parameters, updates in momenta:
            self._move(group, parameters, updates)

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        """Add the gradients to the momenta. Return Nesterov's momenta, whole ones if parameters are sharded."""
        momenta = self._states(parameters, "momentum_buffer")
        _, given = _here(parameters)
        if self.grad_scale is not None:
            given = list(torch_private.foreach_div(given, self.grad_scale))
        if self.found_inf is not None:  # a momentum does not change if it is its own gradient
            given = [torch.where(self.found_inf > 0, old, new) for old, new in zip(momenta, given, strict=True)]
        torch_private.foreach_lerp_(momenta, given, 1 - MOMENTUM)
        updates = torch_private.foreach_lerp(given, momenta, MOMENTUM)
        return [world.whole(update, like=parameter) for update, parameter in zip(updates, parameters, strict=True)]

    def _move(self, group: dict[str, Any], parameters: list[Tensor], updates: list[Tensor]) -> None:
        """Shrink the weights and subtract the updates, unless `found_inf` is 1."""
        if world.is_sharded(parameters[0]):
            updates = [world.copied_like(update, like) for update, like in zip(updates, parameters, strict=True)]
        updates = [world.local_part(update) for update in updates]
        parameters, _ = _here(parameters)
        if self.found_inf is not None:
            torch_private.foreach_mul_(updates, 1 - self.found_inf)
        if group["weight_decay"]:
            self._shrink(parameters, group["lr"] * group["weight_decay"])
        torch_private.foreach_add_(parameters, updates, alpha=-group["lr"])

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update the parameters of one group by torch's fused AdamW."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        steps = [self.state[parameter]["step"] for parameter in parameters]
        first, second = self._states(parameters, "exp_avg"), self._states(parameters, "exp_avg_sq")
        parameters, gradients = _here(parameters)
        torch_private.foreach_add_(steps, 1)
        torch_private.fused_adamw_(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            torch_private.foreach_sub_(steps, [self.found_inf] * len(steps))


def orthogonalise_(matrices: list[Tensor]) -> None:
    """Replace each matrix by about the nearest orthogonal one times 0.2 * sqrt(max(rows, columns)), in place.

    Matrices of the same shape are multiplied as one batch, which is faster on CPUs and on GPUs. Every process of a run
    has the same matrices, and computes an equal share of each batch.
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for shape, found in by_shape.items():
        each = -(-len(found) // world.size())
        share = found[world.rank() * each :][:each]
        share += [torch.zeros_like(found[0])] * (each - len(share))  # for all processes the same number
        results = world.joined(newton_schulz(torch.stack(share)))[: len(found)]
        results = results.to(found[0].dtype) * (LENGTH * max(shape) ** 0.5)
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
