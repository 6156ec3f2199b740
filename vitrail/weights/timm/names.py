"""timm's names for the tensors of a ViT, plain or BEiT's, and for a hybrid's stem.

| ours | timm |
|---|---|
| `blocks.0.attentions.0`, `blocks.0.mlps.0` | `blocks.0.{norm1,attn,ls1}`, `blocks.0.{norm2,mlp,ls2}` |
| the same in parallel blocks, branch 1 | `blocks.0.attns.1.{norm,attn,ls}`, `blocks.0.ffns.1.{norm,mlp,ls}` |
| `pre_norm` | `norm_pre`; the patch embedding then has no bias |
| `patch_norm`, `mlp.fc1` of AIMv2 | `patch_embed.norm`, `mlp.fc1_g` and `mlp.fc1_x` |
| `attention.qk_norm.{query,key}` | `attn.{q_norm,k_norm}` |
| `norm` | `norm`, or `fc_norm` if it is applied to the pooled features |
| `stem.root`, `stem.stages.0.1` | `patch_embed.backbone.stem`, `patch_embed.backbone.stages.0.blocks.1` |
| `pool.{probe,query,key_value,out,norm,mlp}` | `attn_pool.{latent,q,kv,proj,norm,mlp}` |

BEiT has other names for its biases (`q_bias` and `v_bias`; keys have none) and its LayerScale (`gamma_1`, `gamma_2`).
Relative positions are those of `relpos.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.model.limits import Gelu
from vitrail.model.variants import ViTConfig
from vitrail.weights.mapping import Conversion, joined, norm_pair, qk_norms, same, same_pair, without_key_bias
from vitrail.weights.timm.relpos import RelposKind, bias_conversion

POOLS = {"cls": "token", "gap": "avg", "map": "map"}
"""vitrail's name of a pooling -> timm's."""

ACTIVATIONS: dict[Gelu, str] = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}
"""`ViTConfig.gelu` -> timm's `act_layer`."""

OVER_WIDTH = "it normalises queries and keys over all heads together; timm does so for each head"
"""Why timm cannot express a model whose `qk_norm` is "width"."""


@dataclass(frozen=True)
class Naming:
    """The properties of the names in a file that the model's config does not determine."""

    beit: bool = False
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias in the file; otherwise the model's are zero."""
    dense_bias: bool = True
    """Whether the other dense layers of the blocks have a bias in the file (not in AIMv2)."""
    relpos: RelposKind = ""


def conversions(config: ViTConfig, naming: Naming) -> list[Conversion]:
    """Return the conversions of all tensors of a model in a timm file."""
    entries = [*_stem(config), *_tokens(config), *_positions(config, naming)]
    entries += same_pair("pre_norm", "norm_pre") if config.pre_norm else []
    entries += norm_pair(config, "patch_norm", "patch_embed.norm") if config.patch_norm else []
    for layer in range(config.depth):
        for branch in range(config.branches):
            entries += _branch(config, naming, layer, branch)
    if config.final_norm != "none":
        entries += norm_pair(config, "norm", "fc_norm" if config.final_norm == "pooled" else "norm")
    if config.pool == "map":
        entries += attention_pool()
    if config.pre_logits:
        entries += same_pair("pre_logits.hidden", "pre_logits.fc")
    if config.classes:
        entries += same_pair("head", "head")
        entries += same_pair("head_dist", "head_dist") if config.distilled else []
    return entries


def is_aimv2(config: ViTConfig) -> bool:
    """Return whether a network is of AIMv2's kind: RMSNorm, also on the patches, and gated MLPs."""
    return config.norm == "rms" and config.patch_norm and config.mlp == "swiglu"


def qkv_biases(config: ViTConfig) -> list[str]:
    """Return vitrail's names of the biases of queries, keys and values."""
    branches = [(layer, branch) for layer in range(config.depth) for branch in range(config.branches)]
    return [f"blocks.{layer}.attentions.{branch}.attention.qkv.bias" for layer, branch in branches]


def _stem(config: ViTConfig) -> list[Conversion]:
    if config.stem == "linear":
        return patches(config)
    backbone = "patch_embed.backbone"
    root = f"{backbone}.stem" if config.stem_units else backbone
    entries = [same("stem.root.conv.weight", f"{root}.conv.weight"), *same_pair("stem.root.norm", f"{root}.norm")]
    for stage, units in enumerate(config.stem_units):
        for unit in range(units):
            ours, theirs = f"stem.stages.{stage}.{unit}", f"{backbone}.stages.{stage}.blocks.{unit}"
            entries += bottleneck(ours, theirs)
            if unit == 0:
                entries.append(same(f"{ours}.shortcut.conv.weight", f"{theirs}.downsample.conv.weight"))
                entries += same_pair(f"{ours}.shortcut.norm", f"{theirs}.downsample.norm")
    return entries + same_pair("stem.proj", "patch_embed.proj")


