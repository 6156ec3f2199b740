"""BiT's ResNetV2 (the paper's convolutional baseline, section 4.1) and AxialResNet (appendix D.6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.init import init_weights
from vitrail.model.layers import PlainLinear
from vitrail.model.recompute import recomputable
from vitrail.model.resnet.axial import RowColumnAttention
from vitrail.model.resnet.stdconv import StdConv2d, group_norm
from vitrail.model.stems.patch import normalise, pixel_statistics
from vitrail.model.variants import ResNetConfig


def build_resnet(config: ResNetConfig) -> ResNet:
    """Return the network of a config, initialised."""
    return AxialResNet(config) if config.axial else ResNet(config)


class ResNet(nn.Module):
    """BiT's ResNetV2: images [batch, channels, height, width] -> logits [batch, classes].

    Pre-activation bottlenecks with GroupNorm and standardised convolutions (Kolesnikov et al. 2020). uint8
    images are normalised inside with `config.mean` and `config.std`; float images are taken as already
    normalised. Any size works. With `config.classes` 0 there is no head, and the result is the features.
    """

    card: Any = None
    """Where the weights come from (`vitrail.weights.card.Card`); set by whoever loads them."""
    recompute = False
    """Whether the backward pass computes the network again instead of storing its activations."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        scale, shift = pixel_statistics(config.mean, config.std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.scale: Tensor
        self.shift: Tensor
        self.root = StdConv2d(config.channels, config.width, 7, 2, form=config.std_conv)
        self.root_pool: nn.Module = RootPool()
        stages, inputs = [], config.width
        size = (-(-config.image_size[0] // 4), -(-config.image_size[1] // 4))
        for stage, units in enumerate(config.units):
            width = config.width * 2**stage
            blocks = []
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                blocks.append(Bottleneck(config, inputs, width, stride, self.spatial(width, stride, size)))
                inputs = 4 * width
                size = (-(-size[0] // stride), -(-size[1] // stride))
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = group_norm(inputs, config.group_norm_eps)
        self.head = PlainLinear(inputs, config.classes) if config.classes else None
        init_weights(self)

    def spatial(self, width: int, stride: int, size: tuple[int, int]) -> nn.Module:
        """Return the layer of a bottleneck that looks around; `size` is that of its input map."""
        return StdConv2d(width, width, 3, stride, form=self.config.std_conv)

    def features(self, images: Tensor) -> Tensor:
        """Images [batch, channels, height, width] -> [batch, features]: the mean of the last map's cells."""
        if images.dtype == torch.uint8:
            images = normalise(images, self.scale, self.shift).to(self.root.weight.dtype)
        if images.device.type == "cpu":
            # with channels innermost GroupNorm sums in another order here, to ten times the rounding error
            images = images.contiguous()
        maps = self.root_pool(self.root(images))
        maps = F.relu(self.norm(self.stages(maps)))
        return maps.mean((2, 3))

    @recomputable
    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def reset_head(self, classes: int) -> None:
        """Replace the classifier by a zero-initialised one; 0 classes leaves none."""
        self.config = replace(self.config, classes=classes)
        weight = self.norm.weight
        self.head = None
        if classes:
            self.head = PlainLinear(weight.numel(), classes, device=weight.device, dtype=weight.dtype)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)


class RootPool(nn.Module):
    """3x3 max pooling of stride 2: [batch, width, H, W] -> [batch, width, H / 2, W / 2], rounded up."""

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        # zeros, as BiT pads; a max pool's own padding is -inf, and these maps have either sign
        return F.max_pool2d(F.pad(maps, (1, 1, 1, 1)), kernel_size=3, stride=2)


class AxialResNet(ResNet):
    """The ResNet whose 3x3 convolutions are replaced by row and column attention (D.6, after Axial-DeepLab).

    Relative positions are learned for `config.image_size`.
    """

    def spatial(self, width: int, stride: int, size: tuple[int, int]) -> nn.Module:
        """Return row attention, column attention and, for the stride, average pooling."""
        return RowColumnAttention(width, stride, size, self.config.group_norm_eps)


class Bottleneck(nn.Module):
    """Pre-activation bottleneck: [batch, inputs, H, W] -> [batch, 4 width, H/stride, W/stride].

    `conv2` is the layer in the middle, which has the stride.
    """

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int, conv2: nn.Module) -> None:
        super().__init__()
        outputs = 4 * width
        form, eps = config.std_conv, config.group_norm_eps
        self.norm1 = group_norm(inputs, eps)
        self.conv1 = StdConv2d(inputs, width, 1, form=form)
        self.norm2 = group_norm(width, eps)
        self.conv2 = conv2
        self.norm3 = group_norm(width, eps)
        self.conv3 = StdConv2d(width, outputs, 1, form=form)
        change = stride != 1 or inputs != outputs
        self.shortcut = StdConv2d(inputs, outputs, 1, stride, form=form) if change else None

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        active = F.relu(self.norm1(maps))
        shortcut = maps if self.shortcut is None else self.shortcut(active)
        maps = self.conv1(active)
        maps = self.conv2(F.relu(self.norm2(maps)))
        maps = self.conv3(F.relu(self.norm3(maps)))
        return shortcut + maps
