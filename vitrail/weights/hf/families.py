"""transformers' encoders of images alone: DeiT, ViT-MSN, I-JEPA, ViT-MAE, DINOv2, DINOv3, BEiT, Data2Vec, InternViT.

Each states where its tables of names and its config.json differ from those of the plain ViT (`encoder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import Rotary, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.hf.encoder import BLOCK, OUTSIDE, Encoder, apart, gated, keyless
from vitrail.weights.mapping import (
    IMAGENET,
    ROTARY_HEADS,
    NameTable,
    grid_of,
    number_in,
    row_count,
    stacked,
)

QK_EPS = 1e-6
"""Epsilon of InternViT's norms of queries and keys, which no config.json sets."""


class DeiT(Encoder):
    """DeiT: a distillation token behind the class token, with a position of its own.

    The class with a teacher has a head for each of the two tokens, and its logits are their mean: vitrail's
    `distilled`. The other classes do not read the distillation token, which makes it a register with a position.
    """

    model_type = "deit"
    title = "DeiT"
    headed = "deit."
    with_teacher = "DeiTForImageClassificationWithTeacher"
    outside: ClassVar[NameTable] = {
        **OUTSIDE,
        "dist": "{prefix}embeddings.distillation_token",
        "registers": "{prefix}embeddings.distillation_token",
        "head_dist.{part}": "distillation_classifier.{part}",
    }
    front = 2
    has = f"{Encoder.has} distilled registers register_positions"
    processing: ClassVar[Mapping[str, Any]] = dict(resize="small", crop=0.875, interpolation="bicubic")
    statistics = IMAGENET

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        if classes := row_count(archive, "cls_classifier.weight"):
            return dict(classes=classes, distilled=True)
        return {**super().own(archive, settings), "register_positions": True}

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        distilled = config.origin.distilled
        one = distilled or (config.registers == 1 and config.origin.register_positions)
        return {
            "has one token between the class token and the grid, with a position": not one,
            "has no registers besides the distillation token": distilled and config.registers > 0,
            "has no pooling of two tokens without a head": distilled and not config.classes,
        }

    @classmethod
    def of_model(cls, config: ViTConfig) -> Encoder:
        """See `Encoder.of_model`."""
        encoder = super().of_model(config)
        return replace(encoder, architecture=cls.with_teacher) if config.origin.distilled else encoder

    def table(self, config: ViTConfig | None = None) -> NameTable:
        """See `Encoder.table`."""
        distilled = config is not None and config.origin.distilled
        return {**super().table(config), **({"head.{part}": "cls_classifier.{part}"} if distilled else {})}


class MSN(Encoder):
    """ViT-MSN (masked siamese networks): a plain ViT without pooler."""

    model_type = "vit_msn"
    title = "ViTMSN"
    has = "oblong pooled_norm"
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=16)
    statistics = IMAGENET


class IJepa(MSN):
    """I-JEPA: no class token; the classifier reads the mean of the patches."""

    model_type = "ijepa"
    title = "IJepa"
    headed = "ijepa."
    front = 0
    has = "oblong tokenless pool=gap"
    needs = "tokenless"
    fixed: ClassVar[Mapping[str, Any]] = dict(pool="gap", class_token=False)
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-12, patch_size=16)
    unused = (
        (r"(\w+\.)?embeddings\.mask_token", "mask token of masked pre-training"),
        (r"(\w+\.)?pooler\.dense\.\w+", "the features are the mean of the patches; the pooler reads the first one"),
    )


class MAE(Encoder):
    """The encoder of a masked autoencoder. Its positions are fixed sines, which are read from the file."""

    model_type = "vit_mae"
    title = "ViTMAE"
    classifies = False
    has = "oblong pooled_norm"
    statistics = IMAGENET


