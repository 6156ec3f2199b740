"""The paper's stem: cut the image into patches and project each linearly (Eq. 1, `x_p E`)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.model.layers import compute_dtype, device_of_constants, linear
from vitrail.model.variants import ViTConfig


def pixel_statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return (scale, shift), each [channels, 1, 1]: `(u - 128) * scale + shift` normalises a uint8 pixel u.

    Pixels are centred on 128 because -128..127 is exact even in bfloat16, and small numbers round less. No file holds
    these values, so they are real even where a network is built on the meta device.
    """
    device = device_of_constants()
    mean_, std_ = (torch.tensor(v, dtype=torch.float64, device=device).view(-1, 1, 1) for v in (mean, std))
    return (1 / (255 * std_)).float(), ((128 / 255 - mean_) / std_).float()


def normalise(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 images [batch, channels, height, width] -> float32 with the statistics of `pixel_statistics`."""
    return (images.float() - 128) * scale + shift


class LinearStem(nn.Module):
    """images [batch, channels, H, W] -> features on the grid [batch, width, H/patch, W/patch].

    uint8 images are taken as they are: the normalisation is folded into the projection, so no float copy of
    the image is ever made. Float images are taken as already normalised.
    """

    folds_pixels = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.weight = nn.Parameter(torch.empty(config.width, config.channels, config.patch, config.patch))
        self.bias = nn.Parameter(torch.zeros(config.width))
        scale, shift = pixel_statistics(config.mean, config.std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.scale: Tensor
        self.shift: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        rows = images.shape[-2] // self.patch
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch, q=self.patch)
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if images.dtype == torch.uint8:
            bias = bias + (weight * self.shift).sum((1, 2, 3))
            weight = weight * self.scale
            patches = patches.to(compute_dtype(weight)).sub_(128)
        tokens = linear(patches, weight.flatten(1), bias)
        return rearrange(tokens, "b (h w) d -> b d h w", h=rows)  # a view: nothing moves
