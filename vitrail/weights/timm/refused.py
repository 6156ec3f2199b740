"""What timm's networks have and vitrail's have not, and the other way round."""

from __future__ import annotations

import re

from vitrail.errors import WeightsError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.timm.read_config import GROUP_NORM_EPS, NORM_EPS, Hub

_TENSORS = (
    (r"^norm_pre\.", "a norm in front of the first block, as in CLIP"),
    (r"^patch_embed\.norm\.", "a norm on the patches"),
    (r"\.running_mean$", "a BatchNorm"),
    (
        r"^patch_embed\.backbone\.(?!(stem\.)?(conv|norm)\.|stages\.\d+\.blocks\.\d+\.)",
        "a stem other than BiT's ResNet",
    ),
    (r"\.attn\.(norm|scale_norm)\.|\.mlp\.norm\.", "a norm inside the attention or the MLP"),
    (r"\.[qk]_norm\.", "normalised queries and keys"),
    (r"^blocks\..*\.(q|k|v|q_proj|k_proj|v_proj)\.weight$", "separate projections of queries, keys and values"),
    (r"\.(lambda_\w+|sub_norm\.\w+)$", "differential attention"),
    (r"\.attn\.gate", "gated attention"),
    (r"\.(in_proj|in_norm|mlp_bias|attn_out_proj|mlp_out_proj)\b", "a projection that attention and MLP share"),
    (r"\.mlp\.(fc1_[gx]|w\d+)\.", "an MLP whose gate is a layer of its own"),
    (r"(^|\.)(rope|rotary|freqs)\b", "rotary positions"),
    (r"\.rel_pos(_[hw]$|\.)|^rel_pos_bias\..*mlp", "relative positions of another kind than BEiT's"),
    (r"^attn_pool\.pos_embed$", "positions in the attention pooling"),
)
"""Patterns of tensor names, and what such a tensor is part of."""

_ARCHITECTURES = (
    (r"rope|eva02|dinov3|vit_pe_", "rotary positions"),
    (r"naflex", "patches of any aspect ratio"),
    (r"_rpn_", "norms behind attention and MLP"),
    (r"quickgelu", "another approximation of GELU"),
    (r"^test_vit3$", "pooling over registers"),
)
"""What names and shapes do not show."""

_ARGUMENTS = {"norm_layer": ("layernorm", "layernormfp32"), "padding_same": (True,)}
"""The values of arguments that leave no trace in names and shapes, with which the model is one known here."""

_UNUSED = (
    (r"relative_position_index$", "computed from the size of the grid"),
    (r"^mask_token$", "the mask token of pre-training"),
    (r"^decoder_", "the decoder of MAE's pre-training"),
    (r"^lm_head\.", "the head of BEiT's pre-training"),
)


def refuse(archive: Archive, hub: Hub) -> None:
    """Raise WeightsError, naming the tensor or the entry of config.json, for a model vitrail cannot express."""
    for pattern, what in _ARCHITECTURES:
        if re.search(pattern, hub.architecture):
            raise WeightsError(f"{archive.path}: {hub.architecture!r} has {what}, which vitrail has not")
    for name, known in _ARGUMENTS.items():
        value = hub.arguments.get(name)
        if value is not None and value not in known:
            raise WeightsError(f"{archive.path}: {name} {value!r} of config.json; known here: {known[0]!r}")
    for pattern, what in _TENSORS:
        if found := sorted(name for name in archive.names if re.search(pattern, name)):
            raise WeightsError(f"{archive.path}: {found[0]!r} is part of {what}, which vitrail has not")


def unused(archive: Archive) -> dict[str, str]:
    """Names of tensors that have no place in the model, and why."""
    return {name: why for pattern, why in _UNUSED for name in sorted(archive.names) if re.search(pattern, name)}


def fits_beit(config: ViTConfig) -> bool:
    """Could timm's BEiT be this model, whatever its positions?"""
    plain = (config.stem, config.block, config.mlp, config.gelu) == ("linear", "sequential", "gelu", "erf")
    return plain and config.has_class_token and config.prefix == 1 and config.pool in ("cls", "gap")


def vit_refusal(config: ViTConfig, bare: bool) -> str:
    """Why timm has no ViT like this, or no way to say so; "" where it has. `bare`: without a config.json."""
    relative = config.positions == "relative_bias"
    hybrid = config.stem == "resnet"
    special = {
        "a ResNet stem": hybrid,
        "a distillation token": config.distilled,
        "parallel blocks": config.block == "parallel",
        "gated MLPs": config.mlp == "swiglu",
        "BEiT's positions": relative,
    }
    together = " together with ".join(name for name, there in special.items() if there)
    standardised = (config.std_conv, config.group_norm_eps)
    checks = {
        f"its stem is {config.stem!r}": config.stem not in ("linear", "resnet"),
        "its blocks are axial": config.block == "axial",
        f"its positions are {config.positions!r}; timm's are one row for each cell": config.positions
        in ("2d", "relative"),
        f"its positions are added at place {config.place!r}": config.positions in ("1d", "sincos")
        and config.place != "input",
        f"it pools {config.pool!r}": config.pool == "cls+gap",
        f"its LayerNorm has the epsilon {config.norm_eps}, timm's {NORM_EPS}": config.norm_eps != NORM_EPS,
        f"its stem standardises kernels as {standardised[0]!r} does and has the GroupNorm epsilon {standardised[1]}; "
        f"timm's are 'timm' and {GROUP_NORM_EPS}": hybrid and standardised != ("timm", GROUP_NORM_EPS),
        f"it has {together}": sum(special.values()) > 1,
        "its attention pooling comes after gated MLPs": config.mlp == "swiglu" and config.pool == "map",
        "its distillation token has no learned position, registers beside it, or no norm": config.distilled
        and (
            config.registers > 0 or not config.cls_position or (config.positions, config.final_norm) != ("1d", "tokens")
        ),
        "its positions are BEiT's, and something else is not": relative and not fits_beit(config),
        f"it has {config.branches} branches in a block; timm's architectures have 2 (a path that ends in "
        ".safetensors takes the tensors alone)": config.branches > 2 and not bare,
        "it has a pre-logits layer, which timm has dropped (a path that ends in .safetensors takes the tensors "
        "under their names of older versions)": config.pre_logits is not None and not bare,
    }
    return next((reason for reason, holds in checks.items() if holds), "")


def bit_refusal(config: ResNetConfig) -> str:
    """Why timm has no ResNet like this; "" where it has."""
    checks = {
        "its 3 x 3 convolutions are axial attention": config.axial,
        f"its kernels are standardised as {config.std_conv!r} does": config.std_conv == "hybrid",
        f"its GroupNorm has the epsilon {config.group_norm_eps}, timm's {GROUP_NORM_EPS}": config.group_norm_eps
        != GROUP_NORM_EPS,
    }
    return next((reason for reason, holds in checks.items() if holds), "")
