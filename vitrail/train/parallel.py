"""What is done to the single-device model from outside, in this order:

0. the branches of parallel blocks computed as one, where the run says so;
1. activation checkpointing, on each block: what is recomputed must be inside what is compiled;
2. torch.compile, on each block: the blocks share one compiled graph, so the wait is that of a single block;
3. the sum of gradients over processes, after the last micro-batch's backward.

None of it changes the names in the model's state_dict: a checkpoint does not know how it was trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail import world
from vitrail.model.vit import ViT
from vitrail.model.wide import compute_together
from vitrail.train.run import Run


def prepare(model: nn.Module, run: Run) -> None:
    """Apply wide branches, activation checkpointing and compilation to `model`, in place, as `run` says.

    A network without encoder blocks (a ResNet) is treated as one block.
    """
    if run.wide_branches:
        compute_together(model)
    blocks = checkpointed_parts(model)
    if run.activation_checkpointing:
        for block in blocks:
            block.forward = partial(_checkpointed, block.forward)  # type: ignore[method-assign]
    if run.compile:
        for block in blocks:
            block.compile()


def checkpointed_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts that are wrapped one by one: the encoder blocks of a ViT, else the network as a whole."""
    return list(model.blocks) if isinstance(model, ViT) else [model]


def _checkpointed(forward, *inputs, **options):  # type: ignore[no-untyped-def]
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


def mean_gradients(parameters: Iterable[nn.Parameter], count: int) -> None:
    """Turn the gradients of each process's sum into those of the mean over all `count` examples, in place."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if world.size() > 1:
        _sum_over_processes(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, count)


def _sum_over_processes(parameters: list[nn.Parameter], bucket_bytes: int = 25 * 2**20) -> None:
    bucket: list[Tensor] = []
    held = 0
    for parameter in parameters:
        if parameter.grad is None:  # every process must send the same tensors
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        held += parameter.grad.nbytes
        if held >= bucket_bytes:
            _sum_bucket(bucket)
            bucket, held = [], 0
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = world.sum_(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
