"""What timm's Vision Transformers have and vitrail has not, and what a file without config.json leaves open."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from vitrail.weights.mapping import stem_sizes
from vitrail.weights.timm.file import TimmFile
from vitrail.weights.timm.names import Naming
from vitrail.words import shown

_TENSORS = (
    (r"^patch_embed\.norm\.", "a norm on the patches"),
    (r"\.running_mean$", "a BatchNorm"),
    (
        r"^patch_embed\.backbone\.(?!(stem\.)?(conv|norm)\.|stages\.\d+\.blocks\.\d+\.)",
        "a stem other than BiT's ResNet",
    ),
    (r"\.attn\.(norm|scale_norm)\.|\.mlp\.norm\.", "a norm inside the attention or the MLP"),
    (r"^blocks\..*\.(q|k|v|q_proj|k_proj|v_proj)\.weight$", "separate projections of queries, keys and values"),
    (r"\.(lambda_\w+|sub_norm\.\w+)$", "differential attention"),
    (r"\.attn\.gate", "gated attention"),
    (r"\.(in_proj|in_norm|mlp_bias|attn_out_proj|mlp_out_proj)\b", "a projection that attention and MLP share"),
    (r"\.mlp\.(fc1_[gx]|w\d+)\.", "an MLP whose gate is a layer of its own"),
    (r"(^|\.)(rope|rotary|freqs)\b", "rotary positions"),
    (r"\.rel_pos_[hw]$|^rel_pos_bias\..*mlp", "relative positions of another kind than BEiT's"),
    (r"^attn_pool\.pos_embed$", "positions in the attention pooling"),
)
"""(pattern of tensor names, the part of a model to which they belong), for parts that vitrail does not have."""

AIMV2_PARTS = ("a norm on the patches", "an MLP whose gate is a layer of its own")
"""Parts in `_TENSORS` that AIMv2 has."""

_ARCHITECTURES = (
    (r"lingbot|sapiens", "rotary positions of another kind"),
    (r"naflex", "patches of any aspect ratio"),
    (r"^test_vit3$", "pooling over registers"),
)
"""(pattern of architectures, a part that vitrail does not have), for parts that names and shapes do not show."""

_ARGUMENTS = {"norm_layer": ("layernorm", "layernormfp32"), "padding_same": (True,)}
"""Argument -> supported values, for arguments that names and shapes do not show."""


def refuse(file: TimmFile, supported: Container[str] = ()) -> None:
    """Raise WeightsError, naming the tensor or the entry of config.json, for a model that vitrail cannot express.

    `supported` are the parts in `_TENSORS` that its kind of network may have.
    """
    for pattern, what in _ARCHITECTURES:
        if re.search(pattern, file.architecture):
            raise file.error(f"{shown(file.architecture)} has {what}, which vitrail does not support")
    for name, known in _ARGUMENTS.items():
        value = file.arguments.get(name)
        if value is not None and value not in known:
            raise file.error(f"{name} of config.json is {shown(value)}; valid: {known[0]!r}")
    for pattern, what in _TENSORS:
        if what in supported:
            continue
        if found := sorted(name for name in file.archive.names if re.search(pattern, name)):
            raise file.error(f"{found[0]!r} is part of {what}, which vitrail does not support")


def refuse_untold(file: TimmFile, blocks: Mapping[str, Any], naming: Naming) -> None:
    """Raise WeightsError for a file without config.json whose tensors fit networks that compute different things.

    `blocks` are sizes and kind of the blocks, as fields of the config.
    """
    networks = None
    if "norm_pre.weight" in file.archive:
        networks = "CLIP, which has the exact GELU or, as OpenAI's own weights, quick_gelu"
    tokenless = file.archive.names.isdisjoint({"cls_token", "attn_pool.latent"})
    if naming.beit and (blocks["mlp"] == "swiglu" or blocks["width"] == 1792):
        networks = "EVA-02, which has rotary positions or norms behind attention and MLP"
    elif naming.relpos:
        networks = (
            "timm's relpos networks, which differ in the size of their images, and in norms that stand before or "
            "behind attention and MLP"
        )
    elif not naming.beit and not naming.qkv_bias and tokenless:
        networks = (
            "timm's gap and rpn networks (no class token, no bias of queries, keys and values): they differ in their "
            "heads, and in norms that stand before or behind attention and MLP"
        )
    elif tokenless and blocks["width"] == 768 and stem_sizes(file.archive, "patch_embed.proj.weight")[2] == 16:
        networks = "timm's SigLIP and gap networks, which have 12 or 16 heads"
    if networks is not None:
        raise file.error(f"its tensors are those of {networks}. Add a config.json that names the architecture")