class DinoV2(Encoder):
    """DINOv2: LayerScale, SwiGLU in the giant; the classifier reads the class token and the mean of the patches."""

    model_type = "dinov2"
    title = "Dinov2"
    headed = "dinov2."
    outside: ClassVar[NameTable] = {**OUTSIDE, "registers": "{prefix}embeddings.register_tokens"}
    block: ClassVar[NameTable] = {
        **BLOCK,
        "attentions.0.norm.{part}": "norm1.{part}",
        "attentions.0.residual.gamma": "layer_scale1.lambda1",
        "mlps.0.norm.{part}": "norm2.{part}",
        "mlps.0.mlp.fc1.{part}": "mlp.fc1.{part}",
        "mlps.0.mlp.fc2.{part}": "mlp.fc2.{part}",
        "mlps.0.residual.gamma": "layer_scale2.lambda1",
    }
    swiglu: ClassVar[NameTable] = {
        "mlps.0.mlp.fc1.{part}": "mlp.weights_in.{part}",
        "mlps.0.mlp.fc2.{part}": "mlp.weights_out.{part}",
    }
    swiglu_in_memory: ClassVar[NameTable] = gated("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    lists = ("encoder.layer", "encoder.layer")
    has = "oblong pooled_norm layer_scale mlp=swiglu pool=cls+gap"
    needs = "layer_scale"
    mask_axes = 2
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=14, layerscale_value=1.0)
    fields: ClassVar[Mapping[str, str]] = {"layerscale_value": "layer_scale"}
    constants: ClassVar[Mapping[str, Any]] = dict(use_mask_token=True)
    processing: ClassVar[Mapping[str, Any]] = dict(resize="small", crop=0.875, interpolation="bicubic")
    statistics = IMAGENET

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        both = "classifier.weight" in archive or self.architecture == self.classifier()
        own = dict(layer_scale=number_in(settings, "layerscale_value", str(archive.path)))
        return {**super().own(archive, settings), **own, "pool": "cls+gap" if both else "cls"}

    @classmethod
    def preprocess(cls, image_size: tuple[int, int], patch: int) -> Preprocess:
        """See `Encoder.preprocess`: the models are published for 518 pixels, and used at 224."""
        return super().preprocess(image_size if 224 % patch else (224, 224), patch)

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        both, pooled, ratio = config.pool == "cls+gap", config.origin.final_norm == "pooled", mlp_ratio(config)
        return {
            "has a classifier that reads the class token and the mean of the patches": config.classes > 0 and not both,
            f"has MLPs of a whole multiple of the width, which {config.mlp_dim} is not": ratio is None,
            "has no LayerNorm after pooling": both and pooled,
        }

    @classmethod
    def has_head(cls, config: ViTConfig) -> bool:
        """See `Encoder.has_head`."""
        return config.pool == "cls+gap"

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(mlp_ratio=mlp_ratio(config), qkv_bias=self.qkv_bias, use_swiglu_ffn=config.origin.mlp == "swiglu")


class DinoV2WithRegisters(DinoV2):
    """DINOv2 with registers, which have no positions. Only this encoder resamples positions with antialiasing."""

    model_type = "dinov2_with_registers"
    title = "Dinov2WithRegisters"
    headed = "dinov2_with_registers."
    has = f"{DinoV2.has} registers"
    defaults: ClassVar[Mapping[str, Any]] = {**DinoV2.defaults, "patch_size": 16}
    fields: ClassVar[Mapping[str, str]] = {**DinoV2.fields, "num_register_tokens": "registers"}
    constants: ClassVar[Mapping[str, Any]] = {}
    resize_mode = "timm"  # the same method: bicubic, antialiased, in float32


