"""The parts that objectives without labels share: pictures of their predictions, and the loss of many predictions."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.objective.base import Objective, Prepared
from vitrail.objective.stems import pixels_of


class SelfSupervised(Objective):
    """An objective that needs no labels and can show its predictions as pictures."""

    chosen_by_loss = True
    """Is the model with the lowest validation loss the best one? If not, the newest model is."""

    @abstractmethod
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """Return pictures of a prepared batch: title -> uint8 [batch, 3, height, width], all of the same size.

        They are drawn as columns from left to right: the input, the mask, the prediction and the target. The
        objective must be in evaluation mode.
        """


def hatched(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """Return uint8 `images` with a hatch over the patches `hidden`, bool [batch, patches]."""
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    hatch = torch.where((rows[:, None] + columns) % 4 == 0, 216, 104).to(torch.uint8)
    return torch.where(pixels_of(hidden, images, patch), hatch, images)


def where_hidden(image: Tensor, hidden: Tensor, picture: Tensor, patch: int) -> Tensor:
    """Return `picture` at the hidden patches, bool [batch, patches], and `image` elsewhere."""
    return torch.where(pixels_of(hidden, image, patch), picture, image)


def to_pixels(values: Tensor) -> Tensor:
    """Round pixel values to uint8 and clamp them to 0..255."""
    return values.float().round().clamp(0, 255).to(torch.uint8)


def classification_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy and the share of correct predictions of each image, both [batch].

    An image has many predictions, such as the colours or the visual tokens of its patches: logits float32
    [batch, ..., classes], targets int64 [batch, ...]. The classes stay in the last dimension. PyTorch would take them
    in the second, but then copies all logits and all their gradients, which took half of the time of this function.
    """
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    correct = (logits.detach().argmax(-1) == targets).float()
    return losses.view(len(targets), -1).mean(1), correct.view(len(targets), -1).mean(1)
