"""What the stems keep of an image for the backward pass; see `vitrail.costs.memory`."""

from __future__ import annotations

import math

from vitrail.costs.kept import Kept
from vitrail.model.stems.convolutional import hmlp_stages
from vitrail.model.stems.hybrid import ROOT_WIDTH
from vitrail.model.variants import ViTConfig


def stem_memory(kept: Kept, config: ViTConfig, height: int, width: int) -> None:
    """Add what the stem of a ViT keeps of an image of `height` x `width` pixels."""
    if config.stem == "linear":
        kept.product(config.channels * height * width)
    elif config.stem == "resnet":
        _hybrid(kept, config, height, width)
    else:
        _convolutions(kept, config, height * width)


def _convolutions(kept: Kept, config: ViTConfig, area: int) -> None:
    """Convolution, norm, activation, again and again: Hardswish and GELU keep their input, ReLU its output."""
    kept.product(config.channels * area)
    after_norm = kept.arithmetic.norm if config.stem_norm == "layer" else kept.arithmetic.product
    stages = _stages(config)
    for number, (stride, features) in enumerate(stages):
        area //= stride**2
        values = features * area
        kept.bytes += after_norm * values  # what the norm reads
        if config.stem_norm == "layer":
            kept.statistics(area)
        if config.stem == "early":
            kept.bytes += after_norm * values
            if after_norm != kept.arithmetic.product:
                kept.product(values)
        elif number < len(stages) - 1:
            kept.bytes += after_norm * values
            kept.product(values)


def _stages(config: ViTConfig) -> list[tuple[int, int]]:
    """Stride and features of each convolution with a norm."""
    if config.stem == "hmlp":
        *first, last = hmlp_stages(config.patch)
        return [*((stride, config.width // 4) for stride in first), (last, config.width)]
    return [(2, config.width // 2**step) for step in reversed(range(config.patch.bit_length() - 1))]


def norm_and_relu(kept: Kept, features: int, area: int, *, relu: bool = True) -> None:
    """A GroupNorm of `features` x `area` values and the ReLU after it, which keeps its output."""
    kept.normal(features * area)
    kept.statistics(math.gcd(32, features))
    if relu:
        kept.normal(features * area)


def _hybrid(kept: Kept, config: ViTConfig, height: int, width: int) -> None:
    """The ResNet in front of a hybrid; a convolution that pads unevenly keeps its padded copy."""
    kept.product(config.channels * (height + 5) * (width + 5))
    height, width = height // 2, width // 2
    norm_and_relu(kept, ROOT_WIDTH, height * width)
    height, width, inputs = height // 2, width // 2, ROOT_WIDTH  # the max pool
    kept.indices(inputs * height * width)
    if not kept.arithmetic.casts:
        kept.product(inputs * height * width)
    for stage, units in enumerate(config.stem_units):
        features = ROOT_WIDTH * 2**stage
        for unit in range(units):
            before, strided = height * width, stage > 0 and unit == 0
            kept.cast(inputs * before, times=1 if unit else 2)  # for the first convolution and the shortcut's
            norm_and_relu(kept, features, before)
            if strided:
                kept.product(features * (height + 1) * (width + 1))
                height, width = height // 2, width // 2
            else:
                kept.cast(features * before)
            area = height * width
            norm_and_relu(kept, features, area)
            kept.cast(features * area)
            norm_and_relu(kept, 4 * features, area, relu=False)
            if not unit:
                norm_and_relu(kept, 4 * features, area, relu=False)
            kept.normal(4 * features * area)  # the ReLU after the sum
            inputs = 4 * features
    kept.cast(inputs * height * width)