class DinoV3(Encoder):
    """DINOv3: rotary positions, registers, LayerScale, keys without a bias, SwiGLU in the larger ones. It has no head.

    On disk the blocks are `layer.0`, in memory `model.layer.0`. In training, transformers rescales the coordinates at
    random (`pos_embed_rescale`), which vitrail does not.
    """

    model_type = "dinov3_vit"
    title = "DINOv3ViT"
    classifies = False
    headed = "dinov3_vit."
    stem = "embeddings.patch_embeddings"
    outside: ClassVar[NameTable] = {
        **OUTSIDE,
        "stem.{part}": f"{{prefix}}{stem}.{{part}}",
        "registers": "{prefix}embeddings.register_tokens",
    }
    block: ClassVar[NameTable] = {
        **DinoV2.block,
        **apart("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        **keyless("attention.q_proj", "attention.v_proj"),
        "attentions.0.attention.out.{part}": "attention.o_proj.{part}",
        "mlps.0.mlp.fc1.{part}": "mlp.up_proj.{part}",
        "mlps.0.mlp.fc2.{part}": "mlp.down_proj.{part}",
    }
    in_memory: ClassVar[NameTable] = {}
    swiglu: ClassVar[NameTable] = gated("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    lists = ("layer", "model.layer")
    disk_sign = "layer.0.norm1.weight"
    norm_name = "norm"
    silu = True
    has = "oblong pooled_norm registers layer_scale mlp=swiglu positions=none rotary"
    needs = "layer_scale positions=none rotary"
    mask_axes = 3
    fixed: ClassVar[Mapping[str, Any]] = dict(positions="none", key_bias=False)
    defaults: ClassVar[Mapping[str, Any]] = dict(
        layer_norm_eps=1e-5, patch_size=16, layerscale_value=1.0, rope_theta=100.0
    )
    fields: ClassVar[Mapping[str, str]] = {
        "intermediate_size": "mlp_dim",
        "layerscale_value": "layer_scale",
        "num_register_tokens": "registers",
    }
    constants: ClassVar[Mapping[str, Any]] = dict(key_bias=False, proj_bias=True, mlp_bias=True)
    statistics = IMAGENET  # of the models for photographs; satellite models have other statistics
    remarks = ("keys without a bias, as in every DINOv3",)
    head_features = ROTARY_HEADS

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        where = f"{archive.path}, config.json"
        if (name := f"{self.layers}.0.attention.k_proj.bias") in archive:
            raise WeightsError(f"{archive.path} has {name!r}, and no published DINOv3 has a bias of keys")
        rotary = Rotary(base=number_in(settings, "rope_theta", where), coordinates="centred", pairs="halves")
        own = dict(rotary=rotary, layer_scale=number_in(settings, "layerscale_value", where))
        return {**super().own(archive, settings), **own}

    def side(self, archive: Archive) -> int:
        """See `Encoder.side`: there is no table of positions, and published models are used at 224 pixels."""
        return max(224 // self.stem_sizes(archive, {})[2], 1)

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        rotary = config.origin.rotary or Rotary()
        of_its_kind = Rotary(base=rotary.base, coordinates="centred", pairs="halves")
        return {
            "has no place for other rotary positions": rotary != of_its_kind,
            "has no place for a bias of the keys": config.origin.key_bias,
        }

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        assert config.origin.rotary is not None
        values = dict(rope_theta=config.origin.rotary.base, use_gated_mlp=config.origin.mlp == "swiglu")
        values |= dict(query_bias=self.qkv_bias, value_bias=self.qkv_bias)
        return values | (dict(hidden_act="silu") if config.origin.mlp == "swiglu" else {})


_BIAS = "relative_position_bias_table"
SHARED_BIAS = f"{{prefix}}encoder.relative_position_bias.{_BIAS}", f"{{prefix}}shared_position_bias.{_BIAS}"
"""Name of the position bias that all layers of a BEiT share: on disk, and in memory."""
LAYER_BIAS = (
    f"{{blocks}}.{{layer}}.attention.attention.relative_position_bias.{_BIAS}",
    f"{{blocks}}.{{layer}}.relative_position_bias.{_BIAS}",
)
"""Name of the position bias of a layer of its own."""


class Beit(Encoder):
    """BEiT: relative position biases, LayerScale, keys without a bias, mean pooling.

    With mean pooling, the only LayerNorm after the blocks acts on the mean of the patches. A model of masked
    pre-training (`BeitForMaskedImageModeling`) is read as an encoder with the class token as its features. Its
    classifier is not read: it predicts one visual token per patch, not the class of an image.
    """

    model_type = "beit"
    title = "Beit"
    headed = "beit."
    block: ClassVar[NameTable] = {
        **BLOCK,
        **keyless("attention.attention.query", "attention.attention.value"),
        "attentions.0.residual.gamma": "lambda_1",
        "mlps.0.residual.gamma": "lambda_2",
    }
    in_memory: ClassVar[NameTable] = {**Encoder.in_memory, **keyless("attention.q_proj", "attention.v_proj")}
    has = "oblong pooled_norm layer_scale positions=relative_bias positions=none pool=gap unread"
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
        values = {**super().own(archive, settings), "class_token": True}
        values |= dict(pool="gap", final_norm="pooled") if pooled else dict(pool="cls")
        if f"{self.layers}.0.lambda_1" in archive:
            values["layer_scale"] = number_in(settings, "layer_scale_init_value", str(archive.path)) or 0.1
        places = {
            "input": f"{self.prefix}embeddings.position_embeddings",
            "shared": self.bias_tables[0],
            "every": self.bias_tables[1],
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
        for name in self.bias_tables:
            if offsets := row_count(archive, name):
                return (grid_of(archive, name, offsets, (3,))[0][0] + 1) // 2
        return super().side(archive)

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        (height, width), relative = config.image_size, config.positions == "relative_bias"
        mean = (config.pool, config.origin.final_norm) == ("gap", "tokens")
        return {
            "has no mean of normalised tokens, because it normalises the mean": mean,
            "has no usable relative positions for images that are not square": relative and height != width,
        }

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
    def bias_tables(self) -> tuple[str, str]:
        """Names of the position bias that all layers share, and of the first layer's own."""
        place = 0 if self.disk else 1
        return SHARED_BIAS[place].format(prefix=self.prefix), LAYER_BIAS[place].format(blocks=self.layers, layer=0)

    def table(self, config: ViTConfig | None = None) -> NameTable:
        """See `Encoder.table`."""
        names = SHARED_BIAS if config is not None and config.place == "shared" else LAYER_BIAS
        return {**super().table(config), "positions.bias": stacked(names[0 if self.disk else 1])}


class Data2Vec(Beit):
    """Data2Vec for images: BEiT's network with other weights.

    Its bare model is saved without the LayerNorm of its pooler. Then the features are the mean of the patches as it is.
    """

    model_type = "data2vec-vision"
    title = "Data2VecVision"
    headed = "data2vec_vision."
    has = f"{Beit.has} unnormed"

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
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        unnormed = config.origin.final_norm == "none" and (config.classes > 0 or config.pool != "gap")
        why = "has a LayerNorm in front of a classifier, and on the class token"
        return {why: unnormed, **super().reasons(config)}


class InternVL(Encoder):
    """InternViT, the image tower of InternVL, without a LayerNorm after the last block.

    That of 6 billion parameters has RMSNorm, and RMSNorms of queries and keys over their whole width.
    """

    model_type = "internvl_vision"
    title = "InternVLVision"
    classifies = False
    headed = "internvl_vision."
    block: ClassVar[NameTable] = {
        **BLOCK,
        **apart("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attentions.0.attention.qk_norm.query.{part}": "attention.q_norm.{part}",
        "attentions.0.attention.qk_norm.key.{part}": "attention.k_norm.{part}",
        "attentions.0.attention.out.{part}": "attention.projection_layer.{part}",
        "attentions.0.residual.gamma": "lambda_1",
        "mlps.0.mlp.fc1.{part}": "mlp.fc1.{part}",
        "mlps.0.mlp.fc2.{part}": "mlp.fc2.{part}",
        "mlps.0.residual.gamma": "lambda_2",
    }
    in_memory: ClassVar[NameTable] = {}
    lists = ("encoder.layer", "encoder.layer")
    head_features: ClassVar[Mapping[int, int]] = {3200: 128}  # of 6 billion parameters
    has = "oblong pooled_norm layer_scale unnormed norm qk_norm=width"
    needs = "layer_scale"
    defaults: ClassVar[Mapping[str, Any]] = dict(layer_norm_eps=1e-6, patch_size=14, layer_scale_init_value=0.1)
    processing: ClassVar[Mapping[str, Any]] = dict(resize="squash", interpolation="bicubic")
    statistics = IMAGENET

    def own(self, archive: Archive, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Encoder.own`."""
        last = "tokens" if f"{self.norm}.weight" in archive else "none"
        gamma = number_in(settings, "layer_scale_init_value", str(archive.path))
        first = f"{self.layers}.0"
        values = dict(
            norm="layer" if f"{first}.layernorm_before.bias" in archive else "rms",
            qk_norm="width" if f"{first}.attention.q_norm.weight" in archive else "none",
        )
        eps = number_in(settings, self.eps_name, str(archive.path))
        if reason := _mixed(values["norm"], values["qk_norm"], last, eps):
            raise WeightsError(f"{archive.path} has {reason}, which vitrail does not support")
        return {**super().own(archive, settings), "layer_scale": gamma or 0.1, "final_norm": last, **values}

    @classmethod
    def reasons(cls, config: ViTConfig) -> dict[str, bool]:
        """See `Encoder.reasons`."""
        mixed = _mixed(config.origin.norm, config.origin.qk_norm, config.origin.final_norm, config.origin.norm_eps)
        return {f"would have {mixed}": bool(mixed)}

    def json(self, config: ViTConfig) -> dict[str, Any]:
        """See `Encoder.json`."""
        return dict(
            attention_bias=self.qkv_bias,
            use_mean_pooling=config.origin.final_norm == "none",
            layer_scale_init_value=config.layer_scale,
            use_qk_norm=config.origin.qk_norm != "none",
            norm_type="rms_norm" if config.origin.norm == "rms" else "layer_norm",
        )


def _mixed(norm: str, qk_norm: str, last: str, eps: float) -> str:
    """Return the norms of an InternViT that are of another kind in transformers than its other norms, "" for none."""
    if qk_norm != "none" and (norm, eps) != ("rms", QK_EPS):
        return f"RMSNorms of queries and keys with epsilon {QK_EPS:g} beside norms of another kind or epsilon"
    return "a LayerNorm after blocks with RMSNorm" if norm == "rms" and last != "none" else ""


def mlp_ratio(config: ViTConfig) -> int | None:
    """Return DINOv2's `mlp_ratio` that gives a config's MLPs, None if there is none.

    The hidden width is the product with the width; for SwiGLU it is two thirds of that, rounded up to a multiple of 8.
    """
    for ratio in range(1, 65):
        hidden = ratio * config.width
        if config.origin.mlp == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == config.mlp_dim:
            return ratio
    return None
