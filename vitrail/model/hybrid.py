"""The hybrid's stem (paper, section 3.1): a ResNet turns the image into the map whose cells become tokens."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import Conv2d
from vitrail.model.stdconv import StdConv2d, group_norm
from vitrail.model.variants import ViTConfig


class HybridStem(nn.Module):
    """images [batch, channels, H, W] -> features on the grid [batch, width, H/patch, W/patch].

    A ResNet of post-activation bottlenecks with GroupNorm and standardised convolutions, then a linear
    projection of patches of its last map. Section 4.1's two ways to use an R50 are two settings of
    `config.stem_units`: (i) `(3, 4, 6, 3)`, the output of stage 4 of an ordinary R50, one token per 32 x 32
    pixels, and (ii) `(3, 4, 9)`, stage 4's layers moved into stage 3: one token per 16 x 16 pixels, so four
    times as many tokens. `()` is the root alone. If the ResNet shrinks the image less than `config.patch`, the
    projection has larger patches: 8 x 8 cells of the root's map for R+Ti/16, which has one token per 32 x 32 pixels.
    The root has `config.stem_width` features; stage s, counted from 0, makes maps of 4 * 2**s times as many.

    Raises UsageError for a patch that is not a multiple of the ResNet's ratio.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        ratio = 4 * 2 ** max(len(config.stem_units) - 1, 0)
        if config.patch % ratio:
            raise UsageError(
                f"a ResNet stem of stages {config.stem_units} shrinks the image {ratio} times, so the patch "
                f"must be a multiple of {ratio} px, not {config.patch}"
            )
        self.root = nn.Sequential(_conv_norm(config, config.channels, config.stem_width, 7, 2))
        stages, features = [], config.stem_width
        for stage, units in enumerate(config.stem_units):
            width = config.stem_width * 2**stage
            blocks = [HybridBottleneck(config, features, width, stride=1 if stage == 0 else 2)]
            features = 4 * width
            blocks += [HybridBottleneck(config, features, width) for _ in range(units - 1)]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        cell = config.patch // ratio
        self.proj = Conv2d(features, config.width, cell, cell)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        maps = F.relu(self.root(images))
        # windows may exceed the bottom and the right edge: that is SAME padding for even sides
        maps = F.max_pool2d(maps, kernel_size=3, stride=2, ceil_mode=True)
        return self.proj(self.stages(maps))


class HybridBottleneck(nn.Module):
    """Post-activation bottleneck: [batch, inputs, H, W] -> [batch, 4 * width, H/stride, W/stride].

    "v1.5": the 3x3 convolution has the stride.
    """

    def __init__(self, config: ViTConfig, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        form, eps = config.std_conv, config.group_norm_eps
        self.conv1 = StdConv2d(inputs, width, 1, form=form, same=True)
        self.norm1 = group_norm(width, eps)
        self.conv2 = StdConv2d(width, width, 3, stride, form=form, same=True)
        self.norm2 = group_norm(width, eps)
        self.conv3 = StdConv2d(width, outputs, 1, form=form, same=True)
        self.norm3 = group_norm(outputs, eps)
        change = stride != 1 or inputs != outputs
        self.shortcut = nn.Sequential(_conv_norm(config, inputs, outputs, 1, stride)) if change else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        shortcut = self.shortcut(maps)
        maps = F.relu(self.norm1(self.conv1(maps)))
        maps = F.relu(self.norm2(self.conv2(maps)))
        return F.relu(shortcut + self.norm3(self.conv3(maps)))


def _conv_norm(config: ViTConfig, inputs: int, outputs: int, kernel: int, stride: int) -> OrderedDict[str, nn.Module]:
    conv = StdConv2d(inputs, outputs, kernel, stride, form=config.std_conv, same=True)
    return OrderedDict(conv=conv, norm=group_norm(outputs, config.group_norm_eps))
