"""The network to inspect: its name, its transform and its classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vitrail.data.images.geometry import Op
from vitrail.errors import UsageError, finite
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

    @torch.no_grad()
    def require_result(self) -> None:
        """Raise WeightsError, which names the network, if its features of a grey image are not finite."""
        shape = (1, self.model.config.channels, *self.model.card.preprocess.image_size)
        grey = torch.full(shape, 127, dtype=torch.uint8, device=self.device)
        finite(self.model.features(grey), f"output for a grey image ({self.label})")

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number if the classes have no names."""
        return self.class_names[number] if self.class_names else f"class {number}"


def require_vit(model: object, what: str) -> None:
    """Raise UsageError for any network but a ViT; the message says that `what` needs one."""
    if not isinstance(model, ViT):
        raise UsageError(f"{what} needs a Vision Transformer, not a {type(model).__name__}")
