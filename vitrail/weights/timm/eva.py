"""timm's networks with rotary positions (class `Eva`): EVA-02, DINOv3, RoPE-ViT, PE and timm's own.

Their names are those of `names.py`. Tensors do not show how positions rotate. The architecture says it, and its
arguments in config.json. Of bare files, only those of DINOv3 are known by their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vitrail.config import merge
from vitrail.errors import UsageError, WeightsError
from vitrail.model.variants import Rotary, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import origin_of
from vitrail.weights.mapping import row_count
from vitrail.weights.parts import first_reason, without_place
from vitrail.weights.timm.file import NORM_EPS, TimmFile
from vitrail.weights.timm.names import Naming, ratio_of
from vitrail.words import shown

LARGE_EPS = 1e-5
"""Epsilon of the LayerNorms of DINOv3 and the Perception Encoder; of the others it is timm's usual one."""
_EVA_02: dict[str, Any] = dict(ref_feat_shape=(16, 16))
_ROPE: dict[str, Any] = dict(rope_grid_indexing="xy", rope_temperature=100.0)
_DINOV3: dict[str, Any] = dict(rope_type="dinov3", rope_temperature=100.0, rope_rotate_half=True)
_PE: dict[str, Any] = dict(rope_grid_indexing="xy", rope_grid_offset=1.0, ref_feat_shape=(32, 32))
ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"eva02_(?!enormous)", _EVA_02),
    (r"vit_.*_rope_reg\d_gap_", _EVA_02),
    (r"vit_.*_rope_mixed_", _ROPE | dict(rope_type="mixed", rope_temperature=10.0)),
    (r"vit_.*_rope_", _ROPE),
    (r"vit_.*_dinov3", _DINOV3),
    (r"vit_pe_\w+_gigantic_", _PE | dict(rope_grid_offset=0.0)),
    (r"vit_pe_core_base_", _PE | dict(ref_feat_shape=(14, 14))),
    (r"vit_pe_core_", _PE | dict(ref_feat_shape=(24, 24))),
    (r"vit_pe_", _PE),
)
"""(pattern of architectures, their arguments of rotary positions where they differ from those of timm's class)."""
WRITTEN = (
    *("vit_small_patch16_dinov3", "vit_base_patch16_rope_224", "eva02_base_patch14_224"),
    *("vit_pe_core_base_patch16_224", "vit_pe_lang_large_patch14_448"),
)
"""The architectures for models that come from elsewhere."""
PE_POOL_HEADS = 8
"""Number of heads of the attention pooling of `vit_pe_core_*`."""
PARTS = (
    "rotary positions",
    "a norm inside the attention or the MLP",
    "separate projections of queries, keys and values",
    "an MLP whose gate is a layer of its own",
)
"""Parts that the plain ViT of timm lacks, and these have."""
HAS = "rotary inner_norms qk_norm=head mlp=swiglu layer_scale pre_norm norm_eps pooled_norm unnormed oblong registers"
HAS += " register_positions cls_position positions=none tokenless unread pool=gap pool=map"
HAS += " pool_heads pool_mlp_dim pool_prefix"
"""The parts in `vitrail.weights.parts` that these networks have in timm."""


def is_rotary(archive: Archive, architecture: str) -> bool:
    """Return whether a file in timm's format is one of these networks: by its architecture, or of a bare DINOv3.

    No other published network of timm has class token, registers and LayerScale, but no table of positions.
    """
    if architecture:
        return any(re.match(pattern, architecture) for pattern, _ in ARCHITECTURES)
    dinov3 = {"cls_token", "reg_token", "blocks.0.gamma_1", "blocks.0.gamma_2"} <= archive.names
    return dinov3 and archive.names.isdisjoint({"pos_embed", "rope.freqs", "blocks.0.attn.q_norm.weight"})


def epsilon(architecture: str) -> float:
    """Return the epsilon of the LayerNorms of an architecture, "" for a bare file, which is a DINOv3."""
    return LARGE_EPS if not architecture or re.search("dinov3|^vit_pe_", architecture) else NORM_EPS


def attention_pool(file: TimmFile, heads: int, front: bool) -> dict[str, Any]:
    """Return the settings of attention pooling as config fields; it reads the tokens in `front` of the grid, too."""
    usual = PE_POOL_HEADS if file.architecture.startswith("vit_pe_core_") else heads
    return dict(
        pool_heads=file.argument("attn_pool_num_heads", int) or usual,
        pool_mlp_dim=row_count(file.archive, "attn_pool.mlp.fc1.weight"),
        pool_prefix=front,
    )


def rotary_of(file: TimmFile) -> Rotary:
    """Return how positions rotate: as the arguments in config.json say, else the architecture."""
    known = next((values for pattern, values in ARCHITECTURES if re.match(pattern, file.architecture)), _DINOV3)
    said = known | {name: value for name, value in file.arguments.items() if value is not None}
    kind, order = said.get("rope_type", "cat"), said.get("rope_grid_indexing", "ij")
    if kind not in ("cat", "mixed", "dinov3") or order not in ("ij", "xy"):
        raise file.error(
            f"rope_type is {shown(kind)} and rope_grid_indexing {shown(order)}; valid: cat, mixed, dinov3; ij, xy"
        )
    reference = said.get("ref_feat_shape") if kind == "cat" else None
    values = dict(
        frequencies="mixed" if kind == "mixed" else "axial",
        base=said.get("rope_temperature", 10_000.0),
        coordinates="centred" if kind == "dinov3" else "index",
        offset=0.0 if kind == "mixed" else said.get("rope_grid_offset", 0.0),
        reference=[reference, reference] if isinstance(reference, int) else reference,
        first="row" if order == "ij" else "column",
        pairs="halves" if said.get("rope_rotate_half") else "neighbours",
    )
    try:
        return merge(Rotary(), values, "config.json, rotary positions")
    except UsageError as error:  # in a file rather than in a flag
        raise file.error(str(error)) from error


