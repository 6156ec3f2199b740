"""InternViT in transformers: the image tower of InternVL, without a LayerNorm after the last block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.mapping import IMAGENET, number_in


class InternVL(Encoder):
    """InternViT of 300 million parameters. That of 6 billion has RMSNorm, and normalises queries and keys."""

    model_type = "internvl_vision"
    title = "InternVLVision"
    gammas = ("lambda_1", "lambda_2")
    part_names: ClassVar[dict[str, tuple[str, str]]] = {
        **{part: (f"attention.{part[0]}_proj",) * 2 for part in ("query", "key", "value")},
        **{"out": ("attention.projection_layer",) * 2, "fc1": ("mlp.fc1",) * 2, "fc2": ("mlp.fc2",) * 2},
    }
    expresses = frozenset({"LayerScale", "network without a last LayerNorm"})
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=14, layer_scale_init_value=0.1)

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        if (name := f"{self.layers}.0.attention.q_norm.weight") in archive:
            raise WeightsError(
                f"{archive.path}: {name!r} is part of normalised queries and keys, which vitrail does not support here"
            )
        last = "tokens" if f"{self.norm}.weight" in archive else "none"
        gamma = number_in(settings, "layer_scale_init_value", str(archive.path))
        return dict(classes=0, layer_scale=gamma or 0.1, final_norm=last)

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "squash", interpolation="bicubic"), IMAGENET

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        if config.classes or config.pre_logits:
            return f"{cls.bare()} has no {'classifier' if config.classes else 'pooler'}"
        if config.layer_scale is None:
            return f"{cls.bare()} has LayerScale, and this model has none"
        return super().refusal(config)

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(
            attention_bias=self.qkv_bias,
            use_mean_pooling=config.final_norm == "none",
            layer_scale_init_value=config.layer_scale,
        )

    @property
    def layers(self) -> str:
        """See `Encoder.layers`."""
        return f"{self.prefix}encoder.layer"
