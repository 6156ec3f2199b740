"""Stems: images to features on the grid of tokens (Eq. 1, `x_p E`).

Every stem takes images [batch, channels, H, W], H and W divisible by `config.patch`, and returns
[batch, width, H/patch, W/patch]. The paper's stem cuts the image into patches and projects each linearly. The
follow-up's section 5 compares it with the convolutional ones (Table 7). The hybrid's ResNet is in `hybrid.py`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.compute import compute_dtype
from vitrail.model.hybrid import HybridStem
from vitrail.model.layers import Constants, Conv2d, linear, new_gelu
from vitrail.model.own_part import build_part
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


def build_stem(config: ViTConfig) -> nn.Module:
    """Return the stem that `config.stem` names. Raises UsageError if it cannot have the config's patch or width."""
    stems: dict[str, type[nn.Module]] = {
        "linear": LinearStem,
        "linear+norm": NormalisedStem,
        "linear+gelu": NormalisedStem,
        "linear+norm+gelu": NormalisedStem,
        "levit": LevitStem,
        "early": EarlyConvStem,
        "hmlp": HMLPStem,
        "resnet": HybridStem,
    }
    stem: nn.Module = build_part(config.stem, config, stems, nn.Module, ("images",))
    return stem


class _Layers(nn.Module):
    """A stem that is one sequence of layers, `proj`, on images that are already normalised."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.proj = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, channels, H, W] -> [batch, width, H/patch, W/patch]."""
        return self.proj(images)


class NormalisedStem(_Layers):
    """The linear projection with a norm, a GELU, or both after it (the variations of the linear stem in Table 7)."""

    def __init__(self, config: ViTConfig) -> None:
        _, *after = str(config.stem).split("+")
        layers = {"norm": _norm(config.width, config), "gelu": new_gelu(config.origin.gelu)}
        projection = Conv2d(config.channels, config.width, config.patch, config.patch)
        super().__init__([projection, *(layers[name] for name in after)])


class LevitStem(_Layers):
    """LeViT's stem (Graham et al. 2021): 3x3 convolutions of stride 2 with a norm, Hardswish between them.

    The width doubles up to the model's: for a patch of 16, D/8, D/4, D/2, D. Raises UsageError for a patch
    that is not a power of 2, or a width that cannot be halved this often.
    """

    def __init__(self, config: ViTConfig) -> None:
        layers: list[nn.Module] = []
        for convolution, norm in _halvings(config):
            layers += [convolution, norm, nn.Hardswish()]
        super().__init__(layers[:-1])


class EarlyConvStem(_Layers):
    """The stem of "Early Convolutions Help Transformers See Better" (Xiao et al. 2021).

    3x3 convolutions of stride 2, each normalised and followed by ReLU, then a 1x1 convolution. The widths are
    those of its 1 and 4 GF models: for a patch of 16, D/8, D/4, D/2, D. Raises UsageError as LevitStem does.
    """

    def __init__(self, config: ViTConfig) -> None:
        layers: list[nn.Module] = []
        for convolution, norm in _halvings(config):
            layers += [convolution, norm, nn.ReLU()]
        super().__init__([*layers, Conv2d(config.width, config.width, 1)])


class HMLPStem(_Layers):
    """The follow-up's hierarchical MLP (section 5, appendix C): patches of patches, projected one by one.

    Kernel and stride are equal in every convolution, so no pixel of one patch reaches the token of another, and
    masking tokens is the same as masking patches. (In training, BatchNorm's statistics are still those of all patches.)
    All stages but the last have width D/4 and a GELU. Raises UsageError for a width that is not divisible by 4.
    """

    def __init__(self, config: ViTConfig) -> None:
        if config.width % 4:
            raise UsageError(f"the hmlp stem needs a width divisible by 4; the width is {config.width}")
        layers: list[nn.Module] = []
        inputs, width = config.channels, config.width // 4
        *stages, last = hmlp_stages(config.patch)
        for kernel in stages:
            layers += [Conv2d(inputs, width, kernel, kernel), _norm(width, config), new_gelu(config.origin.gelu)]
            inputs = width
        layers += [Conv2d(inputs, config.width, last, last), _norm(config.width, config)]
        super().__init__(layers)


def hmlp_stages(patch: int) -> tuple[int, ...]:
    """Return the kernel (= stride) of each hMLP stage; their product is the patch.

    A patch divisible by 4, other than 4 itself, starts with 4, as in the authors' code and Figure 5; the text of
    section 5 says "we start from small 2x2 patches". The rest are prime factors, largest first: 16 is (4, 2, 2),
    32 (4, 2, 2, 2), 14 (7, 2), 4 (2, 2). A prime patch has one stage: a linear projection with a norm after it.
    """
    first = [4] if patch % 4 == 0 and patch > 4 else []
    rest = patch // math.prod(first)
    primes: list[int] = []
    for divisor in range(2, rest + 1):
        while rest % divisor == 0:
            primes.insert(0, divisor)
            rest //= divisor
    return (*first, *primes) or (1,)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the features of each cell of a map [batch, features, height, width]."""

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        return super().forward(maps.movedim(1, -1)).movedim(-1, 1)


def _norm(features: int, config: ViTConfig) -> nn.Module:
    if config.stem_norm == "layer":
        return LayerNorm2d(features, eps=config.origin.norm_eps)
    return nn.BatchNorm2d(features)


def _halvings(config: ViTConfig) -> list[tuple[nn.Module, nn.Module]]:
    """Return log2(patch) 3x3 convolutions that halve the map, each with its norm, which replaces the bias.

    Their widths double up to the model's.
    """
    stages = config.patch.bit_length() - 1
    if config.patch < 2 or config.patch != 2**stages:
        raise UsageError(
            f"the {config.stem} stem halves the image at each step, so the patch must be a power of 2 "
            f"(2, 4, 8, 16, 32), not {config.patch}. Use stem 'hmlp' or 'linear' for other patches"
        )
    if config.width % 2 ** (stages - 1):
        raise UsageError(
            f"the {config.stem} stem doubles its width at each of {stages} steps, so the model's width must "
            f"be divisible by {2 ** (stages - 1)}; it is {config.width}"
        )
    widths = [config.channels, *(config.width // 2**step for step in reversed(range(stages)))]
    return [
        (Conv2d(inputs, outputs, 3, 2, padding=1, bias=False), _norm(outputs, config))
        for inputs, outputs in pairwise(widths)
    ]
