"""The optimiser of a run: its groups of parameters, and what a step does with their gradients.

AdamW, SGD, LAMB or Muon. Weight decay is decoupled: it does not pass through the gradient, and is multiplied by the
scheduled learning rate. So the paper's weight decay 0.1 is 0.1 here; the original code's setting is 0.1 x the learning
rate.

Layer-wise decay of the learning rate (`layer_factors`): the nearer a parameter is to the image, the slower it learns. A
parameter's rate is lr * decay ** (layers + 1 - depth), as in the fine-tuning of BEiT (Bao et al. 2022) and MAE (He
et al. 2022, table 9). The stem, tokens and positions have depth 0. Block i, counted from 0, has depth i + 1.
Everything after the blocks has depth layers + 1 and learns at lr. Decoupled weight decay is scaled in the same way.

Published code differs in two places. Here both are as in BEiT and MAE, because the published results belong to that:

* The final norm learns with the head. timm's `param_groups_layer_decay` counts it as part of the last block.
* Positions that all layers share (`place` "shared") have no depth of their own and learn at lr, as BEiT's shared
  table does. timm counts them as part of the patch embedding.

The branches of a parallel block and the two halves of an axial block have their block's depth. A stem of many stages,
such as a hybrid's ResNet, has depth 0 as a whole. Positions with a table for each layer are one parameter here; each
layer's table has that layer's depth (`slow_rows`). Parts of an objective besides the network (decoder, projection,
classifier of tokens) learn at lr. The [mask] embedding, which replaces patch embeddings, has depth 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import UsageError
from vitrail.model.attention import Attention
from vitrail.model.block import Block, SwiGLU
from vitrail.model.low_rank import LowRank
from vitrail.model.posemb import Relative, RelativeBias
from vitrail.model.vit import ViT
from vitrail.training.run import Optim
from vitrail.words import shown

_TABLES = (nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, torch_private.NormBase)
FIRST_SCALE = 2.0**16
"""First factor of a loss in float16; it is found within as many steps as it must be halved."""
HALVINGS = 16
"""Number of halvings down to a factor of 1. So many steps more may overflow in sequence before a run has diverged."""
GROW_EVERY = 2000
"""Number of finite steps after which the factor is doubled."""
EMBEDDING = ("stem", "cls", "dist", "registers", "patch_norm", "pre_norm")
"""Parts of a `ViT` that have depth 0, positions aside."""

Factors = Mapping[nn.Parameter, tuple[float, ...]]


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


def update(optimizer: torch.optim.Optimizer, finite: Tensor, divisor: Tensor | None = None) -> None:
    """Move the weights if `finite`, a bool scalar on their device, is true; else change nothing.

    The gradients are first divided by `divisor` (see `divisor_of_gradients`). With torch's fused kernels and ours the
    device decides and divides, and nothing waits for it: they read `found_inf` and `grad_scale` (as for torch's
    GradScaler), so that no gradient is read for the division alone. An optimiser that does not read them is called only
    after the device has answered.
    """
    if torch_private.reads_found_inf(optimizer):
        optimizer.found_inf, optimizer.grad_scale = (~finite).float(), divisor  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        if divisor is not None:
            every = (each.grad for group in optimizer.param_groups for each in group["params"])
            torch_private.foreach_div_([world.local_part(each) for each in every if each is not None], divisor)
        optimizer.step()


def build_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the optimiser of all trainable parameters of `module` (a model, or an objective that owns one).

    `optim.build` makes it. Weight decay acts only on the group "kernels"; the other parameters are the group "others".
    With `optim.layer_decay` there are such groups for each learning rate; "factor" is a group's share of the largest
    rate. For Muon there are such groups for each number of "parts". Raises UsageError if a value is out of range, if
    nothing is trainable, or if Muon finds no matrix that it trains.
    """
    kernels, others = (list(side.values()) for side in split_parameters(module))
    if not kernels and not others:
        raise UsageError("nothing to train: every parameter of the model is frozen")
    factors = {} if optim.layer_decay in (None, 1) else layer_factors(module, optim.layer_decay)
    matrices = _matrices(module, kernels) if optim.name == "muon" else {}
    groups: list[dict[str, Any]] = []
    for name, side, decay in (("kernels", kernels, optim.weight_decay), ("others", others, 0.0)):
        alike: dict[tuple[float, int], list[nn.Parameter]] = {}
        for parameter in side:  # if its rows have different factors, the largest of them is that of its group
            key = max(factors.get(parameter, (1.0,))), matrices.get(parameter, 0)
            alike.setdefault(key, []).append(parameter)
        for factor, parts in sorted(alike):
            rate = {"factor": factor, "lr": optim.lr * factor} if factors else {}
            stored = {"parts": parts} if matrices else {}
            groups.append({"name": name, "params": alike[factor, parts], "weight_decay": decay, **rate, **stored})
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
    norms = torch_private.foreach_norm([world.local_part(gradient) for gradient in gradients], 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return world.sum_parts_(norm.square(), gradients[0]).sqrt() if world.is_sharded(gradients[0]) else norm


class LossScale:
    """The factor of the loss with which float16 neither loses small gradients nor overflows, on the device.

    A step that is not finite halves it; `GROW_EVERY` finite steps in sequence double it, as torch's GradScaler does.
    All processes find the same norm, and so have the same factor.

    images: Number of images whose losses are summed before gradients are divided by it (see
    `vitrail.training.step.backward`); the factor of each image's gradient is then as that of a mean.
    """

    def __init__(self, device: torch.device, images: int = 1) -> None:
        self.value = torch.full((), FIRST_SCALE / images, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, finite: Tensor) -> None:
        """Follow a step, which was `finite` (a bool scalar on the device) or changed nothing."""
        torch_private.amp_update_scale_(self.value, self._good, (~finite).float(), GROW_EVERY)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self.value.copy_(state["value"])
        self._good.copy_(state["good"])


@torch.no_grad()
def divisor_of_gradients(
    parameters: Iterable[Tensor], max_norm: float | None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the global norm of all gradients, and the number by which they must be divided: it clips them.

    Afterwards their norm is at most `max_norm`. `scale` is a factor of the gradients, which is in neither norm. The
    divisor is None with neither. If the norm is not finite, the caller must not update with the gradients. Nothing here
    waits for the device.
    """
    norm = global_norm(parameters)
    if scale is not None:
        norm = norm / scale
    if max_norm is None:
        return norm, scale
    clipping = torch.where(torch.isfinite(norm), (norm / max_norm).clamp(min=1), 1)
    return norm, clipping if scale is None else clipping * scale


def layer_factors(module: nn.Module, decay: float) -> dict[nn.Parameter, tuple[float, ...]]:
    """Return the factor of the learning rate for each parameter of `module`; the largest is 1.

    `module` is a ViT, or an objective that owns one as `model`. A parameter has one factor, or one for each row if its
    rows belong to different layers. Raises UsageError for a network without encoder blocks.
    """
    encoder = module if isinstance(module, ViT) else getattr(module, "model", module)
    if not isinstance(encoder, ViT):
        raise UsageError(
            f"optim.layer_decay is {decay}, but it needs the blocks of a Vision Transformer, and a "
            f"{type(encoder).__name__} has none: leave it out"
        )
    last = len(encoder.blocks) + 1
    depths = {parameter: [last] for parameter in module.parameters()}
    for name, parameter in encoder.named_parameters():
        part, _, rest = name.partition(".")
        if part in EMBEDDING:
            depths[parameter] = [0]
        elif part == "blocks":
            depths[parameter] = [int(rest.partition(".")[0]) + 1]
        elif part == "positions":
            depths[parameter] = _of_positions(encoder)
    if encoder is not module and isinstance(mask := getattr(module, "mask", None), nn.Parameter):
        depths[mask] = [0]
    return {parameter: tuple(decay ** (last - depth) for depth in depths[parameter]) for parameter in depths}


def _of_positions(encoder: ViT) -> list[int]:
    """Return the depth of a table of positions, or of each of its rows."""
    positions, layers = encoder.positions, len(encoder.blocks)
    if positions.config.place == "shared":
        return [layers + 1]
    if positions.at_input and not isinstance(positions, Relative | RelativeBias):
        return [0]
    return list(range(1, layers + 1))


def slow_rows(optimizer: torch.optim.Optimizer, factors: Factors) -> None:
    """Let every step of `optimizer` move each row of a parameter by the row's own factor.

    Parameters with several factors are tables of positions, which have no weight decay and no trust ratio, and which
    Muon leaves to AdamW. There the steps of AdamW, SGD and LAMB are proportional to the learning rate, value by value.
    So each row moves by its share of the step at the fastest row's rate.
    """
    several = [parameter for parameter, values in factors.items() if len(values) > 1 and parameter.requires_grad]
    rows = {parameter: _shares(parameter, factors[parameter]) for parameter in several}
    if not rows:
        return
    before: dict[nn.Parameter, Tensor] = {}

    def note(*_: Any) -> None:
        before.update({parameter: world.local_part(parameter).detach().clone() for parameter in rows})

    @torch.no_grad()
    def shorten(*_: Any) -> None:
        for parameter, start in before.items():
            moved = world.local_part(parameter).detach()
            moved.copy_(start.lerp(moved, rows[parameter]))

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(shorten)


def _shares(parameter: nn.Parameter, factors: tuple[float, ...]) -> Tensor:
    """Return the factor of each row in this process divided by the largest factor, in a shape that broadcasts."""
    here = world.local_part(parameter)
    shares = torch.tensor(factors, dtype=here.dtype, device=here.device) / max(factors)
    if world.is_sharded(parameter):
        shares = world.rows_here(shares, parameter)
    return shares.view(-1, *[1] * (parameter.dim() - 1))
