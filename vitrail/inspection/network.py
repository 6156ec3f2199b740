"""The network to look into: what it is called, how images become its input, and its state while someone looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitrail.data.images.geometry import Op
from vitrail.errors import UsageError
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class InspectedNetwork:
    """A network with its name in figures, its transform and its classes."""

    label: str
    model: Any
    """A ViT or ResNet in eval mode."""
    transform: Op
    """The transform that turns images into its input."""
    class_names: list[str]

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.model.parameters()).device

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number if the classes have no names."""
        return self.class_names[number] if self.class_names else f"class {number}"


def require_vit(model: object, what: str) -> None:
    """Raise UsageError for any network but a ViT; the message says that `what` needs one."""
    if not isinstance(model, ViT):
        raise UsageError(f"{what} needs a Vision Transformer, not a {type(model).__name__}")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a network in eval mode within the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
