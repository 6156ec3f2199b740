"""What BiT's ResNet and AxialResNet keep of an image for the backward pass; see `vitrail.costs.memory`."""

from __future__ import annotations

from vitrail.costs.kept import Kept
from vitrail.costs.memory_stem import norm_and_relu
from vitrail.model.resnet.axial import HEADS
from vitrail.model.variants import ResNetConfig


def resnet_memory(kept: Kept, config: ResNetConfig, height: int, width: int) -> None:
    """Add what a ResNet keeps of an image of `height` x `width` pixels; sizes round up at every stride."""
    kept.product(config.channels * height * width)
    height, width = _half(height), _half(width)
    kept.product(config.width * (height + 2) * (width + 2))  # padded with zeros for the max pool
    height, width, inputs = _half(height), _half(width), config.width
    kept.indices(inputs * height * width)
    for stage, units in enumerate(config.units):
        features = config.width * 2**stage
        for unit in range(units):
            before = height * width
            norm_and_relu(kept, inputs, before)
            kept.cast(inputs * before, times=1 if unit else 2)  # for the first convolution and the shortcut's
            norm_and_relu(kept, features, before)
            strided = stage > 0 and unit == 0
            if config.axial:
                _row_column_attention(kept, features, height, width, strided)
            else:
                kept.cast(features * before)
            if strided:
                height, width = _half(height), _half(width)
            area = height * width
            norm_and_relu(kept, features, area)
            kept.cast(features * area)
            inputs = 4 * features
    norm_and_relu(kept, inputs, height * width)
    if config.classes:
        kept.product(inputs)


def _row_column_attention(kept: Kept, features: int, height: int, width: int, strided: bool) -> None:
    values = features * height * width
    _axis(kept, values, lines=height, tokens=width)
    norm_and_relu(kept, features, height * width, relu=False)
    _axis(kept, values, lines=width, tokens=height)
    if strided:
        kept.product(values)  # the average pool's input


def _axis(kept: Kept, values: int, lines: int, tokens: int) -> None:
    """`AxisAttention`: the lines; q, k and v laid out for each product they are in; the maps."""
    maps = lines * HEADS * tokens**2
    kept.product(values)  # the lines
    kept.product(2 * values)  # q and k, half as wide as the lines, for q k and for their products with positions
    kept.product(values)  # v
    kept.normal(maps)
    kept.cast(maps, times=2)  # for the values and for their positions


def _half(side: int) -> int:
    return (side + 1) // 2
