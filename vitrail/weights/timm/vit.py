"""Infer the ViT in a timm file from the names and shapes of its tensors and its config.json.

`infer` first rejects what vitrail cannot express (`file.py`), then reads each part of the model: blocks, stem,
tokens, positions, heads, pooling. A value that the file does not give is assumed and noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vitrail.errors import WeightsError
from vitrail.model.limits import Gelu
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import (
    AIMV2_HEADS,
    ROTARY_HEADS,
    count,
    grid_of,
    row_count,
    shape_of,
    stem_sizes,
    usual_heads,
)
from vitrail.weights.timm.eva import PARTS as ROTARY_PARTS
from vitrail.weights.timm.eva import attention_pool, epsilon, is_rotary, rotary_of
from vitrail.weights.timm.file import AIMV2_PARTS, CLIP_EPS, GROUP_NORM_EPS, NORM_EPS, TimmFile, refuse, statistics
from vitrail.weights.timm.names import ACTIVATIONS, POOLS, Naming
from vitrail.weights.timm.relpos import BEIT_TABLES, SOURCES, relative_positions, relpos_kind
from vitrail.words import shown

_HEADS = (
    (r"vit_so400m_|vit_giantopt_|vit_base_patch16_gap_", 16),
    (r"eva02_enormous_", 16),
    (r"test_vit2?$", 2),
    (r"test_vit[34]$", 3),
)
"""(pattern of the architecture, heads) for architectures whose number of heads does not follow from their width."""

SO400M_HEADS = {1152: 72}
"""Width of SO-400M models -> features of a head."""

_GAMMAS = ("blocks.0.ls1.gamma", "blocks.0.gamma_1", "blocks.0.attns.0.ls.gamma")
"""Names of the first LayerScale, of which a file with LayerScale has one."""

_TANH = re.compile(
    r"naflexvit_\w+_siglip$|vit_(base_patch32_siglip_|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip_|giantopt_)"
)
"""Pattern of the architectures that timm builds with the tanh GELU."""

_SIGLIP_2 = (
    (768, 32, 256, "vit_base_patch32_siglip_256"),
    (1024, 16, 512, "vit_large_patch16_siglip_512"),
    (1152, 16, None, "vit_so400m_patch16_siglip_256"),
    (1536, 16, None, "vit_giantopt_patch16_siglip_256"),
)
"""(width, patch, side of the images or None for any side, architecture) of the networks without a class token that have
the tanh GELU. No other published network of timm has their shapes, so a file without config.json is one of them."""


def infer(file: TimmFile) -> tuple[ViTConfig, Naming]:
    """Return the config of the model in a file and the file's naming.

    Raises WeightsError, naming the tensor or the entry of config.json, if vitrail's ViT cannot express the model.
    """
    archive, architecture = file.archive, file.architecture
    rotary = is_rotary(archive, architecture)
    aimv2 = {"patch_embed.norm.weight", "blocks.0.mlp.fc1_g.weight"} <= archive.names
    refuse(file, supported=ROTARY_PARTS if rotary else AIMV2_PARTS if aimv2 else ())
    stem = _stem(archive)
    blocks, naming = _blocks(archive, rotary)
    if not (architecture or aimv2 or rotary):
        _refuse_untold(file, stem | blocks, naming)
    tokens = ("cls_token", "dist_token", "reg_token")
    cls, dist, registers = (shape_of(archive, name, 3)[1] if name in archive else 0 for name in tokens)
    positions = _positions(file, stem["patch"], (cls, dist, registers), rotary)
    if not architecture and not cls:
        mine = (stem["width"], stem["patch"], positions["image_size"][0])
        architecture = next((name for *sizes, name in _SIGLIP_2 if tuple(sizes) in (mine, (*mine[:2], None))), "")
    heads = positions.pop("heads", None) or _heads(file, architecture, stem["width"], rotary)
    pool = pooling(file, bool(cls))
    if "attn_pool.latent" in archive:
        prefix = dict(pool_prefix=bool(file.argument("pool_include_prefix", bool)))
        pool |= attention_pool(file, heads, bool(cls or registers)) if rotary else prefix
    clip = "norm_pre.weight" in archive
    gamma = file.argument("init_values", (int, float)) or 1e-5
    usual_eps = epsilon(architecture) if rotary else CLIP_EPS if clip or aimv2 else NORM_EPS
    config = ViTConfig.of(
        **stem | blocks | positions | pool,
        heads=heads,
        classes=row_count(archive, "head.weight"),
        distilled=bool(dist),
        registers=registers,
        rotary=rotary_of(file) if rotary else None,
        layer_scale=None if archive.names.isdisjoint(_GAMMAS) else float(gamma),
        pre_logits=row_count(archive, "pre_logits.fc.weight") or None,
        gelu=_gelu(file, architecture, blocks["mlp"]),
        resize_mode="timm",
        pre_norm=clip,
        norm_after="_rpn_" in file.architecture or file.architecture.startswith("eva02_enormous_"),
        norm="rms" if aimv2 else "layer",
        patch_norm=aimv2,
        norm_eps=usual_eps,
        **statistics(file, stem["channels"]),
    )
    _refuse_combinations(file, config)
    return config, naming


def _refuse_combinations(file: TimmFile, config: ViTConfig) -> None:
    """Raise WeightsError for parts that vitrail has, but not in this combination."""
    if file.argument("pool_include_prefix", bool) and config.pool == "gap" and config.prefix:
        raise file.error(
            "pool_include_prefix of config.json also averages the tokens in front of the grid, but vitrail averages "
            "only the grid's tokens"
        )
    if config.origin.distilled and config.origin.final_norm == "pooled":
        raise file.error("it has both 'fc_norm.weight' and 'dist_token', but timm does not apply fc_norm to two tokens")
    if config.origin.mlp == "swiglu" and config.pool == "map":
        raise file.error(
            "'attn_pool.mlp.fc1.weight' is part of a plain MLP, but the MLPs of the blocks are gated; a model of "
            "vitrail has one kind of MLP"
        )


def _refuse_untold(file: TimmFile, values: Mapping[str, Any], naming: Naming) -> None:
    """Raise WeightsError for a file without config.json whose tensors fit networks that compute different things.

    `values` are stem and blocks, as fields of the config.
    """
    networks = None
    if "norm_pre.weight" in file.archive:
        networks = "CLIP, which has the exact GELU or, as OpenAI's own weights, quick_gelu"
    tokenless = file.archive.names.isdisjoint({"cls_token", "attn_pool.latent"})
    if naming.beit and (values["mlp"] == "swiglu" or values["width"] == 1792):
        networks = "EVA-02, which has rotary positions or norms behind attention and MLP"
    elif naming.relpos:
        networks = (
            "timm's relpos networks, which differ in the size of their images, and in norms that stand before or "
            "behind attention and MLP"
        )
    elif not naming.beit and not naming.bias and tokenless:
        networks = (
            "timm's gap and rpn networks (no class token, no bias of queries, keys and values): they differ in their "
            "heads, and in norms that stand before or behind attention and MLP"
        )
    elif tokenless and (values["width"], values["patch"]) == (768, 16):
        networks = "timm's SigLIP and gap networks, which have 12 or 16 heads"
    if networks is not None:
        raise file.error(f"its tensors are those of {networks}. Add a config.json that names the architecture")


def _blocks(archive: Archive, rotary: bool) -> tuple[dict[str, Any], Naming]:
    """Return the sizes and kind of the blocks as fields of the config, and the naming of their tensors."""
    parallel = "blocks.0.attns.0.attn.qkv.weight" in archive
    attention = "blocks.0.attns.0.attn" if parallel else "blocks.0.attn"
    mlp = "blocks.0.ffns.0.mlp" if parallel else "blocks.0.mlp"
    gates = row_count(archive, f"{mlp}.fc1_g.weight") + row_count(archive, f"{mlp}.fc1_x.weight")
    hidden, mlp_dim = gates or row_count(archive, f"{mlp}.fc1.weight"), shape_of(archive, f"{mlp}.fc2.weight", 2)[1]
    if hidden not in (mlp_dim, 2 * mlp_dim):
        raise WeightsError(f"{archive.path}: '{mlp}.fc1' has {hidden} outputs, but '{mlp}.fc2' has {mlp_dim} inputs")
    keys = {f"{attention}.qkv.bias", f"{attention}.k_proj.bias"}
    values = dict(
        depth=count(archive, "blocks."),
        mlp_dim=mlp_dim,
        mlp="gelu" if hidden == mlp_dim else "swiglu",
        mlp_norm=f"{mlp}.norm.weight" in archive,
        attention_norm=f"{attention}.norm.weight" in archive,
        qk_norm="head" if f"{attention}.q_norm.weight" in archive else "none",
        key_bias=not rotary or not archive.names.isdisjoint(keys),
        block="parallel" if parallel else "sequential",
        branches=count(archive, "blocks.0.attns.") if parallel else 1,
    )
    naming = Naming(
        beit=not rotary and not archive.names.isdisjoint({f"{attention}.q_bias", *BEIT_TABLES}),
        bias=not archive.names.isdisjoint({*keys, f"{attention}.q_bias", f"{attention}.q_proj.bias"}),
        dense_bias=rotary or f"{mlp}.fc2.bias" in archive,
        relpos=relpos_kind(archive),
        apart=f"{attention}.q_proj.weight" in archive,
        gate_apart=bool(gates),
    )
    return values, naming


def _stem(archive: Archive) -> dict[str, Any]:
    """Return width, patch, channels and, for a hybrid, the ResNet in front as fields of the config."""
    width, channels, kernel = stem_sizes(archive, "patch_embed.proj.weight")
    backbone = "patch_embed.backbone."
    if not any(name.startswith(backbone) for name in archive.names):
        return dict(width=width, patch=kernel, channels=channels)
    stages = range(count(archive, f"{backbone}stages."))
    units = tuple(count(archive, f"{backbone}stages.{stage}.blocks.") for stage in stages)
    root = shape_of(archive, f"{backbone}{'stem.' if units else ''}conv.weight", 4)
    return dict(
        stem="resnet",
        width=width,
        stem_units=units,
        stem_width=root[0],
        patch=kernel * 4 * 2 ** max(len(units) - 1, 0),
        channels=root[1],
        std_conv="timm",
        group_norm_eps=GROUP_NORM_EPS,
    )


def _gelu(file: TimmFile, architecture: str, mlp: str) -> Gelu:
    """Return the kind of GELU: from `act_layer`, else from the architecture."""
    act = file.argument("act_layer", str)
    if mlp == "swiglu" or act is None:
        return "tanh" if _TANH.match(architecture) else "quick" if "quickgelu" in architecture else "erf"
    if act not in ACTIVATIONS.values():
        raise file.error(f"act_layer of config.json is {shown(act)}; valid: {', '.join(ACTIVATIONS.values())}")
    return next(gelu for gelu, theirs in ACTIVATIONS.items() if theirs == act)


def _heads(file: TimmFile, architecture: str, width: int, rotary: bool) -> int:
    """Return the number of heads: from `num_heads`, else the architecture, else as usual for this width."""
    given: int | None = file.argument("num_heads", int) or normed_heads(file.archive, width)
    known = (number for pattern, number in _HEADS if re.match(pattern, architecture))
    if heads := given or next(known, None):
        if rotary and (width % heads or width // heads % 4):
            raise file.error(f"num_heads is {heads}; valid: a number that splits {width} features into multiples of 4")
        return heads
    own = ROTARY_HEADS if rotary else AIMV2_HEADS if "patch_embed.norm.weight" in file.archive else SO400M_HEADS
    heads, why = usual_heads(file.archive, width, own)
    if not file.architecture:
        file.notes.append(why)
    return heads


def normed_heads(archive: Archive, width: int) -> int:
    """Return the number of heads, which a norm of queries shows by its number of weights; 0 without such a norm."""
    name = next((name for name in sorted(archive.names) if name.endswith(".attn.q_norm.weight")), None)
    return 0 if name is None else width // shape_of(archive, name, 1)[0]


def pooling(file: TimmFile, cls: bool) -> dict[str, Any]:
    """Return pooling, class token and final norm as fields of the config; `cls`: the file has a class token."""
    archive = file.archive
    norms = [name for name in ("norm", "fc_norm") if f"{name}.weight" in archive]
    unnormed = [file.argument(name, bool) is False for name in ("use_post_transformer_norm", "use_fc_norm")]
    none = file.argument("final_norm", bool) is False or all(unnormed)
    none = none or bool(re.search("_intern|_radio_|_pe_(lang|spatial)_", file.architecture))
    if len(norms) != (0 if none else 1):
        found = "'norm.weight'" if norms else "neither 'norm.weight' nor 'fc_norm.weight'"
        found = "both 'norm.weight' and 'fc_norm.weight'" if len(norms) > 1 else found
        which = "no" if none else "exactly one"
        like = "" if none or norms else ". InternViT and RADIO have none; their config.json says so"
        raise WeightsError(f"{archive.path} has {found}; this ViT has {which} norm after its last block{like}")
    if file.pool == "map" or "attn_pool.latent" in archive:
        if (probes := shape_of(archive, "attn_pool.latent", 3)[1]) != 1:
            raise file.error(f"'attn_pool.latent' holds {probes} probes; valid: one")
        pool = "map"
    elif file.pool:
        pools = {theirs: ours for ours, theirs in POOLS.items()}
        if file.pool not in pools:
            raise file.error(f"global_pool of config.json is {shown(file.pool)}; valid: {', '.join(pools)}")
        pool = pools[file.pool]
    else:
        pool = "cls" if cls and norms != ["fc_norm"] else "gap"
        if cls:
            what_norm = f"the name {norms[0]!r}" if norms else "a class token"
            what = "those of the class token" if pool == "cls" else "the average over the grid's tokens"
            file.notes.append(
                f"features are {what}, as {what_norm} suggests; the file does not say how they are pooled"
            )
    token = None if cls == (pool == "cls") else cls  # None: what the pool implies
    places = {"norm": "tokens", "fc_norm": "pooled"}
    return dict(pool=pool, class_token=token, final_norm=places[norms[0]] if norms else "none")


def _positions(file: TimmFile, patch: int, tokens: tuple[int, int, int], rotary: bool) -> dict[str, Any]:
    """Return positions, image size and tokens with positions as config fields; relative positions also tell heads.

    `tokens` are the numbers of class tokens, distillation tokens and registers.
    """
    archive, (cls, dist, registers) = file.archive, tokens
    found = [name for name in ("pos_embed", *(() if rotary else SOURCES)) if name in archive]
    if len(found) > 1:
        raise WeightsError(f"{archive.path} has two kinds of positions, {found[0]!r} and {found[1]!r}; valid: one kind")
    if found and found != ["pos_embed"]:
        return relative_positions(file, found[0], patch, class_token=bool(cls))
    given = file.image_size() or ((224, 224) if rotary else None)
    grid = None if given is None else (given[0] // patch, given[1] // patch)
    fields: dict[str, Any]
    if not found:
        if not file.architecture and not rotary:
            raise WeightsError(
                f"{archive.path} lacks the tensor 'pos_embed'. Its positions may be rotary, as in RoPE-ViT, or it may "
                "have none. Add a config.json that names the architecture."
            )
        size = grid or (max(224 // patch, 1),) * 2
        fields = dict(positions="none")
    else:
        length = shape_of(archive, "pos_embed", 3)[1]
        hint = "Add a config.json with an architecture and pretrained_cfg.input_size."
        size, front = grid_of(archive, "pos_embed", length, (0, cls + dist, cls + dist + registers), grid, hint)
        own = bool(registers) and front == cls + dist + registers
        fields = dict(positions="1d", cls_position=front >= cls + dist, register_positions=own)
    return fields | dict(image_size=(size[0] * patch, size[1] * patch))


_UNUSED = (
    (r"(relative_position_index|rel_coords_log)$", "computed from the size of the grid"),
    (r"^mask_token$", "the mask token of pre-training"),
    (r"^decoder_", "the decoder of MAE's pre-training"),
    (r"^lm_head\.", "the head of BEiT's pre-training"),
    (r"^rope\.(?!freqs$)", "computed from the size of the grid"),
)


def unused(archive: Archive) -> dict[str, str]:
    """Return name -> reason for the tensors that the model does not use."""
    return {name: why for pattern, why in _UNUSED for name in sorted(archive.names) if re.search(pattern, name)}
