"""timm's names for the tensors of its Vision Transformers: one table, and what is otherwise in BEiT, EVA and others.

Relative positions are those of `relpos.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.model.limits import Gelu
from vitrail.model.variants import ViTConfig
from vitrail.weights.assemble import expected_of
from vitrail.weights.mapping import (
    Conversion,
    NameTable,
    Rule,
    apply_table,
    dense_biases,
    joined,
    qkv_biases,
    within,
    without_key_bias,
)
from vitrail.weights.timm.relpos import RelposKind, bias_rule

POOLS = {"cls": "token", "gap": "avg", "map": "map"}
"""vitrail's name of a pooling -> timm's."""

ACTIVATIONS: dict[Gelu, str] = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}
"""`ViTConfig.gelu` -> timm's `act_layer`."""


BOTTLENECK = {
    "conv{number}.weight": "conv{number}.weight",
    "norm{number}.{part}": "norm{number}.{part}",
    "shortcut.weight": "downsample.conv.weight",
    "shortcut.conv.weight": "downsample.conv.weight",
    "shortcut.norm.{part}": "downsample.norm.{part}",
}
"""A unit of a ResNet: of BiT, or of the one in front of a hybrid, whose shortcut has a norm."""
OUTSIDE: NameTable = {
    "stem.{part}": "patch_embed.proj.{part}",
    "stem.root.conv.weight": "patch_embed.backbone.{root}conv.weight",
    "stem.root.norm.{part}": "patch_embed.backbone.{root}norm.{part}",
    **within("stem.stages.{stage}.{unit}.", "patch_embed.backbone.stages.{stage}.blocks.{unit}.", BOTTLENECK),
    "stem.proj.{part}": "patch_embed.proj.{part}",
    "patch_norm.{part}": "patch_embed.norm.{part}",
    "cls": "cls_token",
    "dist": "dist_token",
    "registers": "reg_token",
    "positions.embedding": "pos_embed",
    "positions.rotary.frequencies": Rule(
        ("rope.freqs",), lambda table: table.transpose(0, 1), lambda table: table.transpose(0, 1)
    ),
    "pre_norm.{part}": "norm_pre.{part}",
    "norm.{part}": "{norm}.{part}",
    "pool.probe": "attn_pool.latent",
    "pool.query.{part}": "attn_pool.q.{part}",
    "pool.key_value.{part}": "attn_pool.kv.{part}",
    "pool.out.{part}": "attn_pool.proj.{part}",
    "pool.norm.{part}": "attn_pool.norm.{part}",
    "pool.mlp.fc{number}.{part}": "attn_pool.mlp.fc{number}.{part}",
    "pre_logits.hidden.{part}": "pre_logits.fc.{part}",
    "head.{part}": "head.{part}",
    "head_dist.{part}": "head_dist.{part}",
}
"""Everything but the blocks. {root} is "stem.", or nothing if it is all there is; {norm} is "norm" or "fc_norm"."""

ATTENTION: NameTable = {
    "norm.{part}": "norm1.{part}",
    "attention.qkv.{part}": "attn.qkv.{part}",
    "attention.qk_norm.query.{part}": "attn.q_norm.{part}",
    "attention.qk_norm.key.{part}": "attn.k_norm.{part}",
    "attention.norm.{part}": "attn.norm.{part}",
    "attention.out.{part}": "attn.proj.{part}",
    "residual.gamma": "ls1.gamma",
}
MLP: NameTable = {
    "norm.{part}": "norm2.{part}",
    "mlp.fc{number}.{part}": "mlp.fc{number}.{part}",
    "mlp.norm.{part}": "mlp.norm.{part}",
    "residual.gamma": "ls2.gamma",
}
PARALLEL: NameTable = {"norm.{part}": "norm.{part}", "residual.gamma": "ls.gamma"}
"""The rows that are otherwise in parallel blocks, in `attns.0` and `ffns.0`."""
APART: NameTable = {"attention.qkv.{part}": joined(*(f"attn.{name}_proj.{{part}}" for name in "qkv"))}
"""Queries, keys and values in layers of their own (EVA-02 B and L)."""
KEYLESS = without_key_bias("attn.q_bias", "attn.v_bias")
KEYLESS_APART = without_key_bias("attn.q_proj.bias", "attn.v_proj.bias")
"""The bias of queries, keys and values if keys have none (BEiT and the networks with rotary positions)."""
GATES = {"mlp.fc1.{part}": joined("mlp.fc1_g.{part}", "mlp.fc1_x.{part}")}
"""Gate and value of SwiGLU in layers of their own (AIMv2, EVA-02 B and L)."""


