"""BiT's ResNetV2 (the paper's convolutional baseline, section 4.1) and AxialResNet (appendix D.6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.axial import RowColumnAttention
from vitrail.model.compute import recomputable
from vitrail.model.init import init_weights
from vitrail.model.layers import created_on, zero_linear
from vitrail.model.stdconv import StdConv2d, group_norm
from vitrail.model.stem import Normalise, check_images, refuse_script
from vitrail.model.variants import ResNetConfig
from vitrail.ranges import Layers, selected


class ResNet(nn.Module):
    """BiT's ResNetV2: images [batch, channels, height, width] -> logits [batch, classes].

    Pre-activation bottlenecks with GroupNorm and standardised convolutions (Kolesnikov et al. 2020). The network
    normalises uint8 images by `config.mean` and `config.std`; float images must be normalised already, and their values
    are not checked (`vitrail.model.vit.ViT` has the calls for other floats). Any size works. Without classes it returns
    the features. Raises UsageError for images of another shape or type.

    With `config.axial` it is AxialResNet: row and column attention (D.6, after Axial-DeepLab) replaces the 3x3
    convolutions. Relative positions are learned for `config.image_size`.

    device: Where the parameters are created (default: torch's default device).
    """

    card: Any = None
    """Where the weights come from (`vitrail.weights.card.Card`). The code that loads the weights sets it."""
    load_report: Any = None
    """What loading did with each tensor (`vitrail.weights.assemble.LoadReport`). None if nothing was loaded."""
    recompute = False
    """Whether the backward pass computes the network again instead of storing its activations."""

    __prepare_scriptable__ = refuse_script

    def __init__(self, config: ResNetConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        with created_on(device):
            self._build(config)

    def _build(self, config: ResNetConfig) -> None:
        self.root = StdConv2d(config.channels, config.width, 7, 2, form=config.std_conv)
        self.root_pool: nn.Module = RootPool()
        stages, inputs = [], config.width
        size = (-(-config.image_size[0] // 4), -(-config.image_size[1] // 4))
        for stage, units in enumerate(config.units):
            width = config.width * 2**stage
            blocks = []
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                blocks.append(Bottleneck(config, inputs, width, stride, size))
                inputs = 4 * width
                size = (-(-size[0] // stride), -(-size[1] // stride))
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = group_norm(inputs, config.group_norm_eps)
        self.normalise = Normalise(config.mean, config.std)
        self.reset_head(config.classes)
        init_weights(self)

    def features(self, images: Tensor) -> Tensor:
        """Images [batch, channels, height, width] -> [batch, features]: the mean of the last map's cells."""
        maps = self.root_pool(self.root(self._prepared(images)))
        maps = F.relu(self.norm(self.stages(maps)))  # in one line: no name keeps what the norm has read
        return maps.mean((2, 3))

    def _prepared(self, images: Tensor) -> Tensor:
        """Return images for the root: normalised, in the network's type."""
        check_images(images, self.config.channels)
        if images.dtype == torch.uint8:
            images = self.normalise(images).to(self.root.weight.dtype)
        # with channels in the last place in memory, a CPU's GroupNorm has a rounding error ten times as large
        return images.contiguous() if images.device.type == "cpu" else images

    @property
    def layers(self) -> int:
        """Number of layers that `intermediate` can return: the root and the stages."""
        return 1 + len(self.stages)

    @overload
    def intermediate(
        self, images: Tensor, layers: Layers = 1, *, norm: bool = False, reshape: bool = True
    ) -> list[Tensor]: ...

    @overload
    def intermediate(
        self, images: Tensor, layers: Layers = 1, *, norm: bool = False, reshape: bool = True, prefix: Literal[True]
    ) -> list[tuple[Tensor, Tensor]]: ...

    def intermediate(
        self, images: Tensor, layers: Layers = 1, *, norm: bool = False, reshape: bool = True, prefix: bool = False
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
        """Return the maps of chosen layers, [batch, features, height, width] each, with gradients.

        Layer 0 is the root before its pooling; the stages follow. The arguments are those of `ViT.intermediate`. `norm`
        applies the final GroupNorm and ReLU to the last stage, whose mean is then the features. There are no tokens in
        front, so `prefix` adds [batch, 0, features].

        Raises UsageError for a layer that does not exist.
        """
        wanted = selected(layers, self.layers, "layer")
        maps, outputs = self.root(self._prepared(images)), []
        for stage in range(max(wanted) + 1):
            if stage:
                maps = self.stages[stage - 1](self.root_pool(maps) if stage == 1 else maps)
            if stage in wanted:
                outputs.append(F.relu(self.norm(maps)) if norm and stage == len(self.stages) else maps)
        shaped = outputs if reshape else [maps.flatten(2).mT for maps in outputs]
        if not prefix:
            return shaped
        return [(maps, each.flatten(2).mT[:, :0]) for maps, each in zip(shaped, outputs, strict=True)]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the network again in the backward pass instead of storing its activations, or store them again."""
        self.recompute = enable

    @recomputable
    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names, as `ViT.group_matcher` does: each bottleneck, or `coarse` each stage."""
        bottlenecks = [(r"^stages\.(\d+)\.(\d+)", None), (r"^norm\.", (99999,))]
        return dict(stem=r"^root\.", blocks=r"^stages\.(\d+)" if coarse else bottlenecks)

    def reset_head(self, classes: int) -> None:
        """Replace the classifier by one that starts at zero. With 0 classes there is none."""
        self.config = replace(self.config, classes=classes)
        like = self.norm.weight
        self.head = zero_linear(like.numel(), classes, like) if classes else None


class RootPool(nn.Module):
    """3x3 max pooling of stride 2: [batch, width, H, W] -> [batch, width, H / 2, W / 2], rounded up."""

    def forward(self, maps: Tensor) -> Tensor:
        """See the class."""
        # BiT pads with zeros. A max pool's own padding is -inf, which differs where all values are negative.
        return F.max_pool2d(F.pad(maps, (1, 1, 1, 1)), kernel_size=3, stride=2)


class Bottleneck(nn.Module):
    """Pre-activation bottleneck: [batch, inputs, H, W] -> [batch, 4 width, H/stride, W/stride].

    `conv2`, the layer in the middle, has the stride. `size` is the height and width of the input maps.
    """

    def __init__(self, config: ResNetConfig, inputs: int, width: int, stride: int, size: tuple[int, int]) -> None:
        super().__init__()
        outputs = 4 * width
        form, eps = config.std_conv, config.group_norm_eps
        self.norm1 = group_norm(inputs, eps)
        self.conv1 = StdConv2d(inputs, width, 1, form=form)
        self.norm2 = group_norm(width, eps)
        self.conv2: nn.Module = (
            RowColumnAttention(width, stride, size, eps)
            if config.axial
            else StdConv2d(width, width, 3, stride, form=form)
        )
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
