"""Google's .npz: Vision Transformers and hybrids of google-research/vision_transformer, AugReg's models among them.

The names are those of `encoder.py`, in the old or the linen numbering. The table of positions (1, 1 + N, D) starts with
that of the class token. Hybrids have a ResNet in front. With b and u from 1, C the input features, R = 64 *
width_factor and W = R * 2**(b - 1):

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

A file without `cls` is a model with average pooling and N positions. The files do not contain what their own reader
fixes: tanh GELU, LayerNorm epsilon 1e-6, pixels in [-1, 1], positions resampled like `scipy.ndimage.zoom(order=1)`,
images squashed to the model's size (`vit_jax/input_pipeline.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.flax import encoder as flax
from vitrail.weights.flax.write import check_grid, expressible, found_dtypes, write_npz
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, state_of
from vitrail.weights.mapping import Conversion, NameTable, conv_kernel, reshaped, scale_bias, stage_units, within

POSITIONS = "Transformer/posembed_input/pos_embedding"


@dataclass(frozen=True)
class Google:
    """The format of google-research/vision_transformer."""

    name: str = "google"

    def recognises(self, archive: Archive) -> bool:
        """Return whether there is a patch embedding, and an encoder that adds its own positions."""
        prefix = flax.find_prefix(archive)
        return prefix is not None and not flax.is_big_vision(archive, prefix)

    def find(self, archive: Archive) -> ForeignModel:
        """Infer the model from the shapes. Raises WeightsError that names the tensor that does not fit."""
        prefix = flax.find_prefix(archive)
        if prefix is None:
            raise WeightsError(f"{archive.path} is not in Google's format: it has no embedding/kernel and no encoder")
        layout = flax.find_layout(archive, prefix)
        config = _config(archive, layout)
        wide = _wide_norms(archive, prefix)
        unused = flax.unused_tensors(archive, prefix)
        origin = {"format": self.name, "file": archive.path.name, **asdict(layout), "wide_norms": wide}
        card = Card(
            config,
            preprocess=Preprocess(config.image_size, resize="squash"),
            source=self.name,
            provenance={"origin": {**origin, **found_dtypes(archive, archive.names - unused.keys())}},
        )
        said = flax.assumed_grid(config.grid, f"{prefix}{POSITIONS}") + flax.projector_note(prefix, config.classes)
        entries = _conversions(expected(config, archive.path), config, layout, wide)
        return ForeignModel(card, entries, unused, assumptions=said)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model under its original names; a model of another format gets the old names of released files.

        Raises WeightsError if the format cannot hold the model, or if its readers would compute something else: see
        `flax/write.py`.
        """
        config = expressible(model, self.name, has="stem=resnet cls_position")
        if config.pool == "cls" and not config.cls_position:
            raise WeightsError(
                f"format {self.name!r} has a position for the class token, and this model has none. Save as "
                "'big_vision', which has none either."
            )
        check_grid(config, self.name)
        origin = origin_of(card, self.name)
        layout = flax.EncoderLayout(origin.get("prefix", ""), origin.get("naming", "old"))
        state = state_of(model)
        entries = _conversions(state, config, layout, origin.get("wide_norms", []))
        write_npz(path, foreign_tensors(state, entries, self.name), origin)


def _config(archive: Archive, layout: flax.EncoderLayout) -> ViTConfig:
    prefix = layout.prefix
    sizes: dict[str, Any] = {**flax.top_sizes(archive, prefix), **flax.encoder_sizes(archive, layout)}
    sizes["patch"] = flax.patch_size(archive, prefix)
    if _is_hybrid(archive, prefix):
        sizes |= _hybrid_sizes(archive, prefix)
    pool = "cls" if f"{prefix}cls" in archive else "gap"
    positions = flax.named_axes(archive, f"{prefix}{POSITIONS}", "1", "positions", "width")
    cells = positions[1] - (pool == "cls")
    if cells < 1:
        raise WeightsError(f"{archive.path} has only the class token's position in '{prefix}{POSITIONS}'")
    rows, columns = flax.grid_of(cells)
    image_size = (rows * sizes["patch"], columns * sizes["patch"])
    return flax.build_config(archive, **sizes, image_size=image_size, pool=pool, gelu="tanh", resize_mode="official")


def _is_hybrid(archive: Archive, prefix: str) -> bool:
    """Return whether the file has a ResNet in front of the encoder."""
    return f"{prefix}conv_root/kernel" in archive


def _hybrid_sizes(archive: Archive, prefix: str) -> dict[str, Any]:
    """Return stem, stem_units, stem_width, patch and channels. Raises WeightsError for a ResNet of another kind."""
    name = f"{prefix}conv_root/kernel"
    height, width, channels, features = flax.named_axes(archive, name, "7", "7", "channels", "features")
    if (height, width) != (7, 7):
        raise WeightsError(
            f"{archive.path} has {name!r} in shape {(height, width, channels, features)}. Only hybrids that start with "
            "7 x 7 kernels are supported."
        )
    units = stage_units(archive, archive.names, prefix)
    ratio = 4 * 2 ** max(len(units) - 1, 0)
    patch = ratio * flax.patch_size(archive, prefix)
    return dict(stem="resnet", stem_units=units, stem_width=features, patch=patch, channels=channels)


def _wide_norms(archive: Archive, prefix: str) -> list[str]:
    """Return the GroupNorm arrays stored as (1, 1, 1, C), without the prefix."""
    pattern = re.compile(re.escape(prefix) + r"((?:block\d+/unit\d+/)?gn\w*/(?:scale|bias))")
    matches = [match for name in sorted(archive.names) if (match := pattern.fullmatch(name))]
    return [match[1] for match in matches if len(archive.shape(match[0])) == 4]


def _table(config: ViTConfig, layout: flax.EncoderLayout) -> NameTable:
    """Return the table of a file."""
    table = {**flax.encoder_table(layout, config.heads), "positions.embedding": f"{{prefix}}{POSITIONS}"}
    if config.stem == "linear":
        return table
    unit: NameTable = {
        "conv{number}.weight": conv_kernel("conv{number}/kernel"),
        **scale_bias("norm{number}", "gn{number}"),
        "shortcut.conv.weight": conv_kernel("conv_proj/kernel"),
        **scale_bias("shortcut.norm", "gn_proj"),
    }
    return table | {
        "stem.root.conv.weight": conv_kernel("{prefix}conv_root/kernel"),
        **scale_bias("stem.root.norm", "{prefix}gn_root"),
        "stem.proj.weight": conv_kernel("{prefix}embedding/kernel"),
        "stem.proj.bias": "{prefix}embedding/bias",
        **within("stem.stages.{stage}.{unit}.", "{prefix}block{stage}/unit{unit}/", unit),
    }


def _conversions(
    names: Iterable[str], config: ViTConfig, layout: flax.EncoderLayout, wide: Collection[str]
) -> list[Conversion]:
    """Return the conversions of all tensors; `wide` are the arrays of shape (1, 1, 1, C), from `_wide_norms`."""
    entries = flax.encoder_conversions(names, _table(config, layout), layout)
    wide_names = {f"{layout.prefix}{name}" for name in wide}
    shape = reshaped("", (1, 1, 1, -1))
    return [
        replace(entry, reshape=True, write=shape.write) if entry.theirs[0] in wide_names else entry for entry in entries
    ]


FORMAT = Google()
