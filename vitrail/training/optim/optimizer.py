"""The optimiser of a run: which parameters decay, AdamW, SGD or LAMB, and gradient clipping.

All three decay weights apart from the gradient ("decoupled") and in proportion to the scheduled learning
rate, so the paper's weight decay 0.1 is written 0.1 here; the original code writes 0.1 x the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import UsageError
from vitrail.training.optim.lamb import LAMB
from vitrail.training.optim.layer_decay import by_factor, layer_factors, slow_rows
from vitrail.training.run import Optim

_FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
_TABLES = (nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, torch_private.NormBase)


def is_kernel(module: nn.Module, name: str) -> bool:
    """Return whether weight decay acts on the parameter `name` that `module` itself owns.

    A kernel is the matrix or convolution that a layer multiplies its input with: what the original code calls
    `kernel` and torch calls `weight` (`in_proj_weight` and its kin in nn.MultiheadAttention). Biases, the
    scales of norms and LayerScale, tokens in front of the grid, MAP probe and tables of positions are not.
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


class SGD(torch.optim.SGD):
    """SGD with momentum whose weight decay, the group option `decay`, is decoupled as BiT's is.

    torch's own `weight_decay` is added to the gradient and so passes through the momentum; it stays 0 here.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["decay"] and parameters:
                torch_private.foreach_mul_(parameters, self._shrinking(group["lr"] * group["decay"]))
            for parameter in parameters if group["momentum"] else []:
                # the fused kernel takes no mixture of parameters that moved before and such that begin now
                if self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return super().step(closure)

    def _shrinking(self, share: float) -> float | Tensor:
        """Return the factor by which weights shrink; 1 where the update is not finite (see `update`)."""
        found: Tensor | None = getattr(self, "found_inf", None)
        return 1 - share if found is None else (1 - share * (1 - found.double())).float()


def update(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Move the weights if `finite`, a bool scalar on their device, is true; else change nothing.

    torch's fused kernels decide that on the device (`found_inf`, as its GradScaler uses it). LAMB, and SGD on sharded
    parameters, have no such kernel: they wait for the device.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()


def build_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the optimiser of all trainable parameters of `module` (a model, or an objective that owns one).

    AdamW and SGD run fused where the device has it (on CPUs, too: about three times as fast), SGD only on
    whole parameters: torch's fused kernel does not know those that are cut over processes. The group "kernels" decays
    and, in LAMB, has its updates scaled by the trust ratio; the group "others" does neither. With `optim.layer_decay`
    there are such groups for each rate, which "factor" gives as a share of the largest (`training.optim.layer_decay`).
    Raises UsageError where a value is out of range or nothing is trainable.
    """
    _check(optim)
    kernels, others = (list(side.values()) for side in split_parameters(module))
    if not kernels and not others:
        raise UsageError("nothing to train: every parameter of the model is frozen")
    if optim.layer_decay in (None, 1):
        return _optimizer(_groups(kernels, others, optim), optim)
    factors = layer_factors(module, optim.layer_decay)
    groups = [
        group | {"params": parameters, "factor": factor, "lr": optim.lr * factor}
        for group in _groups(kernels, others, optim)
        for factor, parameters in by_factor(group["params"], factors).items()
    ]
    optimizer = _optimizer(groups, optim)
    slow_rows(optimizer, factors)
    return optimizer


def _groups(kernels: list[nn.Parameter], others: list[nn.Parameter], optim: Optim) -> list[dict[str, Any]]:
    """The groups that are not empty, "kernels" and "others"."""
    decay = optim.weight_decay
    groups: list[dict[str, Any]] = [
        {"name": "kernels", "params": kernels, "weight_decay": decay},
        {"name": "others", "params": others, "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        for group in groups:
            group |= {"decay": group["weight_decay"], "weight_decay": 0.0}
    if optim.name == "lamb":
        for group in groups:
            group["adapt"] = group["name"] == "kernels"
    return [group for group in groups if group["params"]]


def _optimizer(groups: list[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    if optim.name == "sgd":
        fused = fused and not any(map(world.is_sharded, parameters))
        return SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
    if optim.name == "lamb":
        return LAMB(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)


def _check(optim: Optim) -> None:
    nearer = optim.layer_decay
    limits = {
        "lr": (optim.lr, optim.lr >= 0, "at least 0"),
        "weight_decay": (optim.weight_decay, optim.weight_decay >= 0, "at least 0"),
        "weight_decay_end": (optim.weight_decay_end, (optim.weight_decay_end or 0) >= 0, "at least 0, or null"),
        "layer_decay": (nearer, nearer is None or 0 < nearer <= 1, "above 0 and at most 1, or null for one rate"),
        "betas": (optim.betas, all(0 <= beta < 1 for beta in optim.betas), "two numbers in [0, 1)"),
        "momentum": (optim.momentum, 0 <= optim.momentum < 1, "in [0, 1)"),
        "eps": (optim.eps, optim.eps > 0, "above 0"),
        "clip": (optim.clip, optim.clip is None or optim.clip > 0, "above 0, or null for no clipping"),
    }
    for name, (value, good, valid) in limits.items():
        if not good:
            raise UsageError(f"optim.{name} is {value}; it must be {valid}")
    if optim.name not in ("adamw", "sgd", "lamb"):
        raise UsageError(f"no optimiser is named {optim.name!r}. Valid: adamw, sgd, lamb")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, decay: float | None = None) -> None:
    """Make the next `step` use this learning rate, and on kernels this weight decay, where given.

    With layer-wise decay it is the largest rate, and each group has its share of it.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
        if decay is not None and group["name"] == "kernels":
            group["decay" if "decay" in group else "weight_decay"] = decay


def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, a float32 scalar on their device; 0 if there are none.

    Of gradients that are cut over the processes it is the norm of the whole, on every process alike.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch_private.foreach_norm([world.local(gradient) for gradient in gradients], 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return world.sum_(norm.square()).sqrt() if world.is_sharded(gradients[0]) else norm


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`; return the norm before.

    Without `max_norm`, only the norm is computed. A norm that is not finite leaves the gradients as they are,
    and the caller looks at the norm before it updates. Nothing here waits for the device.
    """
    parameters = list(parameters)
    norm = global_norm(parameters)
    gradients = [world.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if max_norm is not None and gradients:
        factor = torch.where(torch.isfinite(norm), (max_norm / norm).clamp(max=1), 1)
        torch_private.foreach_mul_(gradients, factor)
    return norm
