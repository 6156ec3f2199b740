"""The optimiser of a run: AdamW, SGD, LAMB or Muon, which parameters it decays, and gradient clipping.

Weight decay is decoupled: it does not pass through the gradient, and is multiplied by the scheduled learning rate. So
the paper's weight decay 0.1 is 0.1 here; the original code's setting is 0.1 x the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import UsageError
from vitrail.training.optim.layer_decay import by_factor, layer_factors, slow_rows
from vitrail.training.optim.muon import stacked_matrices
from vitrail.training.run import Optim
from vitrail.words import shown

_TABLES = (nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, torch_private.NormBase)


def is_kernel(module: nn.Module, name: str) -> bool:
    """Return whether weight decay acts on the parameter `name` that `module` itself owns.

    A kernel is the matrix or convolution with which a layer multiplies its input. The original code calls it `kernel`,
    torch calls it `weight` (`in_proj_weight` and others in nn.MultiheadAttention). These are not kernels: biases, the
    scales of norms and LayerScale, class and register tokens, the query of a MAP head, tables of positions.
    """
    if isinstance(module, _TABLES):
        return False
    named = name == "weight" or (isinstance(module, nn.MultiheadAttention) and name.endswith("_weight"))
    return named and getattr(module, name).ndim >= 2


def split_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return ({name: kernel}, {name: other parameter}): each trainable parameter of `module` once."""
    kernels: dict[str, nn.Parameter] = {}
    others: dict[str, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                side = kernels if is_kernel(owner, name) else others
                side[f"{prefix}.{name}" if prefix else name] = parameter
    return kernels, others


def update(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Move the weights if `finite`, a bool scalar on their device, is true; else change nothing.

    With torch's fused kernels and ours the device decides, and nothing waits for it: they read `found_inf` (as for
    torch's GradScaler). An optimiser that does not read it is called only after the device has answered.
    """
    if torch_private.reads_found_inf(optimizer):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()


def build_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the optimiser of all trainable parameters of `module` (a model, or an objective that owns one).

    `optim.build` makes it. Weight decay acts only on the group "kernels"; the other parameters are the group "others".
    With `optim.layer_decay` there are such groups for each learning rate; "factor" is a group's share of the largest
    rate (`training.optim.layer_decay`). For Muon there are such groups for each number of "parts"
    (`training.optim.muon`). Raises UsageError if a value is out of range, if nothing is trainable, or if Muon finds no
    matrix that it trains.
    """
    kernels, others = (list(side.values()) for side in split_parameters(module))
    if not kernels and not others:
        raise UsageError("nothing to train: every parameter of the model is frozen")
    factors = {} if optim.layer_decay in (None, 1) else layer_factors(module, optim.layer_decay)
    matrices = _matrices(module, kernels) if optim.name == "muon" else {}
    groups: list[dict[str, Any]] = []
    for name, side, decay in (("kernels", kernels, optim.weight_decay), ("others", others, 0.0)):
        for factor, parameters in by_factor(side, factors).items():
            rate = {"factor": factor, "lr": optim.lr * factor} if factors else {}
            group = {"name": name, "params": parameters, "weight_decay": decay, **rate}
            groups += _by_parts(group, matrices) if matrices else [group]
    optimizer = optim.build(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{type(optim).__name__}.build returned {shown(optimizer)}; it must return a torch optimiser")
    slow_rows(optimizer, factors)
    return optimizer


def _matrices(module: nn.Module, kernels: list[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Return the `stacked_matrices` among `kernels`. Raises UsageError if there are none."""
    stacked = stacked_matrices(module)
    matrices = {parameter: stacked[parameter] for parameter in kernels if parameter in stacked}
    if not matrices:
        raise UsageError(
            "optim.name is muon, which trains the dense layers of a Vision Transformer's blocks, but this run trains "
            "none: use adamw"
        )
    return matrices


def _by_parts(group: dict[str, Any], matrices: dict[nn.Parameter, int]) -> list[dict[str, Any]]:
    """Return `group` cut into groups whose weights have the same number of matrices; 0 is for all other parameters."""
    parts = sorted({matrices.get(parameter, 0) for parameter in group["params"]})
    members = {n: [parameter for parameter in group["params"] if matrices.get(parameter, 0) == n] for n in parts}
    return [{**group, "params": members[n], "parts": n} for n in parts]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, decay: float | None = None) -> None:
    """Set the learning rate of the next step, and the weight decay of kernels unless it is None.

    With layer-wise decay `rate` is the largest rate, and each group has its share of it.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
        if decay is not None and group["name"] == "kernels":
            group["weight_decay"] = decay


def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, a float32 scalar on their device; 0 if there are none.

    If gradients are sharded over the processes, every process gets the norm of the whole gradients.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch_private.foreach_norm([world.local(gradient) for gradient in gradients], 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return world.sum_(norm.square()).sqrt() if world.is_sharded(gradients[0]) else norm


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`, and return the norm before.

    Without `max_norm` only the norm is computed. If the norm is not finite, the gradients do not change, and the caller
    must not update with them. Nothing here waits for the device.
    """
    parameters = list(parameters)
    norm = global_norm(parameters)
    gradients = [world.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if max_norm is not None and gradients:
        factor = torch.where(torch.isfinite(norm), (max_norm / norm).clamp(max=1), 1)
        torch_private.foreach_mul_(gradients, factor)
    return norm
