"""BEiT in transformers: relative position biases, LayerScale, keys without a bias, mean pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder
from vitrail.weights.mapping import Conversion, joined, number_in, rows, square_side, stacked, without_key_bias

_TABLE = "relative_position_bias_table"


class Beit(Encoder):
    """BEiT. With mean pooling, the only LayerNorm after the blocks acts on the mean of the patches.

    A model of masked pre-training (`BeitForMaskedImageModeling`) is read as an encoder with the class token as its
    features. Its classifier is not read: it predicts one visual token per patch, not the class of an image.
    """

    model_type = "beit"
    title = "Beit"
    gammas = ("lambda_1", "lambda_2")
    expresses = frozenset({"LayerScale", "relative_bias positions", "none positions", "pooling by 'gap'"})
    remarks = ("keys without a bias, as in every BEiT (a bias of zero is equivalent)",)
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-12, patch_size=16, layer_scale_init_value=0.1)
    constants: ClassVar[Mapping[str, Any]] = dict(use_mask_token=False)
    unused = (
        *Encoder.unused,
        (r".*\.relative_position_index", "computed from the grid"),
        (r"lm_head\.\w+", "classifier of the visual tokens of masked pre-training"),
        (r"layernorm\.\w+", "LayerNorm in front of the classifier of visual tokens"),
    )

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        pooled = self.norm.endswith("pooler.layernorm")
        values: dict[str, Any] = dict(classes=rows(archive, "classifier.weight"), class_token=True)
        values |= dict(pool="gap", final_norm="pooled") if pooled else dict(pool="cls")
        if f"{self.layers}.0.lambda_1" in archive:
            values["layer_scale"] = number_in(settings, "layer_scale_init_value", str(archive.path)) or 0.1
        places = {
            "input": f"{self.prefix}embeddings.position_embeddings",
            "shared": self.shared_table,
            "every": self.table(0),
        }
        found = {place: name for place, name in places.items() if name in archive}
        if len(found) > 1:
            names = " and ".join(repr(name) for name in found.values())
            raise WeightsError(f"{archive.path} has two kinds of positions, {names}; a model of vitrail has one kind")
        if not found:
            return {**values, "positions": "none"}
        (place,) = found
        return {**values, "positions": "1d" if place == "input" else "relative_bias", "place": place}

    @classmethod
    def final_norm(cls, archive: Archive, prefix: str) -> str:
        """See `Encoder.final_norm`: after the mean, after the tokens, or (pre-training) outside the encoder."""
        for name in (f"{prefix}pooler.layernorm", f"{prefix}layernorm", "layernorm"):
            if f"{name}.weight" in archive:
                return name
        raise WeightsError(
            f"{archive.path} holds a BEiT without its last LayerNorm ({prefix}pooler.layernorm or {prefix}layernorm), "
            "because it was saved without its pooler. Save it with add_pooling_layer=True."
        )

    def side(self, archive: Archive) -> int:
        """See `Encoder.side`: a table for g x g patches has (2g - 1)^2 offsets, and 3 rows for the class token."""
        for name in (self.shared_table, self.table(0)):
            if offsets := rows(archive, name):
                return (square_side(archive, name, offsets - 3) + 1) // 2
        return super().side(archive)

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.pre_logits:
            return f"{cls.bare()} has no pre-logits layer"
        if config.pool == "gap" and config.final_norm == "tokens":
            return f"{cls.bare()} has no mean of normalised tokens, because it normalises the mean"
        if config.positions == "relative_bias" and config.image_size[0] != config.image_size[1]:
            return f"{cls.bare()} has no usable relative positions for images that are not square"
        return super().refusal(config)

    @classmethod
    def norm_within(cls, config: ViTConfig) -> str:
        """See `Encoder.norm_within`."""
        return "pooler.layernorm" if config.pool == "gap" else "layernorm"

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        relative = config.positions == "relative_bias"
        return dict(
            use_absolute_position_embeddings=config.positions == "1d",
            use_relative_position_bias=relative and config.place != "shared",
            use_shared_relative_position_bias=relative and config.place == "shared",
            use_mean_pooling=config.pool == "gap",
            layer_scale_init_value=0.0 if config.layer_scale is None else (config.layer_scale or 0.1),
        )

    @property
    def shared_table(self) -> str:
        """Name of the position bias that all layers share."""
        return f"{self.prefix}{'encoder.relative' if self.disk else 'shared'}_position_bias.{_TABLE}"

    def table(self, layer: int) -> str:
        """Return the name of a layer's own position bias."""
        within = "attention.attention.relative_position_bias" if self.disk else "relative_position_bias"
        return f"{self.layers}.{layer}.{within}.{_TABLE}"

    def positions(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.positions`."""
        if config.positions == "none":
            return []
        if config.positions == "1d":
            return super().positions(config)
        if config.place == "shared":
            return [stacked("positions.bias", (self.shared_table,))]
        return [stacked("positions.bias", tuple(self.table(layer) for layer in range(config.depth)))]

    def qkv(self, ours: str, theirs: str) -> list[Conversion]:
        """See `Encoder.qkv`."""
        query, key, value = (f"{theirs}.{self.parts[part]}" for part in ("query", "key", "value"))
        return [
            joined(f"{ours}.weight", (f"{query}.weight", f"{key}.weight", f"{value}.weight")),
            without_key_bias(f"{ours}.bias", f"{query}.bias", f"{value}.bias"),
        ]


class Data2Vec(Beit):
    """Data2Vec for images: BEiT's network with other weights.

    Its bare model is saved without the LayerNorm of its pooler. Then the features are the mean of the patches as it is.
    """

    model_type = "data2vec-vision"
    title = "Data2VecVision"
    expresses = Beit.expresses | {"network without a last LayerNorm"}

    @classmethod
    def headed_prefix(cls) -> str:
        """See `Encoder.headed_prefix`."""
        return "data2vec_vision."

    @classmethod
    def final_norm(cls, archive: Archive, prefix: str) -> str:
        """See `Encoder.final_norm`."""
        found = any(f"{name}.weight" in archive for name in (f"{prefix}pooler.layernorm", f"{prefix}layernorm"))
        return super().final_norm(archive, prefix) if found else ""

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        bare = {} if self.norm else dict(pool="gap", final_norm="none")
        return {**super().own(archive, settings), **bare}

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.final_norm == "none" and (config.classes or config.pool != "gap"):
            return f"{cls.bare()} has a LayerNorm in front of a classifier, and on the class token"
        return super().refusal(config)
