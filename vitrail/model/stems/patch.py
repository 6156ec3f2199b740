"""The paper's stem: cut the image into patches and project each linearly (Eq. 1, `x_p E`)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import Constants, compute_dtype, linear
from vitrail.model.variants import ViTConfig


def check_images(images: Tensor, channels: int) -> None:
    """Raise UsageError for images of a shape or type that no network with these channels takes.

    Values are not read, because that would wait for a GPU and end a trace.
    """
    if isinstance(images, torch.fx.Proxy):
        raise UsageError(
            "torch.fx.symbolic_trace cannot trace this network, because the size and type of the images decide what it "
            "computes. torch.export.export(model, (images,)).module() is a torch.fx graph of it. For the features of "
            "chosen layers call model.intermediate(images, layers=[...])"
        )
    if not isinstance(images, Tensor):
        raise UsageError(
            f"images are a {type(images).__name__}; a network takes a torch.Tensor [batch, channels, height, width]. "
            "For a NumPy array call torch.from_numpy(images); model.card.transform() makes tensors of Pillow's images"
        )
    if images.dim() != 4:
        add = "; add the dimension of the batch with images[None]" if images.dim() == 3 else ""
        raise UsageError(
            f"images have shape {tuple(images.shape)}; a network takes [batch, channels, height, width]{add}"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise UsageError(
            f"images are {kind}; a network takes uint8 pixels in 0..255, which it normalises itself, or floats that "
            "are normalised already. For pixels in 0..255 call images.to(torch.uint8)"
        )
    if images.shape[1] != channels:
        last = images.shape[-1] == channels
        hint = "move the channels with images.permute(0, 3, 1, 2)" if last else "load(channels=N) adapts a network"
        raise UsageError(
            f"images have {images.shape[1]} channels and this model needs {channels}; {hint} (shape: "
            f"{tuple(images.shape)})"
        )
    if images.shape[2] == 0 or images.shape[3] == 0:
        raise UsageError(f"images have shape {tuple(images.shape)}: they have no pixels")


def refuse_script(network: nn.Module) -> None:
    """Raise UsageError. torch.jit.script calls it as the method `__prepare_scriptable__` of each module."""
    raise UsageError(
        f"torch.jit.script cannot compile {type(network).__name__}. Use torch.jit.trace(model, images), which leaves "
        "the number and size of images open, or torch.export.export(model, (images,)). If it is part of a module, "
        "replace it there by its trace before torch.jit.script"
    )


class Normalise(Constants):
    """Normalise pixels 0..255 by the mean and standard deviation of each channel: `(u - 128) * scale + shift`.

    `scale` and `shift` are [channels, 1, 1]. Pixels are centred on 128 because -128..127 is exact even in bfloat16, and
    small numbers round less. The values are not in the state, because they follow from the config.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        mean_, std_ = (torch.tensor(v, dtype=torch.float64, device="cpu").view(-1, 1, 1) for v in (mean, std))
        super().__init__(scale=(1 / (255 * std_)).float(), shift=((128 / 255 - mean_) / std_).float())

    def forward(self, images: Tensor) -> Tensor:
        """uint8 or float pixels [..., channels, height, width] -> the same shape, float32."""
        return (images.float() - 128) * self.scale + self.shift

    def undo(self, values: Tensor) -> Tensor:
        """Return the pixels, in 0..255 and not rounded, of normalised values."""
        return (values - self.shift) / self.scale + 128


class LinearStem(nn.Module):
    """images [batch, channels, H, W] -> features on the grid [batch, width, H/patch, W/patch].

    The normalisation of uint8 images is folded into the projection, so no float copy of the image is made. Float
    images must be normalised already.
    """

    folds_normalisation = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.weight = nn.Parameter(torch.zeros(config.width, config.channels, config.patch, config.patch))
        self.bias = nn.Parameter(torch.zeros(config.width))
        self.normalise = Normalise(config.mean, config.std)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        rows = images.shape[-2] // self.patch
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch, q=self.patch)
        weight, bias = self.weights_for(images.dtype)
        if images.dtype == torch.uint8:
            patches = patches.to(compute_dtype(weight)).sub_(128)
        tokens = linear(patches, weight.flatten(1), bias)
        return rearrange(tokens, "b (h w) d -> b d h w", h=rows)  # a view: nothing moves

    def weights_for(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight and bias for images of this type. For uint8 they apply to pixels minus 128."""
        if dtype != torch.uint8:
            return self.weight, self.bias
        return self.weight * self.normalise.scale, self.bias + (self.weight * self.normalise.shift).sum((1, 2, 3))
