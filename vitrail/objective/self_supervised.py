"""What objectives without labels share: masked patches, pictures of predictions, and the loss of many predictions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.images.pixels import EIGHT_BIT_RGB, Pixels, pixels_of
from vitrail.errors import UsageError
from vitrail.model.vit import ViT
from vitrail.objective.base import Objective, Prepared, RunFacts
from vitrail.objective.masks import encode_normalised, pixel_mask, require_maskable, tokens_at
from vitrail.objective.settings import MAE, BEiT, MaskedPatch


class SelfSupervised(Objective):
    """An objective that needs no labels and can show its predictions as pictures."""

    chosen_by_loss = True
    """Whether the model with the lowest validation loss is the best one. Otherwise the newest is."""
    pixels: Pixels = EIGHT_BIT_RGB
    """How the images are shown."""

    @abstractmethod
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """Return pictures of a prepared batch: title -> uint8 [batch, 3, height, width], all of the same size.

        They are drawn as columns from left to right: the input, the mask, the prediction and the target. The
        objective must be in evaluation mode.
        """

    def as_pictures(self, images: Tensor) -> Tensor:
        """Return images [..., channels, height, width] of a batch as pictures, uint8 [..., 3, height, width].

        Images of uint8 are pictures already; float32 ones are normalised bands.
        """
        if images.dtype == torch.uint8:
            return images
        shown = self.pixels.shown(images.movedim(-3, -1).float().cpu().numpy())
        return torch.from_numpy(shown).movedim(-1, -3).to(images.device)


class MaskedObjective(SelfSupervised):
    """An objective that masks patches of the images of a Vision Transformer and predicts them.

    Raises UsageError for a network in which patches cannot be masked, and for settings out of range.
    """

    model: ViT

    def __init__(self, model: nn.Module, config: MaskedPatch | MAE | BEiT, seed: int) -> None:
        super().__init__(require_maskable(model, config.kind, after_stem=config.mask_after_stem))
        self.seed = seed

    @classmethod
    def of(cls, model: nn.Module, settings: Any, task: RunFacts) -> Self:
        """See `Objective`."""
        made = cls(model, settings, task.seed)
        made.pixels = pixels_of(task.preprocess.bands)
        return made

    def encode_at(self, places: Tensor, patches: Tensor, images: Tensor) -> Tensor:
        """Return the encoder's output at `places` [batch, n] for patch embeddings [batch, patches, width]."""
        grid = self.model.grid(images)
        tokens = encode_normalised(self.model, self.model.place(patches, grid), grid)
        return tokens_at(tokens[:, self.model.config.prefix :], places)

    def pictures(
        self, images: Tensor, hidden: Tensor, prediction: Tensor, target: Tensor, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the columns of `show`: predictions and targets are drawn at the patches `hidden` [batch, patches].

        `mask` is a picture of the mask. By default all hidden patches are hatched.
        """
        patch = self.model.config.patch
        inside = pixel_mask(hidden, images, patch)
        return {
            "input": images,
            "mask": hatch_patches(images, hidden, patch) if mask is None else mask,
            "prediction": torch.where(inside, prediction, images),
            "target": torch.where(inside, target, images),
        }


def hatch_patches(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """Return uint8 `images` with a hatch over the patches `hidden`, bool [batch, patches]."""
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    hatch = torch.where((rows[:, None] + columns) % 4 == 0, 216, 104).to(torch.uint8)
    return torch.where(pixel_mask(hidden, images, patch), hatch, images)


def require_pixels(images: Tensor, what: str) -> None:
    """Raise UsageError unless `images` are uint8 [batch, 3, height, width], from which colours can be read."""
    if images.dtype != torch.uint8 or images.shape[1] != 3:
        raise UsageError(
            f"{what} is computed from the pixels before normalisation: images must be uint8 of 3 channels, "
            f"not {str(images.dtype).removeprefix('torch.')} of {images.shape[1]}"
        )


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
