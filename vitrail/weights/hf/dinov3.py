"""DINOv3 in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.rotary.settings import Rotary
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.mapping import (
    IMAGENET,
    Conversion,
    eva_heads,
    first_reason,
    joined,
    number_in,
    same,
    shape_of,
    stem_sizes,
    without_key_bias,
)


class DinoV3(Encoder):
    """DINOv3: rotary positions, registers, LayerScale, keys without a bias, SwiGLU in the larger ones. It has no head.

    On disk the blocks are `layer.0`, in memory `model.layer.0`. In training, transformers rescales the coordinates at
    random (`pos_embed_rescale`), which vitrail does not.
    """

    model_type = "dinov3_vit"
    title = "DINOv3ViT"
    stem = "embeddings.patch_embeddings"
    norms = ("norm1", "norm2")
    gammas = ("layer_scale1.lambda1", "layer_scale2.lambda1")
    part_names: ClassVar[dict[str, tuple[str, str]]] = {
        **{part: (f"attention.{part[0]}_proj",) * 2 for part in ("query", "key", "value", "out")},
        "fc1": ("mlp.up_proj", "mlp.up_proj"),
        "fc2": ("mlp.down_proj", "mlp.down_proj"),
    }
    expresses = frozenset({"registers", "LayerScale", "swiglu MLP", "none positions", "rotary positions"})
    defaults: ClassVar[Mapping[str, Any]] = dict(
        layer_norm_eps=1e-5, patch_size=16, layerscale_value=1.0, rope_theta=100.0
    )
    fields: ClassVar[Mapping[str, str]] = {
        "intermediate_size": "mlp_dim",
        "layerscale_value": "layer_scale",
        "num_register_tokens": "registers",
    }
    constants: ClassVar[Mapping[str, Any]] = dict(key_bias=False, proj_bias=True, mlp_bias=True)
    remarks = ("keys without a bias, as in every DINOv3",)

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        where = f"{archive.path}, config.json"
        if (name := f"{self.layers}.0.{self.parts['key']}.bias") in archive:
            raise WeightsError(f"{archive.path} has {name!r}, and no published DINOv3 has a bias of keys")
        registers = shape_of(archive, f"{self.prefix}embeddings.register_tokens", 3)[1]
        return dict(
            classes=0,
            positions="none",
            rotary=Rotary(base=number_in(settings, "rope_theta", where), coordinates="centred", pairs="halves"),
            registers=registers,
            key_bias=False,
            layer_scale=number_in(settings, "layerscale_value", where),
            mlp="swiglu" if self._gated(archive) else "gelu",
        )

    def _gated(self, archive: Archive) -> bool:
        return f"{self.layers}.0.mlp.gate_proj.weight" in archive

    def activation(self, archive: Archive, settings: Mapping[str, Any]) -> Any:
        """See `Encoder.activation`: the gate of SwiGLU is a SiLU, and no GELU is left."""
        return self.gate(archive, settings) if self._gated(archive) else settings["hidden_act"]

    def side(self, archive: Archive) -> int:
        """See `Encoder.side`: there is no table of positions, and published models are used at 224 pixels."""
        return max(224 // stem_sizes(archive, f"{self.prefix}{self.stem}.weight")[2], 1)

    @staticmethod
    def usual_heads(archive: Archive, width: int) -> tuple[int, str]:
        """See `Encoder.usual_heads`."""
        return eva_heads(archive, width)

    @classmethod
    def on_disk(cls, archive: Archive, prefix: str) -> bool:
        """See `Encoder.on_disk`."""
        return f"{prefix}layer.0.norm1.weight" in archive

    @classmethod
    def final_norm(cls, archive: Archive, prefix: str) -> str:
        """See `Encoder.final_norm`."""
        return f"{prefix}norm"

    @classmethod
    def norm_within(cls, config: ViTConfig) -> str:
        """See `Encoder.norm_within`."""
        return "norm"

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`: those of the models for photographs; satellite models have other statistics."""
        return Preprocess(image_size, "squash"), IMAGENET

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        base = config.rotary.base if config.rotary else 1.0
        checks = {
            "a classifier": config.classes > 0,
            "a pre-logits layer": config.pre_logits is not None,
            "other positions than its rotary ones": config.positions != "none",
            "other rotary positions": config.rotary != Rotary(base=base, coordinates="centred", pairs="halves"),
            "blocks without LayerScale": config.layer_scale is None,
            "a bias of the keys": config.key_bias,
        }
        reason = first_reason(checks)
        return f"{cls.bare()} has no place for {reason}" if reason else super().refusal(config)

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """See `Encoder.has_head`."""
        return False

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        assert config.rotary is not None
        gated = config.mlp == "swiglu"
        values = dict(rope_theta=config.rotary.base, use_gated_mlp=gated)
        return (
            values
            | dict(query_bias=self.qkv_bias, value_bias=self.qkv_bias)
            | (dict(hidden_act="silu") if gated else {})
        )

    def required(self, config: ViTConfig) -> dict[str, Tensor]:
        """See `Encoder.required`: the mask token of pre-training, at its initial value of zero."""
        return {f"{self.prefix}embeddings.mask_token": torch.zeros(1, 1, config.width)}

    @property
    def layers(self) -> str:
        """See `Encoder.layers`."""
        return f"{self.prefix}{'' if self.disk else 'model.'}layer"

    def tokens(self, config: ViTConfig, embeddings: str) -> list[Conversion]:
        """See `Encoder.tokens`."""
        registers = [same("registers", f"{embeddings}.register_tokens")] if config.registers else []
        return [*super().tokens(config, embeddings), *registers]

    def positions(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.positions`: rotary positions have no tensors."""
        return []

    def qkv(self, ours: str, theirs: str) -> list[Conversion]:
        """See `Encoder.qkv`."""
        query, key, value = (f"{theirs}.{self.parts[part]}" for part in ("query", "key", "value"))
        weight = joined(f"{ours}.weight", (f"{query}.weight", f"{key}.weight", f"{value}.weight"))
        return [
            weight,
            *([without_key_bias(f"{ours}.bias", f"{query}.bias", f"{value}.bias")] if self.qkv_bias else []),
        ]

    def mlp(self, config: ViTConfig, ours: str, theirs: str) -> list[Conversion]:
        """See `Encoder.mlp`."""
        return self.gated(ours, f"{theirs}.mlp") if config.mlp == "swiglu" else super().mlp(config, ours, theirs)
