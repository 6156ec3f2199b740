"""Which parts of the image speak for a class: attention weighted by its gradient.

Chefer, Gur and Wolf, "Generic Attention-model Explainability" (2021). Rollout shows where information can come
from, the same for every class; here each map A counts as far as the class's logit y gains by it,

    A_bar = mean over heads of max(dy/dA * A, 0),     R <- R + A_bar R     from the first layer to the last

and the row of R for what the classifier reads is shown. That row, r^T (1 + A_bar_n) ... (1 + A_bar_1), is built
here from its left end, last layer first, as the gradients come: a vector takes the place of the matrix R. One
block at a time is computed again from its input, so memory holds the maps of one layer, however deep the
network and whichever way attention is computed.

What the paper does not say is decided so:

* The branches of a parallel layer each add to the residual and have gradients of their own: they are summed.
* The two halves of an axial layer follow each other like layers.
* MAP's probe is a query of one more attention over the grid: the row starts as its A_bar.
* Where the grid's average is read (GAP), the start gives every patch the same; it is left out of the result, as
  the class token's own share is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.inspection.reading import need_vit, reading
from vitrail.model.attention import Attention
from vitrail.model.head import MAPHead
from vitrail.model.posemb import Grid
from vitrail.model.taps import attentions
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class Relevance:
    """What spoke for a class in each image."""

    shares: Tensor
    """[batch, rows, columns] in float32, not negative, in no unit: compare within an image."""
    classes: Tensor
    """int64 [batch]: the class."""


def relevance(model: ViT, images: Tensor, target: int | None = None) -> Relevance:
    """Return what in each image speaks for class `target`, or where None for the class it is taken for.

    images as the model takes them. Raises UsageError for a network that is no ViT, has no classifier, or not
    that class.
    """
    need_vit(model, "gradient-weighted relevance")
    classes = model.config.classes
    if model.head is None:
        raise UsageError("this model has no classifier, so nothing speaks for a class; rollout needs none")
    if target is not None and not 0 <= target < classes:
        raise UsageError(f"no class {target}: this model has {classes}, numbered 0 to {classes - 1}")
    with torch.inference_mode(False), _still(model):
        grid = model.grid(images)
        inputs, last = _block_inputs(model, images, grid)
        row, start, gradient, chosen = _from_the_head(model, last, grid, target)
        for layer in reversed(range(model.config.depth)):
            row, gradient = _through(model, layer, inputs.pop(), row, gradient, grid)
    shares = (row - start)[:, model.config.prefix :].reshape(len(images), *grid)
    return Relevance(shares.clamp(min=0), chosen)


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients for its weights."""
    training, wanted = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)


@contextmanager
def _inputs_of(modules: list[nn.Module], seen: dict[nn.Module, tuple[Any, ...]]) -> Iterator[None]:
    """Within the block, `seen` gets what each module was last called with."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen[module] = arguments

    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _block_inputs(model: ViT, images: Tensor, grid: Grid) -> tuple[list[tuple[Any, ...]], Tensor]:
    """The arguments of every block, and what the last one gives."""
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    outputs: list[Tensor] = []
    keep = model.blocks[-1].register_forward_hook(lambda module, arguments, output: outputs.append(output))
    try:
        with _inputs_of(list(model.blocks), seen):
            model.encode(model.embed(images), grid)
    finally:
        keep.remove()
    return [seen[block] for block in model.blocks], outputs[0]


def _from_the_head(model: ViT, last: Tensor, grid: Grid, target: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The row to start with, its part that is not counted, the gradient of the last block's output, the classes."""
    pool, prefix = model.pool, model.config.prefix
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    with torch.enable_grad(), _inputs_of([pool.out] if isinstance(pool, MAPHead) else [], seen):
        leaf = last.detach().requires_grad_()
        encoded = model.norm(leaf) if model.config.final_norm == "tokens" else leaf
        logits = model.classify(model.summary(encoded)).float()
        chosen = logits.argmax(dim=1) if target is None else torch.full_like(logits[:, 0], target, dtype=torch.int64)
        mixed = [arguments[0] for arguments in seen.values()]
        gradient, *of_mixed = torch.autograd.grad(logits.gather(1, chosen[:, None]).sum(), [leaf, *mixed])
    encoded = encoded.detach()
    row = reading(model, encoded, grid)
    if not isinstance(pool, MAPHead):
        return row, torch.cat([torch.zeros_like(row[:, :prefix]), row[:, prefix:]], dim=1), gradient, chosen
    with torch.no_grad():
        maps, value = pool.weigh(encoded[:, prefix:])
        of_maps = of_mixed[0].unflatten(-1, (pool.heads, 1, -1)) @ value.transpose(-1, -2)
        row = torch.zeros_like(row)
        row[:, prefix:] = _weighted(maps.float(), of_maps.float())[:, 0]
    return row, torch.zeros_like(row), gradient, chosen


def _through(
    model: ViT, layer: int, arguments: tuple[Any, ...], row: Tensor, gradient: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Row and gradient behind a block -> in front of it."""
    places = [(axis, attention) for at, _, axis, attention in attentions(model) if at == layer]
    modules = [attention for _, attention in places]
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    with torch.enable_grad(), _inputs_of([*modules, *(attention.out for attention in modules)], seen):
        leaf = arguments[0].detach().requires_grad_()
        output = model.blocks[layer](leaf, *arguments[1:])
        mixed = [seen[attention.out][0] for attention in modules]
        gradient, *of_mixed = torch.autograd.grad(output, [leaf, *mixed], gradient)
    del output, mixed
    behind, axis_behind = row, places[-1][0]
    for (axis, attention), of_one in reversed(list(zip(places, of_mixed, strict=True))):
        if axis != axis_behind:  # the other half of an axial layer: it hands on what the first one gave
            behind, axis_behind = row, axis
        x, bias, _ = seen[attention]
        row = row + _moved(behind, _positive(attention, x.detach(), bias, of_one), axis, grid)
    return row, gradient


@torch.no_grad()
def _positive(attention: Attention, x: Tensor, bias: Any, of_mixed: Tensor) -> Tensor:
    """A_bar [batch, tokens, tokens] from the gradient of the heads' results before they are projected."""
    value = attention.project(x)[:, :, 2]
    of_mixed = of_mixed.unflatten(-1, (attention.heads, -1))
    of_maps = torch.einsum("bqhf,bkhf->bhqk", of_mixed, value)  # mixed = A value
    return _weighted(attention.maps(x, bias), of_maps.float())


def _weighted(maps: Tensor, of_maps: Tensor) -> Tensor:
    return of_maps.mul_(maps).clamp_(min=0).mean(dim=1)


def _moved(row: Tensor, maps: Tensor, axis: str | None, grid: Grid) -> Tensor:
    """row [batch, tokens] times maps [batch, tokens, tokens], or times those along each line of an axis."""
    if axis is None:
        return torch.einsum("bq,bqk->bk", row, maps)
    lines = row.unflatten(1, grid)
    lines = lines if axis == "row" else lines.transpose(1, 2)
    moved = torch.einsum("lq,lqk->lk", lines.flatten(0, 1), maps).view(lines.shape)
    return (moved if axis == "row" else moved.transpose(1, 2)).flatten(1)
