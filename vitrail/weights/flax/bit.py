"""BiT's .npz: the ResNetV2s of google-research/big_transfer, as TensorFlow named them.

With b the stage from 1, u the unit from 01, w the width of the root, C the input features, W = w * 2**(b - 1):

| theirs | shape | ours |
|---|---|---|
| `resnet/root_block/standardized_conv2d/kernel` | (7, 7, 3, w) | `root.weight` |
| `resnet/block{b}/unit{uu}/{a,b,c}/standardized_conv2d/kernel` | (1, 1, C, W), (3, 3, W, W), (1, 1, W, 4W) | `conv1` |
| `resnet/block{b}/unit{uu}/{a,b,c}/group_norm/{gamma,beta}` | (C), (W), (W) | `stages.{b-1}.{u-1}.norm1` |
| `resnet/block{b}/unit01/a/proj/standardized_conv2d/kernel` | (1, 1, C, 4W) | `stages.{b-1}.0.shortcut` |
| `resnet/group_norm/{gamma,beta}` | (C) | `norm` |
| `resnet/head/conv2d/{kernel,bias}` (not in every file) | (1, 1, C, K); (K) | `head` |

Some files number the layers (`standardized_conv2d_17`). Kernels are standardised by (w - mean) / sqrt(var + 1e-10),
GroupNorm has an epsilon of 1e-5, pixels are in [-1, 1].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ResNetConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.flax.npz import found_dtypes, named_axes, stage_units, write_npz
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, state_of
from vitrail.weights.mapping import (
    Conversion,
    NameTable,
    Rule,
    apply_table,
    conv_kernel,
    scale_bias,
    within,
)

ROOT = "resnet/root_block/standardized_conv2d/kernel"
HEAD = "resnet/head/conv2d"
_NUMBERED = re.compile(r"(?<=/)(standardized_conv2d|group_norm|conv2d)_\d+(?=/)")


_GAMMA_BETA = ("gamma", "beta")
_UNIT: NameTable = {
    "conv1.weight": conv_kernel("a/standardized_conv2d/kernel"),
    "conv2.weight": conv_kernel("b/standardized_conv2d/kernel"),
    "conv3.weight": conv_kernel("c/standardized_conv2d/kernel"),
    **scale_bias("norm1", "a/group_norm", _GAMMA_BETA),
    **scale_bias("norm2", "b/group_norm", _GAMMA_BETA),
    **scale_bias("norm3", "c/group_norm", _GAMMA_BETA),
    "shortcut.weight": conv_kernel("a/proj/standardized_conv2d/kernel"),
}
TABLE: NameTable = {
    "root.weight": conv_kernel(ROOT),
    **within("stages.{stage}.{unit}.", "resnet/block{stage}/unit{unit:02}/", _UNIT),
    **scale_bias("norm", "resnet/group_norm", _GAMMA_BETA),
    "head.weight": Rule((f"{HEAD}/kernel",), lambda kernel: kernel[0, 0].mT, lambda weight: weight.mT[None, None]),
    "head.bias": f"{HEAD}/bias",
}
"""Name in the model -> name in the file without numbers of layers; stages and units count from 1."""


class BiT:
    """The format of google-research/big_transfer."""

    name = "bit"

    def recognises(self, archive: Archive) -> bool:
        """Return whether there is the root block of a TensorFlow ResNetV2."""
        return any(_plain(name) == ROOT for name in archive.names)

    def find(self, archive: Archive) -> ForeignModel:
        """Infer the model from the shapes. Raises WeightsError that names the tensor that does not fit."""
        names = _names(archive)
        if not (units := stage_units(archive, names, "resnet/")):
            raise WeightsError(f"{archive.path} has a ResNet without units: there is no resnet/block1/unit01")
        root = named_axes(archive, names.get(ROOT, ROOT), "7", "7", "channels", "width")
        head = f"{HEAD}/kernel"
        classes = named_axes(archive, names[head], "1", "1", "features", "classes")[3] if head in names else 0
        preprocess, said = _evaluation(classes)
        config = ResNetConfig(
            units=units, width=root[3], channels=root[2], classes=classes, image_size=preprocess.image_size,
            mean=(0.5,) * root[2], std=(0.5,) * root[2],
        )  # fmt: skip
        numbered = {plain: name for plain, name in sorted(names.items()) if plain != name}
        origin = {"format": self.name, "file": archive.path.name, "numbered": numbered}
        provenance = {"origin": {**origin, **found_dtypes(archive, archive.names)}}
        card = Card(config, preprocess=preprocess, source=self.name, provenance=provenance)
        entries = _conversions(expected(config, archive.path), numbered)
        return ForeignModel(card, entries, assumptions=said)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model under its original names; a model of another format gets names without numbers.

        Raises WeightsError if the format cannot hold the model, or if its readers would compute something else.
        """
        _check_expressible(model)
        origin = origin_of(card, self.name)
        state = state_of(model)
        entries = _conversions(state, origin.get("numbered", {}))
        write_npz(path, foreign_tensors(state, entries, self.name), origin)


def _plain(name: str) -> str:
    """Return a name without the numbers of layers."""
    return _NUMBERED.sub(r"\1", name)


def _names(archive: Archive) -> dict[str, str]:
    """Return name without numbers -> name in the file. Raises WeightsError if two names become one."""
    names: dict[str, str] = {}
    for name in sorted(archive.names):
        if (first := names.setdefault(_plain(name), name)) != name:
            raise WeightsError(
                f"{archive.path} has {first!r} and {name!r}, which are the same layer with different numbers"
            )
    return names


def _evaluation(classes: int) -> tuple[Preprocess, list[str]]:
    """Return the preprocessing and the note about it: a ResNet takes any image size, and its file contains none.

    Networks fine-tuned on ImageNet were trained on crops of 480 px and are evaluated on images squashed to that size
    (BiT-HyperRule). The pre-trained networks were trained at 224 px.
    """
    if classes == 1000:
        size, preprocess = 480, Preprocess((480, 480), resize="squash")
        why = "1000 classes: fine-tuned on ImageNet with BiT-HyperRule, 480 px; BiT-S itself was trained at 224"
    else:
        size, preprocess = 224, Preprocess((224, 224), resize="small", crop=0.875)
        why = "as in BiT's pre-training; networks were fine-tuned at 128 or 480 px"
    return preprocess, [f"image size {size} px, because the file does not contain it ({why})"]


def _conversions(names: Iterable[str], numbered: Mapping[str, str]) -> list[Conversion]:
    """Return the conversions of all tensors. `numbered` maps names without numbers to those in the file."""
    entries = apply_table(names, TABLE, first=1)
    return [replace(entry, theirs=tuple(numbered.get(name, name) for name in entry.theirs)) for entry in entries]


def _check_expressible(model: nn.Module) -> None:
    """Raise WeightsError with the reason if BiT's readers would not compute what a model computes."""
    if not isinstance(model, ResNet):
        raise WeightsError(f"format 'bit' holds ResNetV2s, not a {type(model).__name__}. Save a ViT as 'google'.")
    config = model.config
    if config.axial:
        raise WeightsError("format 'bit' has no place for axial attention. Save as 'vitrail', which has.")
    if (config.std_conv, config.group_norm_eps) != ("bit", 1e-5):
        raise WeightsError(
            "format 'bit' does not store how kernels are standardised, and its readers use (w - mean) / sqrt(var + "
            f"1e-10) and a GroupNorm epsilon of 1e-5. This model has the form {config.std_conv!r} and "
            f"{config.group_norm_eps}."
        )


FORMAT = BiT()
