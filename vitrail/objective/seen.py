"""Objectives without labels show what they see: the input, the mask, the prediction and the target, side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.objective.base import Objective, Prepared
from vitrail.objective.stems import pixels_of


class Columns(ABC):
    """Pictures to be laid side by side, a row for each image."""

    titles: Sequence[str]
    """One for each column."""

    @abstractmethod
    def columns(self) -> list[Tensor]:
        """The pictures in the order of `titles`, each uint8 [batch, 3, height, width], all of one size."""


@dataclass(frozen=True)
class Seen(Columns):
    """Four pictures of each image, uint8 [batch, 3, height, width], and what to call them."""

    image: Tensor
    masked: Tensor
    """The image with what is hidden hatched."""
    prediction: Tensor
    """The network's answer at the hidden patches, the image elsewhere."""
    target: Tensor
    """What the answer should be there."""
    titles: tuple[str, str, str, str] = ("input", "mask", "prediction", "target")

    def columns(self) -> list[Tensor]:
        """See `Columns`."""
        return [self.image, self.masked, self.prediction, self.target]


class SelfSupervised(Objective):
    """An objective that needs no labels, and can show what it sees."""

    chosen_by_loss = True
    """Is the model with the lowest validation loss the best? Else the newest is."""

    @abstractmethod
    def show(self, prepared: Prepared) -> Columns:
        """Return the pictures of a prepared batch; the objective is in evaluation mode."""


def hatched(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """Return uint8 `images` with the patches `hidden` [batch, patches] hatched, so that they look like no image."""
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    hatch = torch.where((rows[:, None] + columns) % 4 == 0, 216, 104).to(torch.uint8)
    return torch.where(pixels_of(hidden, images, patch), hatch, images)


def where_hidden(image: Tensor, hidden: Tensor, picture: Tensor, patch: int) -> Tensor:
    """Return `picture` at the hidden patches, bool [batch, patches], and `image` elsewhere."""
    return torch.where(pixels_of(hidden, image, patch), picture, image)


def to_pixels(values: Tensor) -> Tensor:
    """Round pixel values, 0 to 255, to uint8; what lies outside is cut."""
    return values.float().round().clamp(0, 255).to(torch.uint8)
