"""The config.json that makes timm build a network: architecture, its arguments, and the preprocessing.

All arguments that matter are given, so the architecture only has to be of the right kind: what its function
cannot be told, such as parallel blocks or the stages of a hybrid's ResNet, is what it is chosen for.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vitrail.errors import WeightsError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.formats import origin_of
from vitrail.weights.timm.bit import bit_architecture
from vitrail.weights.timm.names import Naming

POOLS = {"cls": "token", "gap": "avg", "map": "map"}

_HYBRIDS = {
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (): "vit_tiny_r_s16_p8_224",
}
_KINDS = {
    "distilled": "deit_base_distilled_patch16_224",
    "parallel": "vit_small_patch16_18x2_224",
    "gated": "vit_giant_patch14_dinov2",
    "beit": "beit_base_patch16_224",
    "plain": "vit_base_patch16_224",
} | {f"hybrid {units}": name for units, name in _HYBRIDS.items()}
"""Kind of network: an architecture of that kind."""

_DESCRIPTIVE = ("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes")
"""Entries of pretrained_cfg that change nothing and are kept from the file a model came from."""


def kept_pretrained(pretrained: Any) -> dict[str, Any]:
    """Return what of a pretrained_cfg is worth keeping with the model."""
    return {name: pretrained[name] for name in _DESCRIPTIVE if pretrained.get(name) is not None}


def vit_json(config: ViTConfig, card: Card, naming: Naming) -> dict[str, Any]:
    """Return config.json for a ViT. Raises WeightsError where no architecture of timm's can be given for it."""
    arguments = _beit_arguments(config, naming) if naming.beit else _vit_arguments(config, naming)
    head: Any = ["head", "head_dist"] if config.distilled else "head"
    conv = "patch_embed.proj"
    if config.stem == "resnet":
        conv = f"patch_embed.backbone.{'stem.' if config.stem_units else ''}conv"
    pretrained = _pretrained(config, card) | dict(fixed_input_size=True, first_conv=conv, classifier=head)
    return _whole(_architecture(config, card, naming), config, card, POOLS[config.pool], arguments, pretrained)


def bit_json(config: ResNetConfig, card: Card) -> dict[str, Any]:
    """Return config.json for a ResNet. Raises WeightsError where timm has no architecture of its size."""
    pretrained = _pretrained(config, card) | dict(first_conv="stem.conv", classifier="head.fc")
    pretrained |= dict(pool_size=[math.ceil(side / 32) for side in config.image_size])
    arguments = dict(num_classes=config.classes, in_chans=config.channels)
    return _whole(bit_architecture(config), config, card, "avg", arguments, pretrained)


def _whole(
    architecture: str,
    config: ViTConfig | ResNetConfig,
    card: Card,
    pool: str,
    arguments: dict[str, Any],
    pretrained: dict[str, Any],
) -> dict[str, Any]:
    features = config.width if isinstance(config, ViTConfig) else config.features
    values: dict[str, Any] = dict(architecture=architecture, num_classes=config.classes, num_features=features)
    values |= dict(global_pool=pool)
    if card.class_names:
        values |= dict(label_names=list(card.class_names))
    return values | dict(model_args=arguments, pretrained_cfg=pretrained)


def _pretrained(config: ViTConfig | ResNetConfig, card: Card) -> dict[str, Any]:
    squash = card.preprocess.resize == "squash"
    values: dict[str, Any] = dict(
        custom_load=False,
        input_size=[config.channels, *config.image_size],
        fixed_input_size=False,
        interpolation=card.preprocess.interpolation,
        crop_pct=1.0 if squash else card.preprocess.crop,
        crop_mode="squash" if squash else "center",
        mean=list(config.mean),
        std=list(config.std),
        num_classes=config.classes,
        pool_size=None,
    )
    kept = dict(origin_of(card, "timm").get("pretrained", {}))
    return kept | values | (dict(license=card.licence) if card.licence else {})


def _kind(config: ViTConfig, naming: Naming) -> str:
    if config.stem == "resnet":
        return f"hybrid {config.stem_units}"
    if naming.beit:
        return "beit"
    if config.distilled:
        return "distilled"
    if config.block == "parallel":
        return "parallel"
    return "gated" if config.mlp == "swiglu" else "plain"


def _architecture(config: ViTConfig, card: Card, naming: Naming) -> str:
    """The one the model came with if it is of the right kind, else the usual one of that kind."""
    kind = _kind(config, naming)
    if kind not in _KINDS:
        raise WeightsError(
            f"timm has no hybrid with ResNet stages {config.stem_units}, so no config.json can name it; give a path "
            "that ends in .safetensors for the tensors alone"
        )
    found = origin_of(card, "timm").get("architecture")
    return found if isinstance(found, str) and _kind_of(found) == kind else _KINDS[kind]


def _kind_of(architecture: str) -> str:
    """The kind of an architecture by its name; "" for one that takes other arguments."""
    for units, name in _HYBRIDS.items():
        if architecture.startswith(name.rpartition("_")[0]):
            return f"hybrid {units}"
    patterns = {
        "beit": r"beit",
        "distilled": r"deit_.*_distilled_",
        "parallel": r"vit_.*_18x2_",
        "gated": r"vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)$",
        "plain": r"(vit|deit3?)_(?!.*(_resnet|_mci_|_radio_|_intern))|flexivit_|eva_large_|test_vit$",
    }
    return next((kind for kind, pattern in patterns.items() if re.match(pattern, architecture)), "")


def _vit_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    ratio = 4 * 2 ** max(len(config.stem_units) - 1, 0) if config.stem == "resnet" else 1
    gated = config.mlp == "swiglu"
    values = _arguments(config, naming, patch=config.patch // ratio, hidden=config.mlp_dim * (2 if gated else 1))
    values |= dict(
        class_token=config.has_class_token,
        pos_embed="none" if config.positions == "none" else "learn",
        no_embed_class=config.prefix > 0 and config.front == 0,
        reg_tokens=config.registers,
        fc_norm=config.final_norm == "pooled",
    )
    return values if gated else values | dict(act_layer="gelu_tanh" if config.gelu == "tanh" else "gelu")


def _beit_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    values = _arguments(config, naming, patch=config.patch, hidden=config.mlp_dim)
    relative = config.positions == "relative_bias"
    return values | dict(
        use_abs_pos_emb=config.positions == "1d",
        use_rel_pos_bias=relative and config.place != "shared",
        use_shared_rel_pos_bias=relative and config.place == "shared",
        use_fc_norm=config.final_norm == "pooled",
    )


def _arguments(config: ViTConfig, naming: Naming, patch: int, hidden: int) -> dict[str, Any]:
    """What both of timm's classes take. LayerScale is left out by a 0: a null would leave it to the architecture."""
    return dict(
        img_size=list(config.image_size),
        patch_size=patch,
        in_chans=config.channels,
        num_classes=config.classes,
        global_pool=POOLS[config.pool],
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=_ratio(config.width, hidden),
        qkv_bias=naming.qkv_bias,
        init_values=0.0 if config.layer_scale is None else (config.layer_scale or 1e-5),
    )


def _ratio(width: int, hidden: int) -> float:
    """A number r for which `int(width * r)`, as timm computes it, is `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