def bottleneck(ours: str, theirs: str) -> list[Conversion]:
    """Return the conversions of the three convolutions and norms of a unit of a ResNet."""
    entries = []
    for number in (1, 2, 3):
        entries.append(same(f"{ours}.conv{number}.weight", f"{theirs}.conv{number}.weight"))
        entries += same_pair(f"{ours}.norm{number}", f"{theirs}.norm{number}")
    return entries


def _tokens(config: ViTConfig) -> list[Conversion]:
    entries = [same("cls", "cls_token")] if config.has_class_token else []
    entries += [same("dist", "dist_token")] if config.distilled else []
    return entries + ([same("registers", "reg_token")] if config.registers else [])


def _positions(config: ViTConfig, naming: Naming) -> list[Conversion]:
    if config.positions == "none":
        return []
    if config.positions == "1d":
        return [same("positions.embedding", "pos_embed")]
    return [bias_conversion(config, naming.relpos)]


def _branch(config: ViTConfig, naming: Naming, layer: int, branch: int) -> list[Conversion]:
    """Return the conversions of one attention and one MLP of a layer."""
    block = f"blocks.{layer}"
    if config.block == "parallel":
        first, second = f"{block}.attns.{branch}", f"{block}.ffns.{branch}"
        norms, gammas = (f"{first}.norm", f"{second}.norm"), (f"{first}.ls.gamma", f"{second}.ls.gamma")
    else:
        first = second = block
        norms = (f"{block}.norm1", f"{block}.norm2")
        ends = ("gamma_1", "gamma_2") if naming.beit else ("ls1.gamma", "ls2.gamma")
        gammas = (f"{block}.{ends[0]}", f"{block}.{ends[1]}")
    attention, mlp = f"{block}.attentions.{branch}", f"{block}.mlps.{branch}"
    entries = [
        *norm_pair(config, f"{attention}.norm", norms[0]),
        same(f"{attention}.attention.qkv.weight", f"{first}.attn.qkv.weight"),
        *qk_norms(config, f"{attention}.attention", f"{first}.attn"),
        *norm_pair(config, f"{mlp}.norm", norms[1]),
    ]
    for kind in ("weight", "bias") if naming.dense_bias else ("weight",):
        fc1, gates = f"{mlp}.mlp.fc1.{kind}", tuple(f"{second}.mlp.fc1_{part}.{kind}" for part in "gx")
        entries += [
            same(f"{attention}.attention.out.{kind}", f"{first}.attn.proj.{kind}"),
            joined(fc1, gates) if is_aimv2(config) else same(fc1, f"{second}.mlp.fc1.{kind}"),
            same(f"{mlp}.mlp.fc2.{kind}", f"{second}.mlp.fc2.{kind}"),
        ]
    if naming.qkv_bias:
        bias, theirs = f"{attention}.attention.qkv.bias", f"{first}.attn"
        keyless = without_key_bias(bias, f"{theirs}.q_bias", f"{theirs}.v_bias")
        entries.append(keyless if naming.beit else same(bias, f"{theirs}.qkv.bias"))
    if config.layer_scale is not None:
        entries += [same(f"{attention}.residual.gamma", gammas[0]), same(f"{mlp}.residual.gamma", gammas[1])]
    return entries


def ratio_of(hidden: int, width: int) -> float:
    """Return the ratio from which timm computes a hidden width, as int(width * ratio)."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def patches(config: ViTConfig) -> list[Conversion]:
    """Return the conversions of a linear stem, which has no bias in front of a norm before the first block."""
    parts = ("weight",) if config.pre_norm else ("weight", "bias")
    return [same(f"stem.{part}", f"patch_embed.proj.{part}") for part in parts]


def attention_pool() -> list[Conversion]:
    """Return the conversions of the attention pooling."""
    layers = {"query": "q", "key_value": "kv", "out": "proj"} | {name: name for name in ("norm", "mlp.fc1", "mlp.fc2")}
    pairs = [entry for ours, theirs in layers.items() for entry in same_pair(f"pool.{ours}", f"attn_pool.{theirs}")]
    return [same("pool.probe", "attn_pool.latent"), *pairs]
