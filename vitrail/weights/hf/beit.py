"""BEiT in transformers: relative position biases, LayerScale, keys without bias, the mean of the patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.family import HALF, Family, Layout, Statistics
from vitrail.weights.mapping import Conversion, joined, rows, square_side

_TABLE = "relative_position_bias_table"


class Beit(Family):
    """BEiT. With mean pooling, the only LayerNorm after the blocks is that of the pooled patches.

    A model of masked pre-training (`BeitForMaskedImageModeling`) loads as an encoder whose class token is read:
    its classifier of visual tokens predicts one code for each patch, which no classifier of images does.
    """

    model_type = "beit"
    title = "Beit"
    gammas = ("lambda_1", "lambda_2")
    remarks = ("keys without a bias: BEiT has none, and a zero one changes nothing",)
    defaults: Mapping[str, Any] = dict(layer_norm_eps=1e-12, patch_size=16, layer_scale_init_value=0.1)
    unused = (
        *Family.unused,
        (r".*\.relative_position_index", "computed from the grid"),
        (r"lm_head\.\w+", "classifier of the visual tokens of masked pre-training"),
        (r"layernorm\.\w+", "LayerNorm in front of the classifier of visual tokens"),
    )

    def own(self, archive: Archive, layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.own`."""
        pooled = layout.norm.endswith("pooler.layernorm")
        values: dict[str, Any] = dict(classes=rows(archive, "classifier.weight"), class_token=True)
        values |= dict(pool="gap", final_norm="pooled") if pooled else dict(pool="cls")
        if f"{self.layers(layout)}.0.lambda_1" in archive:
            values["layer_scale"] = float(settings["layer_scale_init_value"]) or 0.1
        places = {
            "input": f"{layout.prefix}embeddings.position_embeddings",
            "shared": self.shared_table(layout),
            "every": self.table(layout, 0),
        }
        found = {place: name for place, name in places.items() if name in archive}
        if len(found) > 1:
            names = " and ".join(repr(name) for name in found.values())
            raise WeightsError(f"{archive.path} has two kinds of positions, {names}; vitrail's models have one")
        if not found:
            return {**values, "positions": "none"}
        (place,) = found
        return {**values, "positions": "1d" if place == "input" else "relative_bias", "place": place}

    def final_norm(self, archive: Archive, prefix: str) -> str:
        """See `Family.final_norm`: after the mean, after the tokens, or (pre-training) outside the encoder."""
        for name in (f"{prefix}pooler.layernorm", f"{prefix}layernorm", "layernorm"):
            if f"{name}.weight" in archive:
                return name
        raise WeightsError(
            f"{archive.path} holds a BEiT without its last LayerNorm ({prefix}pooler.layernorm or {prefix}layernorm): "
            "it was saved without its pooler; save it with add_pooling_layer=True"
        )

    def side(self, archive: Archive, layout: Layout) -> int:
        """See `Family.side`: a table of g x g patches has (2g - 1)^2 offsets and three entries of the class token."""
        for name in (self.shared_table(layout), self.table(layout, 0)):
            if offsets := rows(archive, name):
                return (square_side(archive, name, offsets - 3) + 1) // 2
        return super().side(archive, layout)

    def preprocess(self, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Family.preprocess`."""
        return Preprocess(image_size, "squash"), HALF

    def refusal(self, config: ViTConfig) -> str:
        """See `Family.refusal`."""
        height, width = config.image_size
        relative = config.positions == "relative_bias"
        checks = {
            "distillation token": config.distilled,
            "registers": bool(config.registers),
            "pre-logits layer": bool(config.pre_logits),
            f"{config.mlp} MLP": config.mlp != "gelu",
            "pooling of class token and mean together": config.pool == "cls+gap",
            "mean of normalised tokens: it normalises the mean": config.pool == "gap" and config.final_norm == "tokens",
            "usable relative positions for images that are not square": relative and height != width,
        }
        found = [what for what, there in checks.items() if there]
        return f"{self.bare} has no {found[0]}" if found else ""

    def norm_within(self, config: ViTConfig) -> str:
        """See `Family.norm_within`."""
        return "pooler.layernorm" if config.pool == "gap" else "layernorm"

    def json(self, config: ViTConfig, layout: Layout) -> dict[str, Any]:
        """See `Family.json`."""
        relative = config.positions == "relative_bias"
        return dict(
            intermediate_size=config.mlp_dim,
            use_mask_token=False,
            use_absolute_position_embeddings=config.positions == "1d",
            use_relative_position_bias=relative and config.place != "shared",
            use_shared_relative_position_bias=relative and config.place == "shared",
            use_mean_pooling=config.pool == "gap",
            layer_scale_init_value=0.0 if config.layer_scale is None else (config.layer_scale or 0.1),
        )

    def shared_table(self, layout: Layout) -> str:
        """Name of the bias that all layers share."""
        return f"{layout.prefix}{'encoder.relative' if layout.disk else 'shared'}_position_bias.{_TABLE}"

    def table(self, layout: Layout, layer: int) -> str:
        """Name of a layer's own bias."""
        within = "attention.attention.relative_position_bias" if layout.disk else "relative_position_bias"
        return f"{self.layers(layout)}.{layer}.{within}.{_TABLE}"

    def positions(self, config: ViTConfig, layout: Layout) -> list[Conversion]:
        """See `Family.positions`."""
        if config.positions == "none":
            return []
        if config.positions == "1d":
            return super().positions(config, layout)
        shared = config.place == "shared"
        names = [self.shared_table(layout)] if shared else [self.table(layout, layer) for layer in range(config.depth)]
        return [Conversion("positions.bias", tuple(names), _stack, _unstack)]

    def qkv(self, ours: str, theirs: str, layout: Layout) -> list[Conversion]:
        """See `Family.qkv`: without the keys' bias, which adds one number to all logits of a query."""
        query, key, value = (f"{theirs}.{self.parts(layout)[part]}" for part in ("query", "key", "value"))
        weight = joined(f"{ours}.weight", (f"{query}.weight", f"{key}.weight", f"{value}.weight"))
        return [weight, Conversion(f"{ours}.bias", (f"{query}.bias", f"{value}.bias"), _with_keys, _without_keys)]


def _stack(*tables: Tensor) -> Tensor:
    """Tables [distances, heads] -> [layers, distances, heads]."""
    return torch.stack(tables)


def _unstack(bias: Tensor) -> tuple[Tensor, ...]:
    return tuple(table.clone() for table in bias)


def _with_keys(query: Tensor, value: Tensor) -> Tensor:
    return torch.cat([query, torch.zeros_like(query), value])


def _without_keys(bias: Tensor) -> tuple[Tensor, ...]:
    query, _, value = bias.chunk(3)
    return query.clone(), value.clone()