@dataclass(frozen=True)
class Naming:
    """The properties of the names in a file that the model's config does not determine."""

    beit: bool = False
    """Whether the names are BEiT's, whose keys have no bias. (With rotary positions, the config says so.)"""
    bias: bool = True
    """Whether queries and values have a bias in the file; otherwise the model's are zero."""
    dense_bias: bool = True
    """Whether the other dense layers of the blocks have a bias in the file (not in AIMv2)."""
    relpos: RelposKind = ""
    apart: bool = False
    """Whether queries, keys and values are separate layers."""
    gate_apart: bool = False
    """Whether gate and value of SwiGLU are separate layers."""


def conversions(config: ViTConfig, naming: Naming) -> list[Conversion]:
    """Return the conversions of all tensors of a model in a timm file."""
    missing = absent(config, naming)
    names = [name for name in expected_of(config) if name not in missing]
    root, norm = "stem." if config.stem_units else "", "fc_norm" if config.origin.final_norm == "pooled" else "norm"
    return apply_table(names, _table(config, naming), root=root, norm=norm)


def _table(config: ViTConfig, naming: Naming) -> NameTable:
    """Return the table of a file."""
    rotary = config.origin.rotary is not None
    keyless = not config.origin.key_bias if rotary else naming.beit
    attention, mlp, table = dict(ATTENTION), dict(MLP), dict(OUTSIDE)
    first, second = "blocks.{layer}.", "blocks.{layer}."
    if config.block == "parallel":
        attention |= PARALLEL
        mlp |= PARALLEL
        first, second = f"{first}attns.{{branch}}.", f"{second}ffns.{{branch}}."
    if rotary or naming.beit:
        attention["residual.gamma"], mlp["residual.gamma"] = "gamma_1", "gamma_2"
    if naming.apart:
        attention |= APART
    if keyless:
        attention = {"attention.qkv.bias": KEYLESS_APART if naming.apart else KEYLESS, **attention}
    if naming.gate_apart:
        mlp = {**GATES, **mlp}
    if config.positions == "relative_bias":
        table["positions.bias"] = bias_rule(config, naming.relpos)
    return {
        **table,
        **within("blocks.{layer}.attentions.{branch}.", first, attention),
        **within("blocks.{layer}.mlps.{branch}.", second, mlp),
    }


def absent(config: ViTConfig, naming: Naming) -> dict[str, str]:
    """Return the model's tensors that are zero because the file lacks them, and why."""
    zeros = {} if naming.bias else dict.fromkeys(qkv_biases(config), "no bias of queries, keys and values")
    zeros |= {"stem.bias": "no bias of the patch embedding"} if config.origin.pre_norm else {}
    return zeros if naming.dense_bias else zeros | dict.fromkeys(dense_biases(config), "no bias in attention and MLP")


def is_aimv2(config: ViTConfig) -> bool:
    """Return whether a network is of AIMv2's kind: RMSNorm, also on the patches, and gated MLPs."""
    return config.origin.norm == "rms" and config.origin.patch_norm and config.origin.mlp == "swiglu"


def ratio_of(hidden: int, width: int) -> float:
    """Return the ratio from which timm computes a hidden width, as int(width * ratio)."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
