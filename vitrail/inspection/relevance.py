"""Which parts of the image support a class: attention weighted by its gradient.

Chefer, Gur and Wolf, "Generic Attention-model Explainability" (2021). Rollout shows where information can come from,
which is the same for every class. Here each map A counts as far as it raises the class's logit y:

    A_bar = mean over heads of max(dy/dA * A, 0),     R <- R + A_bar R     from the first layer to the last

and the row of R for the classifier's input is shown. That row is r^T (1 + A_bar_n) ... (1 + A_bar_1). It is computed
from the left, last layer first, in the order of the gradients, so a vector replaces the matrix R. Each block is
computed again from its input, so memory holds the maps of one layer, whatever the depth and the attention path.

Decisions that the paper leaves open:

* The branches of a parallel layer all add to the residual and have their own gradients: they are summed.
* The two halves of an axial layer follow each other like layers.
* MAP's probe is the query of one more attention over the grid: the row starts as its A_bar.
* If the classifier reads the grid's average (GAP), all patches start with the same value, which is left out of the
  result, like the class token's own share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError, finite
from vitrail.inspection.maps import on_grid, pooling_weights, require_vit
from vitrail.model.attention import Attention
from vitrail.model.build import eval_mode
from vitrail.model.head import MAPHead
from vitrail.model.posemb import Grid
from vitrail.model.record import attentions
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class Relevance:
    """How much each patch of each image supports a class."""

    shares: Tensor
    """[batch, rows, columns] in float32, not negative and without a unit: compare values only within an image."""
    classes: Tensor
    """int64 [batch]: the class."""


def relevance(model: ViT, images: Tensor, target: int | None = None) -> Relevance:
    """Return how much each patch supports class `target`; None: the predicted class of each image.

    `images` are the model's input. Raises UsageError for other networks, for one without a classifier or with an
    attention of the user's own that does not derive from `Attention`, and for a class that does not exist, WeightsError
    if a value is NaN or infinite.
    """
    require_vit(model, "gradient-weighted relevance")
    classes = model.config.classes
    if model.head is None:
        raise UsageError("this model has no classifier, which relevance needs. Use rollout instead.")
    own = (one for *_, one in attentions(model) if not isinstance(one, Attention))
    if (attention := next(own, None)) is not None:
        raise UsageError(
            f"relevance needs an attention that derives from vitrail.model.attention.Attention. "
            f"{type(attention).__name__} is of the user's own and does not. Use rollout or attention maps instead."
        )
    if target is not None and not 0 <= target < classes:
        raise UsageError(f"no class {target}: this model has {classes}, numbered 0 to {classes - 1}")
    with torch.inference_mode(False), eval_mode(model):
        grid = model.grid(images)
        calls: dict[nn.Module, _Call] = {}
        with torch.no_grad(), _calls_of(model.blocks, calls):
            model.encode(model.embed(images), grid)
        row, start, gradient, chosen = _from_the_head(model, calls[model.blocks[-1]].output, grid, target)
        for layer, block in reversed(list(enumerate(model.blocks))):
            row, gradient = _through(model, layer, calls.pop(block).arguments, row, gradient, grid)
    shares = (row - start)[:, model.config.prefix :].reshape(len(images), *grid)
    return Relevance(finite(shares, "relevance").clamp(min=0), chosen)


class _Call(NamedTuple):
    arguments: tuple[Any, ...]
    output: Tensor


@contextmanager
def _calls_of(modules: Iterable[nn.Module], seen: dict[nn.Module, _Call]) -> Iterator[None]:
    """Record the last call of each module in `seen`, within the block."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        seen[module] = _Call(arguments, output)

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _from_the_head(model: ViT, last: Tensor, grid: Grid, target: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first row, its part that does not count, the gradient of the last block's output, and the classes."""
    pool, prefix = model.pool, model.config.prefix
    calls: dict[nn.Module, _Call] = {}
    with torch.enable_grad(), _calls_of([pool.out] if isinstance(pool, MAPHead) else [], calls):
        leaf = last.detach().requires_grad_()
        encoded = model.norm(leaf) if model.config.origin.final_norm == "tokens" else leaf
        logits = model.classify(model.summary(encoded)).float()
        chosen = logits.argmax(dim=1) if target is None else torch.full_like(logits[:, 0], target, dtype=torch.int64)
        mixed = [call.arguments[0] for call in calls.values()]
        gradient, *of_mixed = torch.autograd.grad(logits.gather(1, chosen[:, None]).sum(), [leaf, *mixed])
    encoded = encoded.detach()
    row = pooling_weights(model, encoded, grid)
    if not isinstance(pool, MAPHead):
        return row, torch.cat([torch.zeros_like(row[:, :prefix]), row[:, prefix:]], dim=1), gradient, chosen
    with torch.no_grad():
        first = pool.first(prefix)
        maps, value = pool.weigh(encoded[:, first:])
        of_maps = of_mixed[0].unflatten(-1, (pool.heads, 1, -1)) @ value.transpose(-1, -2)
        row = torch.zeros_like(row)
        row[:, first:] = _weighted(maps.float(), of_maps.float())[:, 0]
    return row, torch.zeros_like(row), gradient, chosen


def _through(
    model: ViT, layer: int, arguments: tuple[Any, ...], row: Tensor, gradient: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Turn row and gradient at the output of a block into those at its input."""
    places = [(axis, attention) for at, _, axis, attention in attentions(model) if at == layer]
    modules = [attention for _, attention in places]
    calls: dict[nn.Module, _Call] = {}
    after = [getattr(attention, "norm", None) or attention.out for attention in modules]  # what sees the heads' outputs
    with torch.enable_grad(), _calls_of([*modules, *after], calls):
        leaf = arguments[0].detach().requires_grad_()
        output = model.blocks[layer](leaf, *arguments[1:])
        mixed = [calls[module].arguments[0] for module in after]
        gradient, *of_mixed = torch.autograd.grad(output, [leaf, *mixed], gradient)
    del output, mixed
    behind, axis_behind = row, places[-1][0]
    for (axis, attention), of_one in reversed(list(zip(places, of_mixed, strict=True))):
        if axis != axis_behind:  # the other half of an axial layer: it continues with the row of the first half
            behind, axis_behind = row, axis
        x, bias, _ = calls[attention].arguments
        positive = _positive(attention, x.detach(), bias, of_one)
        row = row + torch.einsum("bq,bqk->bk", behind, on_grid(positive, axis, grid))
    return row, gradient


@torch.no_grad()
def _positive(attention: Attention, x: Tensor, bias: Any, of_mixed: Tensor) -> Tensor:
    """Return A_bar [batch, tokens, tokens] from the gradient of the heads' outputs before the projection."""
    value = attention.project(x).unflatten(-1, (3, attention.heads, -1))[:, :, 2]
    of_mixed = of_mixed.unflatten(-1, (attention.heads, -1))
    of_maps = torch.einsum("bqhf,bkhf->bhqk", of_mixed, value)  # mixed = A value
    return _weighted(attention.maps(x, bias), of_maps.float())


def _weighted(maps: Tensor, of_maps: Tensor) -> Tensor:
    return of_maps.mul_(maps).clamp_(min=0).mean(dim=1)
