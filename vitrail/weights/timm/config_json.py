"""The config.json from which timm builds a network: the architecture, its arguments, and the preprocessing.

All arguments that timm accepts are given, so the architecture only has to be of the right kind. The kind decides what
timm does not accept as an argument, such as parallel blocks or the stages of a hybrid's ResNet.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vitrail.data.images.ops import CROPPED
from vitrail.errors import WeightsError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.formats import origin_of
from vitrail.weights.parts import first_reason
from vitrail.weights.timm.bit import bit_architecture
from vitrail.weights.timm.eva import eva_architecture, eva_arguments
from vitrail.weights.timm.names import ACTIVATIONS, POOLS, Naming, is_aimv2, ratio_of

KINDS = {
    "hybrid (3, 4, 9)": ("vit_base_r50_s16_224", r"vit_base_r50_s16"),
    "hybrid (3, 4, 6, 3)": ("vit_large_r50_s32_224", r"vit_large_r50_s32"),
    "hybrid (2, 2, 2, 2)": ("vit_small_r26_s32_224", r"vit_small_r26_s32"),
    "hybrid ()": ("vit_tiny_r_s16_p8_224", r"vit_tiny_r_s16_p8"),
    "beit": ("beit_base_patch16_224", r"beit"),
    "distilled": ("deit_base_distilled_patch16_224", r"deit_.*_distilled_"),
    "parallel": ("vit_small_patch16_18x2_224", r"vit_.*_18x2_"),
    "gated": ("vit_giant_patch14_dinov2", r"vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)$"),
    "clip": ("vit_base_patch16_clip_224", r"vit_.*_clip_"),
    "AIMv2": ("aimv2_large_patch14_224", r"aimv2_"),
    "beit, norms behind": ("eva02_enormous_patch14_clip_224", r"eva02_enormous_"),
    "relpos": ("vit_relpos_base_patch16_224", r"vit_s?relpos_(?!.*_rpn_)|test_vit_relpos$"),
    "relpos, norms behind": ("vit_relpos_base_patch16_rpn_224", r"vit_relpos_.*_rpn_"),
    "norms behind": ("vit_base_patch16_rpn_224", r"vit_(?!.*relpos).*_rpn_"),
    "plain": (
        "vit_base_patch16_224",
        r"(vit|deit3?)_(?!.*(_resnet|_mci_|relpos))|flexivit_|eva_large_|test_vit$",
    ),
}
"""Kind of network -> its usual architecture, and the pattern of all architectures of this kind."""

DESCRIPTIVE = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")
"""Entries of pretrained_cfg that do not affect predictions. They are copied from the file a model was loaded from."""


def descriptive(pretrained: Any) -> dict[str, Any]:
    """Return the entries of a pretrained_cfg that are stored with the model."""
    return {name: pretrained[name] for name in DESCRIPTIVE if pretrained.get(name) is not None}


def vit_json(config: ViTConfig, card: Card, naming: Naming) -> dict[str, Any]:
    """Return config.json for a ViT. Raises WeightsError if timm has no architecture for it."""
    conv = "patch_embed.proj"
    if config.stem == "resnet":
        conv = f"patch_embed.backbone.{'stem.' if config.stem_units else ''}conv"
    values = _json(config, card, config.width, POOLS[config.pool])
    values["pretrained_cfg"] |= dict(
        fixed_input_size=True, first_conv=conv, classifier=["head", "head_dist"] if config.origin.distilled else "head"
    )
    if config.origin.rotary:
        values["architecture"] = eva_architecture(config, card)
        values["model_args"] = _eva_arguments(config, naming)
        return values
    values["architecture"] = _architecture(config, card, naming)
    of_class = _beit_arguments if naming.beit else _relpos_arguments if naming.relpos else _vit_arguments
    values["model_args"] = of_class(config, naming)
    return values


def bit_json(config: ResNetConfig, card: Card) -> dict[str, Any]:
    """Return config.json for a ResNet. Raises WeightsError if timm has no architecture of its size."""
    values = _json(config, card, config.features, "avg")
    side = [math.ceil(side / 32) for side in config.image_size]
    values["pretrained_cfg"] |= dict(first_conv="stem.conv", classifier="head.fc", pool_size=side)
    values["architecture"] = bit_architecture(config)
    values["model_args"] = dict(num_classes=config.classes, in_chans=config.channels)
    return values


def _json(config: ViTConfig | ResNetConfig, card: Card, features: int, pool: str) -> dict[str, Any]:
    """Return the entries of config.json that a ViT and a ResNet have in common."""
    values: dict[str, Any] = dict(num_classes=config.classes, num_features=features, global_pool=pool)
    if card.class_names:
        values["label_names"] = list(card.class_names)
    values["pretrained_cfg"] = origin_of(card, "timm").get("pretrained", {}) | dict(
        custom_load=False,
        input_size=[config.channels, *config.image_size],
        fixed_input_size=False,
        interpolation=card.preprocess.interpolation,
        crop_pct=card.preprocess.crop if card.preprocess.resize in CROPPED else 1.0,
        crop_mode={"pad": "border", "small": "center"}.get(card.preprocess.resize, "squash"),
        mean=list(config.mean),
        std=list(config.std),
        num_classes=config.classes,
        pool_size=None,
    )
    if card.licence:
        values["pretrained_cfg"]["license"] = card.licence
    return values


def _architecture(config: ViTConfig, card: Card, naming: Naming) -> str:
    """Return the architecture with which the model was loaded if it is of the right kind, else the usual one."""
    relpos, origin = bool(naming.relpos), config.origin
    kinds = {
        f"hybrid {config.stem_units}": config.stem == "resnet",
        "beit, norms behind": naming.beit and origin.norm_after,
        "beit": naming.beit,
        "relpos, norms behind": relpos and origin.norm_after,
        "relpos": relpos,
        "distilled": origin.distilled,
        "parallel": config.block == "parallel",
        "AIMv2": is_aimv2(config),
        "clip": origin.pre_norm,
        "norms behind": origin.norm_after,
        "gated": origin.mlp == "swiglu",
    }
    kind = first_reason(kinds) or "plain"
    if kind not in KINDS:
        raise WeightsError(
            f"timm has no hybrid with ResNet stages {config.stem_units}, so no config.json can name it. To save the "
            "tensors alone, give a path that ends in .safetensors."
        )
    loaded = str(origin_of(card, "timm").get("architecture") or "")
    of_loaded = next((name for name, (_, pattern) in KINDS.items() if re.match(pattern, loaded)), "")
    return loaded if of_loaded == kind else KINDS[kind][0]


def _vit_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    ratio = 4 * 2 ** max(len(config.stem_units) - 1, 0) if config.stem == "resnet" else 1
    gated = config.origin.mlp == "swiglu"
    hidden = config.mlp_dim * (2 if gated and not is_aimv2(config) else 1)
    values = _arguments(config, naming.bias, patch=config.patch // ratio, hidden=hidden)
    values |= dict(
        class_token=config.has_class_token,
        pos_embed="none" if config.positions == "none" else "learn",
        no_embed_class=config.prefix > 0 and config.front == 0,
        reg_tokens=config.registers,
        fc_norm=config.origin.final_norm == "pooled",
        final_norm=config.origin.final_norm != "none",
        pool_include_prefix=config.origin.pool_prefix,
        proj_bias=naming.dense_bias,
        qk_norm=config.origin.qk_norm == "head",
    )
    return values if gated else values | dict(act_layer=ACTIVATIONS[config.origin.gelu])


def _beit_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    values = _arguments(config, naming.bias, patch=config.patch, hidden=config.mlp_dim)
    values |= dict(use_abs_pos_emb=config.positions == "1d")
    if config.origin.norm_after:  # EVA-02-CLIP E, without relative positions
        values |= dict(use_post_norm=True)
    else:
        relative, shared = config.positions == "relative_bias", config.place == "shared"
        values |= dict(use_rel_pos_bias=relative and not shared, use_shared_rel_pos_bias=relative and shared)
    return values | dict(use_fc_norm=config.origin.final_norm == "pooled")


def _relpos_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    return _arguments(config, naming.bias, patch=config.patch, hidden=config.mlp_dim) | dict(
        class_token=config.has_class_token,
        fc_norm=config.origin.final_norm == "pooled",
        qk_norm=config.origin.qk_norm == "head",
        rel_pos_type="bias",
        shared_rel_pos=config.place == "shared",
    )


def _eva_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    values = _arguments(config, naming.bias, config.patch, config.mlp_dim) | eva_arguments(config, naming)
    if config.layer_scale is None:  # in this class any number makes LayerScale
        del values["init_values"]
    return values


def _arguments(config: ViTConfig, qkv_bias: bool, patch: int, hidden: int) -> dict[str, Any]:
    """Return the arguments of all of timm's classes. `hidden`: width of the first layer of the MLPs."""
    return dict(
        img_size=list(config.image_size),
        patch_size=patch,
        in_chans=config.channels,
        num_classes=config.classes,
        global_pool=POOLS[config.pool],
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=ratio_of(hidden, config.width),
        qkv_bias=qkv_bias,
        # no LayerScale is a 0, because a null would leave LayerScale to the architecture
        init_values=0.0 if config.layer_scale is None else (config.layer_scale or 1e-5),
    )
