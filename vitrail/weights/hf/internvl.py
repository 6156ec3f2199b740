"""InternViT in transformers: the image tower of InternVL, without a LayerNorm after the last block.

That of 6 billion parameters has RMSNorm, and RMSNorms of queries and keys over their whole width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.mapping import IMAGENET, Conversion, number_in, qk_norms, usual_heads

QK_EPS = 1e-6
"""Epsilon of the norms of queries and keys, which no config.json sets."""
WIDTH_6B = 3200
"""Width of InternViT 6B, the only one whose heads have 128 features."""


class InternVL(Encoder):
    """InternViT of 300 million parameters and of 6 billion."""

    model_type = "internvl_vision"
    title = "InternVLVision"
    gammas = ("lambda_1", "lambda_2")
    part_names: ClassVar[dict[str, tuple[str, str]]] = {
        **{part: (f"attention.{part[0]}_proj",) * 2 for part in ("query", "key", "value")},
        **{"out": ("attention.projection_layer",) * 2, "fc1": ("mlp.fc1",) * 2, "fc2": ("mlp.fc2",) * 2},
    }
    expresses = frozenset(
        {"LayerScale", "network without a last LayerNorm", "RMSNorm", "normalisation of queries and keys"}
    )
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=14, layer_scale_init_value=0.1)

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        last = "tokens" if f"{self.norm}.weight" in archive else "none"
        gamma = number_in(settings, "layer_scale_init_value", str(archive.path))
        first = f"{self.layers}.0"
        values = dict(
            norm="layer" if f"{first}.{self.norms[0]}.bias" in archive else "rms",
            qk_norm="width" if f"{first}.attention.q_norm.weight" in archive else "none",
        )
        eps = number_in(settings, self.eps_name, str(archive.path))
        if reason := _mixed(values["norm"], values["qk_norm"], last, eps):
            raise WeightsError(f"{archive.path} has {reason}, which vitrail does not support")
        return dict(classes=0, layer_scale=gamma or 0.1, final_norm=last, **values)

    @staticmethod
    def usual_heads(archive: Archive, width: int) -> tuple[int, str]:
        """See `Encoder.usual_heads`."""
        return (25, "25 heads of 128 features") if width == WIDTH_6B else usual_heads(archive, width)

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
        if config.qk_norm == "head":
            return (
                f"{cls.bare()} normalises queries and keys over all heads together, and this model does for each head"
            )
        if reason := _mixed(config.norm, config.qk_norm, config.final_norm, config.norm_eps):
            return f"{cls.bare()} would have {reason}"
        return super().refusal(config)

    def block(self, config: ViTConfig, layer: int) -> list[Conversion]:
        """See `Encoder.block`."""
        theirs = f"{self.layers}.{layer}.attention"
        return [*super().block(config, layer), *qk_norms(config, f"blocks.{layer}.attentions.0.attention", theirs)]

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(
            attention_bias=self.qkv_bias,
            use_mean_pooling=config.final_norm == "none",
            layer_scale_init_value=config.layer_scale,
            use_qk_norm=config.qk_norm != "none",
            norm_type="rms_norm" if config.norm == "rms" else "layer_norm",
        )

    @property
    def layers(self) -> str:
        """See `Encoder.layers`."""
        return f"{self.prefix}encoder.layer"


def _mixed(norm: str, qk_norm: str, last: str, eps: float) -> str:
    """Return the norms of such a network that are of another kind in transformers than its other norms, "" for none."""
    if qk_norm != "none" and (norm, eps) != ("rms", QK_EPS):
        return f"RMSNorms of queries and keys with epsilon {QK_EPS:g} beside norms of another kind or epsilon"
    return "a LayerNorm after blocks with RMSNorm" if norm == "rms" and last != "none" else ""
