"""BiT's ResNets as timm names them: `stem.conv`, `stages.0.blocks.1.conv2`, `head.fc`.

timm standardises kernels with sqrt(var + 1e-8), the official code with sqrt(var + 1e-10). With kernels ten times as
large, both give the same result, so a model of the official kind is saved for timm with such kernels.
"""

from __future__ import annotations

from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.resnet import ResNet
from vitrail.model.variants import BIT_UNITS, ResNetConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected_of
from vitrail.weights.formats import foreign_tensors, state_of
from vitrail.weights.mapping import Conversion, NameTable, apply_table, count, reshaped, shape_of, within
from vitrail.weights.parts import first_reason
from vitrail.weights.timm.file import GROUP_NORM_EPS, TimmFile, refuse, statistics
from vitrail.weights.timm.names import BOTTLENECK
from vitrail.words import shown

SCALE = 10.0
"""sqrt(1e-8 / 1e-10): kernels times this factor are standardised in timm as the official code does."""
PUBLISHED = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")
"""Depth and width of timm's architectures `resnetv2_50x1_bit` and so on, which take neither as an argument."""


def is_bit(archive: Archive) -> bool:
    """Return whether the archive holds a ResNetV2 of timm."""
    return {"stem.conv.weight", "stages.0.blocks.0.norm1.weight", "stages.0.blocks.0.conv1.weight"} <= archive.names


def infer_bit(file: TimmFile) -> ResNetConfig:
    """Return the config of the ResNet in a file. Raises WeightsError, naming the tensor, if it is not a BiT."""
    refuse(file)
    archive = file.archive
    if file.pool not in (None, "", "avg"):
        raise file.error(f"global_pool of config.json is {shown(file.pool)}; valid: avg")
    if "stages.0.blocks.0.conv3.weight" not in archive:
        raise WeightsError(f"{archive.path} lacks 'stages.0.blocks.0.conv3.weight': BiT's blocks are bottlenecks")
    width, channels = shape_of(archive, "stem.conv.weight", 4)[:2]
    stages = range(count(archive, "stages."))
    return ResNetConfig(
        units=tuple(count(archive, f"stages.{stage}.blocks.") for stage in stages),
        width=width,
        image_size=file.image_size() or (224, 224),
        channels=channels,
        classes=shape_of(archive, "head.fc.weight", 4)[0] if "head.fc.weight" in archive else 0,
        std_conv="timm",
        group_norm_eps=GROUP_NORM_EPS,
        **statistics(file, channels),
    )


def bit_conversions(config: ResNetConfig) -> list[Conversion]:
    """Return the conversions of all tensors of a ResNet in a timm file."""
    table: NameTable = {
        "root.weight": "stem.conv.weight",
        **within("stages.{stage}.{unit}.", "stages.{stage}.blocks.{unit}.", BOTTLENECK),
        "norm.{part}": "norm.{part}",
        "head.weight": reshaped("head.fc.weight", (config.classes, config.features, 1, 1)),
        "head.bias": "head.fc.bias",
    }
    return apply_table(expected_of(config), table)


def bit_architecture(config: ResNetConfig) -> str:
    """Return the name of the timm architecture of this network. Raises WeightsError if there is none."""
    for name in PUBLISHED:
        depth, width = map(int, name.split("x"))
        if (config.units, config.width) == (BIT_UNITS[depth], 64 * width):
            return f"resnetv2_{name}_bit"
    raise WeightsError(
        f"timm has no BiT of units {config.units} and width {config.width}, so no config.json can name it. To save "
        "the tensors alone, give a path that ends in .safetensors."
    )


def bit_tensors(model: ResNet) -> dict[str, Tensor]:
    """Return a ResNet's tensors under timm's names. Raises WeightsError with the reason if timm cannot express it."""
    config, state = model.config, state_of(model)
    reasons = {
        "its 3 x 3 convolutions are axial attention": config.axial,
        f"its kernels are standardised as {config.std_conv!r}": config.std_conv == "hybrid",
        f"its GroupNorm has the epsilon {config.group_norm_eps}, timm's {GROUP_NORM_EPS}": config.group_norm_eps
        != GROUP_NORM_EPS,
    }
    if reason := first_reason(reasons):
        raise WeightsError(f"timm cannot express this ResNet: {reason}")
    if config.std_conv == "bit":
        state |= {name: kernel * SCALE for name, kernel in state.items() if kernel.dim() == 4}
    return foreign_tensors(state, bit_conversions(config), "timm")