# writing


def eva_naming(config: ViTConfig, layout: Mapping[str, Any], biases: bool) -> Naming:
    """Return the naming of a file from its `layout` in a card, if it still fits. `biases`: some are not zero."""
    try:
        found = merge(Naming(gate_apart=config.origin.mlp_norm), layout, "provenance.origin.layout")
    except UsageError as error:  # in a card rather than in a flag
        raise WeightsError(f"the model's card does not describe the file it comes from: {error}") from error
    gated = config.origin.mlp == "swiglu" and (found.gate_apart or config.origin.mlp_norm)
    # without a bias, timm's file does not show whether keys would have one
    return Naming(bias=found.bias or biases or config.origin.key_bias, apart=found.apart, gate_apart=gated)


def eva_refusal(config: ViTConfig) -> str:
    """Return why timm cannot express a model with rotary positions, "" if it can."""
    if part := without_place(config, HAS):
        return f"it has {part} besides rotary positions"
    rotary, mapped = config.origin.rotary or Rotary(), config.pool == "map"
    reasons = {
        "its attention pooling comes after gated MLPs": config.origin.mlp == "swiglu" and mapped,
        "its attention pooling leaves out the tokens in front of the grid": mapped
        and config.prefix > 0
        and not config.origin.pool_prefix,
        "its mixed frequencies rotate halves": (rotary.frequencies, rotary.pairs) == ("mixed", "halves"),
        "some tokens in front of the grid have positions, and others have none": config.positions == "1d"
        and config.front not in (0, config.prefix),
    }
    return first_reason(reasons)


def eva_architecture(config: ViTConfig, card: Card) -> str:
    """Return the architecture that a model was loaded with if it still fits, else a usual one. Raises WeightsError.

    The arguments in a config.json cannot change its epsilon, nor take away what it has: null stands for the
    architecture's own value.
    """
    loaded, rotary = str(origin_of(card, "timm").get("architecture") or ""), config.origin.rotary or Rotary()
    # the grid to which coordinates are scaled; where none are, any would do
    scaled = rotary.reference or (rotary.frequencies, rotary.coordinates) != ("axial", "index")
    for name in (loaded, *WRITTEN):
        known = next((values for pattern, values in ARCHITECTURES if re.match(pattern, name)), None)
        unscaled = config.layer_scale is None and re.match("vit_(?!pe_core_|pe_spatial_(?!gigantic))", name)
        fits = not unscaled and config.origin.norm_eps == epsilon(name)
        if known is not None and fits and (scaled or "ref_feat_shape" not in known):
            return name
    scale = "no LayerScale" if config.layer_scale is None else "LayerScale"
    raise WeightsError(
        f"timm has no architecture with rotary positions, {scale} and the LayerNorm epsilon {config.origin.norm_eps} "
        "that a config.json could name. To save the tensors alone, give a path that ends in .safetensors."
    )


def eva_arguments(config: ViTConfig, naming: Naming) -> dict[str, Any]:
    """Return the arguments of timm's class that only these networks have, for config.json."""
    rotary = config.origin.rotary or Rotary()
    kind = {"centred": "dinov3", "index": "cat"}[rotary.coordinates]
    values: dict[str, Any] = dict(
        attn_type="rope" if config.origin.key_bias else "eva",
        qkv_bias=naming.bias,
        qkv_fused=not naming.apart,
        swiglu_mlp=config.origin.mlp == "swiglu",
        swiglu_align_to=int(naming.gate_apart and not config.origin.mlp_norm),
        scale_mlp=config.origin.mlp_norm,
        scale_attn_inner=config.origin.attention_norm,
        qk_norm=config.origin.qk_norm == "head",
        class_token=config.has_class_token,
        num_reg_tokens=config.registers,
        no_embed_class=config.prefix > 0 and config.front == 0,
        use_abs_pos_emb=config.positions == "1d",
        use_rot_pos_emb=True,
        rope_type="mixed" if rotary.frequencies == "mixed" else kind,
        rope_temperature=rotary.base,
        rope_grid_offset=rotary.offset,
        rope_grid_indexing="ij" if rotary.first == "row" else "xy",
        rope_rotate_half=rotary.pairs == "halves",
        **({} if rotary.reference is None else dict(ref_feat_shape=list(rotary.reference))),
        use_fc_norm=config.origin.final_norm == "pooled",
        use_post_transformer_norm=config.origin.final_norm == "tokens",
        use_pre_transformer_norm=config.origin.pre_norm,
    )
    if config.pool == "map":
        values["attn_pool_num_heads"] = config.origin.pool_heads or config.heads
        values["attn_pool_mlp_ratio"] = ratio_of(config.origin.pool_mlp_dim or config.mlp_dim, config.width)
    return values
