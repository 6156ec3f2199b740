"""Google's .npz: Vision Transformers and hybrids of google-research/vision_transformer, AugReg's models among them.

The names are those of `encoder.py` and, for hybrids, of `hybrid.py`, in the old or the linen numbering, and

| theirs | shape | ours |
|---|---|---|
| `Transformer/posembed_input/pos_embedding` | (1, 1 + N, D), class token first | `positions.embedding` |

A file without `cls` is a model with average pooling and N positions. The files do not contain what their own reader
fixes: tanh GELU, LayerNorm epsilon 1e-6, pixels in [-1, 1], positions resampled like `scipy.ndimage.zoom(order=1)`,
images squashed to the model's size (`vit_jax/input_pipeline.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.flax import encoder as flax
from vitrail.weights.flax import hybrid
from vitrail.weights.flax.write import check_grid, expressible, found_dtypes, write_npz
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, state_of
from vitrail.weights.mapping import Conversion, same

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
        wide = hybrid.wide_norms(archive, prefix)
        conversions = _conversions(config, layout, wide)
        unused = flax.unused_tensors(archive, prefix)
        origin = {"format": self.name, "file": archive.path.name, **asdict(layout), "wide_norms": wide}
        card = Card(
            config,
            preprocess=Preprocess(config.image_size, resize="squash"),
            source=self.name,
            provenance={"origin": {**origin, **found_dtypes(archive, archive.names - unused.keys())}},
        )
        said = flax.assumed_grid(config.grid, f"{prefix}{POSITIONS}") + flax.projector_note(prefix, config.classes)
        return ForeignModel(card, conversions, unused, assumptions=said)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the model under its original names; a model of another format gets the old names of released files.

        Raises WeightsError if the format cannot hold the model, or if its readers would compute something else: see
        `flax/write.py`.
        """
        config = expressible(model, self.name, stems=("linear", "resnet"), pools=("cls", "gap"))
        if config.positions != "1d":
            raise WeightsError(
                f"format {self.name!r} holds learned 1d positions only. Those of this model are {config.positions!r}."
            )
        if config.pool == "cls" and not config.cls_position:
            raise WeightsError(
                f"format {self.name!r} has a position for the class token, and this model has none. Save as "
                "'big_vision', which has none either."
            )
        check_grid(config, self.name)
        origin = origin_of(card, self.name)
        layout = flax.EncoderLayout(origin.get("prefix", ""), origin.get("naming", "old"))
        conversions = _conversions(config, layout, origin.get("wide_norms", []))
        write_npz(path, foreign_tensors(state_of(model), conversions, self.name), origin)


def _config(archive: Archive, layout: flax.EncoderLayout) -> ViTConfig:
    prefix = layout.prefix
    sizes: dict[str, Any] = {**flax.top_sizes(archive, prefix), **flax.encoder_sizes(archive, layout)}
    sizes["patch"] = flax.patch_size(archive, prefix)
    if hybrid.is_hybrid(archive, prefix):
        sizes |= hybrid.hybrid_sizes(archive, prefix)
    pool = "cls" if f"{prefix}cls" in archive else "gap"
    positions = flax.shape_of(archive, f"{prefix}{POSITIONS}", "1", "positions", "width")
    cells = positions[1] - (pool == "cls")
    if cells < 1:
        raise WeightsError(f"{archive.path} has only the class token's position in '{prefix}{POSITIONS}'")
    rows, columns = flax.grid_of(cells)
    image_size = (rows * sizes["patch"], columns * sizes["patch"])
    return flax.build_config(archive, **sizes, image_size=image_size, pool=pool, gelu="tanh", resize_mode="official")


def _conversions(config: ViTConfig, layout: flax.EncoderLayout, wide: list[str]) -> list[Conversion]:
    prefix = layout.prefix
    stem = hybrid.hybrid_conversions(config, prefix, wide) if config.stem == "resnet" else None
    conversions = flax.linear_stem_conversions(config, prefix) if stem is None else stem
    if config.pool == "cls":
        conversions.append(same("cls", f"{prefix}cls"))
    conversions.append(same("positions.embedding", f"{prefix}{POSITIONS}"))
    return conversions + flax.encoder_conversions(config, layout)


FORMAT = Google()
