"""AIMv2's image tower in transformers, alone or in a whole model of images and texts.

The names are those of SigLIP (`siglip.py`), and

| theirs | ours |
|---|---|
| `embeddings.rms_norm` | `patch_norm` |
| `attention.{q,k,v,out}_proj`, `rms_norm1`, `rms_norm2` | `attention`, `norm` |
| `ffn.{gate,up}_proj`, `ffn.down_proj` | `mlp.fc1`, `mlp.fc2` |
| `head.cls_token`, `head.{k,v}_proj`, `head.output_proj` | `pool.probe`, `pool.key_value`, `pool.out` |

The released weights have no biases in the blocks. Those of native resolution have sines as positions, for any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.clip import Clip
from vitrail.weights.hf.encoder import Encoder, Statistics
from vitrail.weights.hf.siglip import Siglip
from vitrail.weights.mapping import (
    CLIP,
    Conversion,
    dense_biases,
    first_reason,
    joined,
    norm_pair,
    same,
    same_pair,
    usual_heads,
)
from vitrail.words import shown


class Aimv2(Siglip):
    """AIMv2: RMSNorm, also on the patches, and gated MLPs. The model has attention pooling, or none."""

    model_type = "aimv2_vision_model"
    whole = "aimv2"
    title = "Aimv2Vision"
    stem = "embeddings.patch_embed"
    norms = ("rms_norm1", "rms_norm2")
    eps_name = "rms_norm_eps"
    part_names: ClassVar[dict[str, tuple[str, str]]] = {
        **{part: (f"attention.{part[0]}_proj",) * 2 for part in ("query", "key", "value")},
        **{"out": ("attention.out_proj",) * 2, "fc1": ("ffn.up_proj",) * 2, "fc2": ("ffn.down_proj",) * 2},
    }
    expresses = frozenset(
        {
            *("network without a class token", "pooling by 'gap'", "pooling by 'probe'"),
            *("swiglu MLP", "RMSNorm", "norm of the patches", "sincos positions"),
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = dict(rms_norm_eps=1e-5, patch_size=14, num_attention_heads=8)
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        (Clip.unused[0][0] + r"|visual_projection\.weight", "the tower for texts, and what images share with it"),
    )

    @classmethod
    def headed_prefix(cls) -> str:
        """See `Encoder.headed_prefix`."""
        return "aimv2."

    @staticmethod
    def usual_heads(archive: Archive, width: int) -> tuple[int, str]:
        """See `Encoder.usual_heads`."""
        heads = width // 128
        return usual_heads(archive, width) if width % 128 else (heads, f"{heads} heads of 128 features")

    @classmethod
    def final_norm(cls, archive: Archive, prefix: str) -> str:
        """See `Encoder.final_norm`."""
        return f"{prefix}rms_norm"

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        native = self.table not in archive
        if archive.config and native != bool(settings.get("is_native")):
            raise WeightsError(
                f"{archive.path}: is_native of config.json is {shown(settings.get('is_native'))}, and the file has "
                f"{'no' if native else 'a'} table of positions"
            )
        positions = dict(positions="sincos", sines="mae") if native else {}
        pool = "probe" if f"{self.prefix}head.cls_token" in archive else "gap"
        return dict(classes=0, pool=pool, class_token=False, norm="rms", patch_norm=True, mlp="swiglu", **positions)

    def side(self, archive: Archive) -> int:
        """See `Encoder.side`."""
        return super().side(archive) if self.table in archive else 224 // self.stem_sizes(archive, {})[2]

    def activation(self, archive: Archive, settings: Mapping[str, Any]) -> Any:
        """See `Encoder.activation`."""
        return self.gate(archive, settings)

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> tuple[Preprocess, Statistics]:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "small", 1.0, "bicubic"), CLIP

    @classmethod
    def refusal(cls, config: ViTConfig) -> str:
        """See `Encoder.refusal`."""
        checks = {
            "a classifier": config.classes > 0,
            "a pre-logits layer": config.pre_logits is not None,
            "norms other than RMSNorm": config.norm != "rms",
            "patches without a norm": not config.patch_norm,
            "MLPs without a gate": config.mlp != "swiglu",
        }
        reason = first_reason(checks)
        return f"{cls.bare()} has no place for {reason}" if reason else super().refusal(config)

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`."""
        return cls(cls.bare(), norm="rms_norm")

    def biases(self, config: ViTConfig) -> dict[str, list[str]]:
        """See `Encoder.biases`."""
        dense = dense_biases(config)
        outputs = [name for name in dense if name.endswith("attention.out.bias")]
        pool = ["pool.key_value.bias"] if config.pool == "probe" else []
        mlp = [name for name in dense if name not in outputs]
        return dict(qkv_bias=[*super().biases(config)["qkv_bias"], *outputs, *pool], mlp_bias=mlp)

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        biases = dict(qkv_bias=self.qkv_bias, mlp_bias=self.mlp_bias)
        return biases | dict(use_head=config.pool == "probe", is_native=config.positions == "sincos", hidden_act="silu")

    def conversions(self, config: ViTConfig) -> list[Conversion]:
        """See `Encoder.conversions`."""
        entries = [*super().conversions(config), *norm_pair(config, "patch_norm", f"{self.prefix}embeddings.rms_norm")]
        if config.pool != "probe":
            return entries
        head = f"{self.prefix}head"
        entries += [same("pool.probe", f"{head}.cls_token"), *same_pair("pool.out", f"{head}.output_proj")]
        for kind in ("weight", "bias"):
            entries.append(joined(f"pool.key_value.{kind}", (f"{head}.k_proj.{kind}", f"{head}.v_proj.{kind}")))
        return entries

    def mlp(self, config: ViTConfig, ours: str, theirs: str) -> list[Conversion]:
        """See `Encoder.mlp`."""
        return self.gated(ours, f"{theirs}.ffn")
