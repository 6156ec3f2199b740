"""timm's NaFlexViT: a Vision Transformer for images of any shape, whose patch embedding is a dense layer.

Its other tensors are those of timm's ViT, so the file is read under that one's names.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import Conversion, shape_of
from vitrail.weights.timm.file import TimmFile

EMBEDS = "embeds."
STEM, POSITIONS = "embeds.proj.weight", "embeds.pos_embed"
CHANNELS = 3


def is_naflex(archive: Archive) -> bool:
    """Return whether an archive holds a NaFlexViT."""
    return STEM in archive


def as_vit(file: TimmFile) -> TimmFile:
    """Return the file under the names and shapes of timm's ViT. Raises WeightsError for other kinds of positions."""
    archive = file.archive
    if not file.architecture:
        raise file.error(
            "its tensors are those of timm's NaFlexViTs, which differ in GELU and positions. Add a config.json that "
            "names the architecture"
        )
    if POSITIONS not in archive:
        raise file.error(f"{POSITIONS!r} is missing: vitrail has no NaFlexViT with positions of another kind")
    width, values = shape_of(archive, STEM, 2)
    _, rows, columns, _ = shape_of(archive, POSITIONS, 4)
    patch = math.isqrt(values // CHANNELS)
    if CHANNELS * patch * patch != values:
        raise WeightsError(
            f"{archive.path}: {STEM!r} has {values} inputs, which are not {CHANNELS} channels of a square patch"
        )
    shapes = {_as_vit(name): shape for name, shape in archive.shapes.items()}
    shapes |= {"patch_embed.proj.weight": (width, CHANNELS, patch, patch), "pos_embed": (1, rows * columns, width)}
    size = (CHANNELS, rows * patch, columns * patch)
    file.notes.append(
        f"images of any shape with at most {rows * columns} patches, as many as it has positions; timm's default is "
        "another number for some of these networks"
    )
    return replace(file, archive=replace(archive, shapes=shapes), pretrained={**file.pretrained, "input_size": size})


def _as_vit(name: str) -> str:
    return name.replace(f"{EMBEDS}proj.", "patch_embed.proj.").removeprefix(EMBEDS)


def naflex_entries(entries: list[Conversion], patch: int) -> list[Conversion]:
    """Return the conversions of timm's ViT with the names and shapes that a NaFlexViT has in place of its own."""

    def kernel(flat: Tensor) -> Tensor:
        """Row of the dense layer [row, column, channel] -> kernel [channel, row, column]."""
        return flat.reshape(-1, patch, patch, CHANNELS).permute(0, 3, 1, 2)

    own = {"pos_embed": POSITIONS, "cls_token": f"{EMBEDS}cls_token", "reg_token": f"{EMBEDS}reg_token"}
    own |= {f"patch_embed.proj.{part}": f"{EMBEDS}proj.{part}" for part in ("weight", "bias")}
    found = []
    for entry in entries:
        named = replace(entry, theirs=tuple(own.get(name, name) for name in entry.theirs))
        if entry.ours == "stem.weight":
            named = replace(named, read=kernel)
        found.append(replace(named, reshape=True) if entry.ours == "positions.embedding" else named)
    return found


def native(file: TimmFile, config: ViTConfig, preprocess: Preprocess) -> tuple[ViTConfig, Preprocess]:
    """Return the config of a NaFlexViT, and how it sees images."""
    mode = "naflex" if file.architecture.endswith("_siglip") else "timm"
    seen = replace(preprocess, image_size=config.image_size, resize="native", patch=config.patch)
    return config.changed(native=True, resize_mode=mode), seen
