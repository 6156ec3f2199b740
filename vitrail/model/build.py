"""Build a network with initial weights from a config or a name, change its classifier, or copy it for inference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from vitrail.device import free_memory
from vitrail.errors import UsageError
from vitrail.model.compute import HAS_FAST
from vitrail.model.resnet import ResNet
from vitrail.model.stdconv import StdConv2d
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.model.vit import ViT

if HAS_FAST:
    from vitrail.model.fast import frozen as fast

Network = TypeVar("Network", bound=ViT | ResNet)
SURELY_FITS = 2**30
"""Bytes of weights that are not compared with the free memory."""

ViTName = Literal[
    "Ti/16", "S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14", "g/14", "G/14",
    "R+Ti/16", "R26+S/32", "R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16",
    "S36x1/16", "S18x2/16", "B36x1/16", "B18x2/16", "axial-B/32", "axial-B/16",
    "smoke/2", "digits/4", "small/4", "small/8", "narrow/4", "narrow/8",
]  # fmt: skip
ResNetName = Literal[
    "R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3", "axial-R50"
]  # fmt: skip
"""The names in `variants.NAMES`, by the class of their networks: a type checker knows what `create` returns."""


def build(config: ViTConfig | ResNetConfig) -> ViT | ResNet:
    """Return the initialised network of a config. Raises UsageError if its weights do not fit into free memory."""
    if isinstance(config, ViTConfig) and torch.get_default_device().type != "meta":
        _refuse_larger_than_memory(config)
    return ViT(config) if isinstance(config, ViTConfig) else ResNet(config)


def _refuse_larger_than_memory(config: ViTConfig) -> None:
    """Raise UsageError if the kernels of the blocks alone do not fit. The system would end the process."""
    kernels = 4 * config.width**2 + 2 * config.width * config.mlp_dim
    size = 4 * config.depth * config.branches * kernels
    free = free_memory(torch.get_default_device()) if size > SURELY_FITS else size
    if size > free:
        raise UsageError(
            f"{config.depth} blocks of width {config.width:,} and {config.mlp_dim:,} hidden units have weights of "
            f"{size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free. Choose a smaller network"
        )


@overload
def create(name: ViTName, **overrides: Any) -> ViT: ...
@overload
def create(name: ResNetName, **overrides: Any) -> ResNet: ...
@overload
def create(name: str, **overrides: Any) -> ViT | ResNet: ...
def create(name: str, **overrides: Any) -> ViT | ResNet:
    """Return the network that the papers call `name`, such as `create("B/16", classes=10)` (`variants.variant`)."""
    return build(variant(name, **overrides))


def reset_head(model: Network, classes: int) -> Network:
    """Replace the classifier of `model` by a linear layer that starts at zero, and return the model.

    The pre-logits layer goes with it (fine-tuning, section 3.2). With 0 classes there is no classifier, and the model
    returns its features. The new layer has the model's device and type. `model.config` follows; the class names of a
    loaded model are deleted from `model.card`, because they are those of the old classifier.

    Raises UsageError for other networks and for a negative number of classes.
    """
    if not isinstance(model, ViT | ResNet):
        raise UsageError(f"reset_head takes a ViT or a ResNet of vitrail, not a {type(model).__name__}")
    if classes < 0:
        raise UsageError(f"a classifier for {classes} classes cannot be built; 0 leaves it out")
    model.reset_head(classes)
    if model.card is not None:
        model.card = model.card.with_new_outputs(config=model.config)
    return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a network in eval mode within the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def freeze(
    model: nn.Module, dtype: torch.dtype = torch.float32, *, portable: bool = False, blocks: bool = True
) -> nn.Module:
    """Return a copy of a model for inference in `dtype`: images -> logits in that type.

    Outputs are equal to rounding; on a CPU the copy is 1.1 to 1.2 times as fast (B/16, batch 1 and 8). It cannot be
    trained, saved or tapped. Axial blocks, and blocks with layers that are not plain (hooks, LoRA, quantisation), only
    change their type. A `portable` copy has only torch's own layers. Without `blocks`, all blocks only change their
    type.
    """
    frozen = copy.deepcopy(model)
    for module in frozen.modules():
        if isinstance(module, StdConv2d):
            module.fix()  # in the model's type, before it is rounded
    frozen = frozen.to(dtype).eval().requires_grad_(False)
    if HAS_FAST and blocks and isinstance(model, ViT):
        fast.freeze_blocks(model, frozen, dtype, portable=portable)
    return frozen
