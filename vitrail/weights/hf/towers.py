"""transformers' image towers of models of images and texts, alone or in a whole model: CLIP, SigLIP, SigLIP 2, AIMv2.

CLIP's names have the prefix `vision_model.`, unless version 5 saved a bare `CLIPVisionModel`. The tower for texts is
not read. The released SigLIP 2 weights of one resolution are of SigLIP's class. NaFlex weights take images of any
shape (`vitrail.strip`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import HALF, Encoder, Statistics, apart, gated
from vitrail.weights.mapping import (
    AIMV2_HEADS,
    CLIP,
    NameTable,
    Rule,
    dense_biases,
    joined,
    number_in,
    reshaped,
    row_count,
    shape_of,
    unbatched,
    within,
    without_stem_bias,
)
from vitrail.words import shown

LABELS = ("id2label", "label2id", "num_labels", "problem_type")
"""Entries of config.json about a classifier."""


class Clip(Encoder):
    """CLIP's image tower: alone, with its projection, or with a classifier.

    The outputs of the projection are the embedding that CLIP compares with texts; they count as classes. A classifier
    reads the mean of the patches without `post_layernorm`.
    """

    model_type = "clip_vision_model"
    whole = "clip"
    """`model_type` of a model with both towers, and of one with a classifier."""
    title = "CLIPVision"
    headed = "vision_model."
    stem = "embeddings.patch_embedding"
    outside: ClassVar[NameTable] = {
        "stem.weight": "{prefix}embeddings.patch_embedding.weight",
        "cls": reshaped("{prefix}embeddings.class_embedding", (-1,)),
        "positions.embedding": unbatched("{prefix}embeddings.position_embedding.weight"),
        "pre_norm.{part}": "{prefix}pre_layrnorm.{part}",  # spelled so
        "norm.{part}": "{norm}.{part}",
    }
    block: ClassVar[NameTable] = {
        "attentions.0.norm.{part}": "layer_norm1.{part}",
        **apart("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attentions.0.attention.out.{part}": "self_attn.out_proj.{part}",
        "mlps.0.norm.{part}": "layer_norm2.{part}",
        "mlps.0.mlp.fc{number}.{part}": "mlp.fc{number}.{part}",
    }
    in_memory: ClassVar[NameTable] = {}
    lists = ("encoder.layers", "encoder.layers")
    norm_name = "post_layernorm"
    table_axes = 2
    has = "pooled_norm pre_norm pool=gap unread unnormed"
    needs = "pre_norm"
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-5, patch_size=32, hidden_act="quick_gelu")
    processing: ClassVar[Mapping[str, Any]] = dict(resize="small", crop=1.0, interpolation="bicubic")
    statistics: ClassVar[Statistics] = CLIP
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"text_model\..*|text_projection\.weight|logit_scale|logit_bias", "the tower for texts"),
        (r"(vision_model\.)?embeddings\.position_ids", "the numbers of the positions, in order"),
        (r"(vision_model\.)?post_layernorm\.\w+", "the norm of the class token, which the classifier does not read"),
    )

    # reading

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        if not archive.config:
            raise WeightsError(
                f"{archive.path} is CLIP's image tower, and its tensors do not say whether the MLPs have quick_gelu, "
                "as OpenAI's weights, or another GELU, as OpenCLIP's. Give a folder with the model's config.json"
            )
        if classes := row_count(archive, "classifier.weight"):
            return dict(classes=classes, pre_norm=True, pool="gap", class_token=True, final_norm="none")
        return dict(classes=row_count(archive, "visual_projection.weight"), pre_norm=True)

    def absent(self, config: ViTConfig) -> dict[str, str]:
        """See `Encoder.absent`."""
        projection = {"head.bias": "no bias of the projection"} if config.classes and config.pool == "cls" else {}
        return {"stem.bias": "no bias of the patch embedding", **projection}

    # writing

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        mean, unnormed = config.pool == "gap", config.origin.final_norm == "none"
        other = mean != unnormed or (mean and not config.classes)
        return {"normalises the class token, and its classifier reads the mean of the patches as it is": other}

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`. Every version of transformers reads a bare tower with the prefix."""
        name = cls.bare()
        if config.classes:
            name = cls.classifier() if config.pool == "gap" else f"{name}WithProjection"
        return cls(name, cls.headed, norm=f"{cls.headed}{cls.norm_name}")

    @classmethod
    def classifier(cls) -> str:
        """See `Encoder.classifier`."""
        return super().classifier().replace("VisionFor", "For")

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """See `Encoder.has_head`."""
        return bool(config.classes) and config.pool == "gap"

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(projection_dim=config.classes) if config.classes and config.pool == "cls" else {}

    def document(self, values: dict[str, Any]) -> dict[str, Any]:
        """See `Encoder.document`: a class with a classifier has the tower's config within its own."""
        if self.architecture != self.classifier():
            return {name: value for name, value in values.items() if name not in LABELS}
        own = ("architectures", "dtype", *LABELS)
        tower = {name: value for name, value in values.items() if name not in own}
        top = {name: value for name, value in values.items() if name in own}
        return {**top, "model_type": self.whole, "vision_config": tower}

    def required(self, config: ViTConfig) -> dict[str, Tensor]:
        """See `Encoder.required`: the norm of the class token, in a network whose classifier reads the patches."""
        if config.origin.final_norm != "none":
            return {}
        return {f"{self.norm}.weight": torch.ones(config.width), f"{self.norm}.bias": torch.zeros(config.width)}

    def written(self, config: ViTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Encoder.written`: without the bias of the patch embedding, and without one of the projection."""
        left = without_stem_bias(state, config)
        if "head.bias" in self.absent(config) and left.pop("head.bias").any():
            raise WeightsError(
                "format 'hf' cannot express this model: the class token's features go through a layer with a bias, "
                f"and the projection of {self.architecture} has none. Save it as 'vitrail' or 'timm'"
            )
        return left

    # both

    def table(self, config: ViTConfig | None = None) -> NameTable:
        """See `Encoder.table`."""
        projected = config is not None and config.pool != "gap"
        head = {"head.weight": "visual_projection.weight"} if projected else {"head.{part}": "classifier.{part}"}
        return {**super().table(config), **head}


_IN_PROJ = "attention.in_proj_{part}"
_POOL: NameTable = {
    "probe": "probe",
    "query.{part}": Rule((_IN_PROJ,), lambda joint: joint[: len(joint) // 3]),
    "key_value.{part}": Rule((_IN_PROJ,), lambda joint: joint[len(joint) // 3 :]),
    "out.{part}": "attention.out_proj.{part}",
    "norm.{part}": "layernorm.{part}",
    "mlp.fc{number}.{part}": "mlp.fc{number}.{part}",
}
"""SigLIP's attention pooling, where torch joins queries, keys and values."""


class Siglip(Clip):
    """SigLIP's image tower. Its classifier reads the mean of the patches, and without one the probe pools them.

    The names are those of CLIP without class token, `pre_layrnorm` and projection.
    """

    model_type = "siglip_vision_model"
    whole = "siglip"
    title = "SiglipVision"
    outside: ClassVar[NameTable] = {
        "stem.{part}": "{prefix}embeddings.patch_embedding.{part}",
        "positions.embedding": Clip.outside["positions.embedding"],
        "norm.{part}": "{norm}.{part}",
        **within("pool.", "{prefix}head.", _POOL),
    }
    front = 0
    has = "tokenless pool=gap pool=map"
    needs = "tokenless"
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=16, hidden_act="gelu_pytorch_tanh")
    processing: ClassVar[Mapping[str, Any]] = dict(resize="squash", interpolation="bicubic")
    statistics = HALF
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        *Clip.unused[:2],
        (r"(vision_model\.)?head\..*", "the attention pooling, which the classifier replaces"),
    )

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        classes, probed = row_count(archive, "classifier.weight"), f"{self.prefix}head.probe" in archive
        return dict(classes=classes, pool="map" if probed and not classes else "gap", class_token=False)

    def absent(self, config: ViTConfig) -> dict[str, str]:
        """See `Encoder.absent`."""
        return {}

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        probed = config.classes > 0 and config.pool == "map"
        return {"has a classifier that reads the mean of the patches": probed}

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(vision_use_head=config.pool == "map")

    def written(self, config: ViTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Encoder.written`."""
        return state


class Siglip2(Siglip):
    """SigLIP 2's image tower for images of any shape (NaFlex), whose patch embedding is a dense layer."""

    model_type = "siglip2_vision_model"
    whole = "siglip2"
    title = "Siglip2Vision"
    resize_mode = "naflex"
    defaults: ClassVar[Mapping[str, Any]] = {**Siglip.defaults, "num_channels": 3}

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> Preprocess:
        """See `Encoder.preprocess`."""
        return Preprocess(image_size, "native", patch=patch)

    def stem_sizes(self, archive: Archive, settings: Mapping[str, Any]) -> tuple[int, int, int]:
        """See `Encoder.stem_sizes`."""
        name, where = f"{self.prefix}{self.stem}.weight", f"{archive.path}, config.json"
        width, values = shape_of(archive, name, 2)
        channels, patch = (int(number_in(settings, entry, where)) for entry in ("num_channels", "patch_size"))
        if patch < 1 or channels * patch * patch != values:
            raise WeightsError(
                f"{archive.path}: {name!r} has {values} inputs, which are not {channels} channels of {patch} x {patch} "
                "pixels (config.json)"
            )
        return width, channels, patch

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        other = f"resamples positions by 'naflex', not {config.origin.resize_mode!r}"
        return {other: config.origin.resize_mode != "naflex", **super().reasons(config)}

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return super().json(config) | dict(num_patches=config.grid[0] * config.grid[1])

    def table(self, config: ViTConfig | None = None) -> NameTable:
        """See `Encoder.table`: a row of the patch embedding is [row, column, channel]."""
        if config is None:
            return super().table()
        channels, patch = config.channels, config.patch
        stem = Rule(
            (f"{{prefix}}{self.stem}.weight",),
            lambda flat: flat.reshape(-1, patch, patch, channels).permute(0, 3, 1, 2),
            lambda kernel: kernel.permute(0, 2, 3, 1).flatten(1),
        )
        return {"stem.weight": stem, **super().table(config)}


class Aimv2(Siglip):
    """AIMv2: RMSNorm, also on the patches, and gated MLPs. The model has attention pooling, or none.

    The released weights have no biases in the blocks. Those of native resolution have sines as positions, for any size.
    """

    model_type = "aimv2_vision_model"
    whole = "aimv2"
    title = "Aimv2Vision"
    classifies = False
    headed = "aimv2."
    stem = "embeddings.patch_embed"
    outside: ClassVar[NameTable] = {
        "stem.{part}": "{prefix}embeddings.patch_embed.{part}",
        "patch_norm.{part}": "{prefix}embeddings.rms_norm.{part}",
        "positions.embedding": Clip.outside["positions.embedding"],
        "norm.{part}": "{norm}.{part}",
        "pool.probe": "{prefix}head.cls_token",
        "pool.key_value.{part}": joined("{prefix}head.k_proj.{part}", "{prefix}head.v_proj.{part}"),
        "pool.out.{part}": "{prefix}head.output_proj.{part}",
    }
    block: ClassVar[NameTable] = {
        "attentions.0.norm.{part}": "rms_norm1.{part}",
        **apart("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attentions.0.attention.out.{part}": "attention.out_proj.{part}",
        "mlps.0.norm.{part}": "rms_norm2.{part}",
        **gated("ffn.gate_proj", "ffn.up_proj", "ffn.down_proj"),
    }
    swiglu: ClassVar[NameTable] = gated("ffn.gate_proj", "ffn.up_proj", "ffn.down_proj")
    silu = True
    norm_name = "rms_norm"
    eps_name = "rms_norm_eps"
    has = "tokenless pool=gap pool=probe mlp=swiglu norm patch_norm positions=sincos sines"
    needs = "tokenless mlp=swiglu norm patch_norm"
    defaults: ClassVar[Mapping[str, Any]] = dict(rms_norm_eps=1e-5, patch_size=14, num_attention_heads=8)
    processing: ClassVar[Mapping[str, Any]] = Clip.processing
    statistics = CLIP
    head_features = AIMV2_HEADS
    unused: ClassVar[tuple[tuple[str, str], ...]] = (
        (Clip.unused[0][0] + r"|visual_projection\.weight", "the tower for texts, and what images share with it"),
    )

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        native = self.theirs("positions.embedding") not in archive
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
        native = self.theirs("positions.embedding") not in archive
        return 224 // self.stem_sizes(archive, {})[2] if native else super().side(archive)

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        mocos = (config.positions, config.origin.sines) == ("sincos", "moco")
        return {"has MAE's sines as positions, not those of MoCo v3": mocos}

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`."""
        return cls(cls.bare(), norm=cls.norm_name)

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


def tower(archive: Archive, kinds: Mapping[str, str]) -> Archive:
    """Return an archive with the config.json of the image tower, if config.json describes one next to one for texts.

    `kinds` is the `model_type` of such a model -> that of its image tower. Without a classifier, its labels go: older
    versions of transformers wrote two placeholders into every config.json.
    """
    config, inner = archive.config, archive.config.get("vision_config")
    kind = str(config.get("model_type"))
    if kind in kinds and isinstance(inner, Mapping):
        top = {name: config[name] for name in ("architectures", *LABELS) if name in config}
        config = {**{k: v for k, v in inner.items() if k not in LABELS}, **top, "model_type": kinds[kind]}
    elif kind not in kinds.values():
        return archive
    if "classifier.weight" not in archive:
        config = {name: value for name, value in config.items() if name not in LABELS}
    return replace(archive, config=config)
