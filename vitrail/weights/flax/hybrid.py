"""The ResNet in front of Google's hybrids, in the same .npz: names, shapes, and both directions.

After the prefix, with b and u from 1, C the input features, R = 64 * width_factor and W = R * 2**(b - 1):

| theirs | shape | ours |
|---|---|---|
| `conv_root/kernel` | (7, 7, 3, R) | `stem.root.conv.weight` |
| `gn_root/{scale,bias}` | (R), in old files (1, 1, 1, R) | `stem.root.norm` |
| `block{b}/unit{u}/conv{1,2,3}/kernel` | (1, 1, C, W), (3, 3, W, W), (1, 1, W, 4W) | `stem.stages.{b-1}.{u-1}.conv1` |
| `block{b}/unit{u}/gn{1,2,3}/{scale,bias}` | (W), (W), (4W), or with three axes of 1 | `...norm1` |
| `block{b}/unit1/conv_proj/kernel`, `gn_proj/{scale,bias}` | (1, 1, C, 4W); (4W) | `...shortcut.conv`, `.norm` |
| `embedding/kernel`, `bias` | (c, c, C, D); (D) | `stem.proj` |

The patch size, in pixels per token, follows from the convolutions and the embedding: R+Ti/16 has only a root, which
shrinks an image four times, and an embedding of 8 x 8 cells of its output, so that a token covers 32 x 32 pixels.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.flax.encoder import patch_size, shape_of
from vitrail.weights.mapping import Conversion, conv_kernel, reshaped, same, scale_bias, stage_units


def is_hybrid(archive: Archive, prefix: str) -> bool:
    """Return whether the file has a ResNet in front of the encoder."""
    return f"{prefix}conv_root/kernel" in archive


def hybrid_sizes(archive: Archive, prefix: str) -> dict[str, Any]:
    """Return stem, stem_units, stem_width, patch and channels. Raises WeightsError for a ResNet of another kind."""
    name = f"{prefix}conv_root/kernel"
    height, width, channels, features = shape_of(archive, name, "7", "7", "channels", "features")
    if (height, width) != (7, 7):
        raise WeightsError(
            f"{archive.path} has {name!r} in shape {(height, width, channels, features)}. Only hybrids that start with "
            "7 x 7 kernels are supported."
        )
    units = stage_units(archive, archive.names, prefix)
    ratio = 4 * 2 ** max(len(units) - 1, 0)
    patch = ratio * patch_size(archive, prefix)
    return dict(stem="resnet", stem_units=units, stem_width=features, patch=patch, channels=channels)


def wide_norms(archive: Archive, prefix: str) -> list[str]:
    """Return the GroupNorm arrays stored as (1, 1, 1, C), without the prefix."""
    pattern = re.compile(re.escape(prefix) + r"((?:block\d+/unit\d+/)?gn\w*/(?:scale|bias))")
    matches = [match for name in sorted(archive.names) if (match := pattern.fullmatch(name))]
    return [match[1] for match in matches if len(archive.shape(match[0])) == 4]


def hybrid_conversions(config: ViTConfig, prefix: str, wide: Collection[str]) -> list[Conversion]:
    """Return the conversions of the ResNet and of the embedding of its output; `wide` as `wide_norms` returns it."""
    conversions = [
        conv_kernel("stem.root.conv.weight", f"{prefix}conv_root/kernel"),
        *_norm("stem.root.norm", prefix, "gn_root", wide),
        conv_kernel("stem.proj.weight", f"{prefix}embedding/kernel"),
        same("stem.proj.bias", f"{prefix}embedding/bias"),
    ]
    for stage, units in enumerate(config.stem_units):
        for unit in range(units):
            ours, theirs = f"stem.stages.{stage}.{unit}", f"block{stage + 1}/unit{unit + 1}/"
            for layer in "123":
                conversions.append(conv_kernel(f"{ours}.conv{layer}.weight", f"{prefix}{theirs}conv{layer}/kernel"))
                conversions += _norm(f"{ours}.norm{layer}", prefix, f"{theirs}gn{layer}", wide)
            if unit == 0:  # its output has more features than its input
                conversions.append(conv_kernel(f"{ours}.shortcut.conv.weight", f"{prefix}{theirs}conv_proj/kernel"))
                conversions += _norm(f"{ours}.shortcut.norm", prefix, f"{theirs}gn_proj", wide)
    return conversions


def _norm(ours: str, prefix: str, theirs: str, wide: Collection[str]) -> list[Conversion]:
    pair = scale_bias(ours, f"{prefix}{theirs}")
    ends = [f"{theirs}/scale", f"{theirs}/bias"]
    return [
        reshaped(entry.ours, entry.theirs[0], (1, 1, 1, -1)) if end in wide else entry
        for entry, end in zip(pair, ends, strict=True)
    ]
