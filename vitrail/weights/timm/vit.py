"""Infer the ViT in a timm file from the names and shapes of its tensors and its config.json.

`infer` first rejects what vitrail cannot express (the tables at the end of this file), then reads each part of the
model: blocks, stem, tokens, positions, heads, pooling. A value that the file does not say is assumed and noted.
"""

from __future__ import annotations

import re
from math import isqrt
from typing import Any, Literal

from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.mapping import rows, shape_of, stem_sizes, usual_heads
from vitrail.weights.timm.names import TABLE, Naming
from vitrail.weights.timm.read_config import (
    GROUP_NORM_EPS,
    IMAGENET,
    NORM_EPS,
    TimmConfig,
    UsualPreprocessing,
    statistics,
)

_POOLS = {"token": "cls", "avg": "gap"}

_HEADS = (
    (r"vit_so400m_|vit_giantopt_|vit_base_patch16_gap_", 16),
    (r"test_vit2?$", 2),
    (r"test_vit[34]$", 3),
)
"""(pattern of the architecture, heads) for architectures whose number of heads does not follow from their width."""

_TANH = re.compile(r"vit_(base_patch32_siglip_|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip_|giantopt_)")
"""Pattern of the architectures that timm builds with the tanh GELU."""


def infer(archive: Archive, hub: TimmConfig, notes: list[str]) -> tuple[ViTConfig, Naming]:
    """Return the config of the model in a file and the file's naming; append assumptions to `notes`.

    Raises WeightsError, naming the tensor or the entry of config.json, if vitrail's ViT cannot express the model.
    """
    refuse(archive, hub)
    blocks, naming = _blocks(archive)
    stem = _stem(archive)
    tokens = {name: _tokens(archive, name) for name in ("cls_token", "dist_token", "reg_token")}
    positions = _positions(archive, hub, stem["patch"], tokens)
    heads = positions.pop("heads", None) or _heads(archive, hub, blocks["width"], notes)
    gamma = hub.argument("init_values", (int, float)) or 1e-5
    config = ViTConfig(
        **blocks | stem | positions | _pooling(archive, hub, bool(tokens["cls_token"]), notes),
        heads=heads,
        classes=rows(archive, "head.weight"),
        distilled=bool(tokens["dist_token"]),
        registers=tokens["reg_token"],
        layer_scale=float(gamma) if _scaled(archive) else None,
        pre_logits=rows(archive, "pre_logits.fc.weight") or None,
        gelu=_gelu(hub, blocks["mlp"]),
        resize_mode="timm",
        norm_eps=NORM_EPS,
        **statistics(hub, stem["channels"], usual(archive), notes),
    )
    _refuse_combinations(archive, hub, config)
    return config, naming


def _refuse_combinations(archive: Archive, hub: TimmConfig, config: ViTConfig) -> None:
    """Raise WeightsError for parts that vitrail has, but not in this combination."""
    if hub.argument("pool_include_prefix", bool) and config.pool != "cls" and config.prefix:
        raise WeightsError(
            f"{archive.path}: pool_include_prefix of config.json also pools the tokens in front of the grid; vitrail "
            "pools only the grid's tokens"
        )
    if config.distilled and config.final_norm == "pooled":
        raise WeightsError(
            f"{archive.path} has both 'fc_norm.weight' and 'dist_token'; timm does not apply fc_norm to two tokens"
        )
    if config.mlp == "swiglu" and config.pool == "map":
        raise WeightsError(
            f"{archive.path}: 'attn_pool.mlp.fc1.weight' is part of a plain MLP, but the MLPs of the blocks are gated; "
            "vitrail has one kind of MLP per model"
        )


def usual(archive: Archive) -> UsualPreprocessing:
    """Return the usual preprocessing of such a model; DeiT, DINOv2 and MAE use ImageNet's mean and std."""
    meta = {"dist_token", "blocks.0.ls1.gamma", "mask_token"} & archive.names
    return IMAGENET if meta and "blocks.0.attn.q_bias" not in archive else UsualPreprocessing()


def count(archive: Archive, prefix: str) -> int:
    """Return the number of numbered parts below `prefix`. Raises WeightsError if a number is missing."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    numbers = {int(match[1]) for name in archive.names if (match := pattern.match(name))}
    for number in range(len(numbers)):
        if number not in numbers:
            raise WeightsError(f"{archive.path} has '{prefix}{max(numbers)}' but no '{prefix}{number}'")
    return len(numbers)


def _blocks(archive: Archive) -> tuple[dict[str, Any], Naming]:
    """Return the sizes and kind of the blocks as fields of the config, and the naming of their tensors."""
    parallel = "blocks.0.attns.0.attn.qkv.weight" in archive
    attention = "blocks.0.attns.0.attn" if parallel else "blocks.0.attn"
    mlp = "blocks.0.ffns.0.mlp" if parallel else "blocks.0.mlp"
    joint, width = shape_of(archive, f"{attention}.qkv.weight", 2)
    if joint != 3 * width:
        raise WeightsError(f"{archive.path}: '{attention}.qkv.weight' has {joint} rows; expected {3 * width}")
    hidden, mlp_dim = rows(archive, f"{mlp}.fc1.weight"), shape_of(archive, f"{mlp}.fc2.weight", 2)[1]
    if hidden not in (mlp_dim, 2 * mlp_dim):
        raise WeightsError(f"{archive.path}: '{mlp}.fc1' has {hidden} outputs, but '{mlp}.fc2' has {mlp_dim} inputs")
    values = dict(
        width=width,
        depth=count(archive, "blocks."),
        mlp_dim=mlp_dim,
        mlp="gelu" if hidden == mlp_dim else "swiglu",
        block="parallel" if parallel else "sequential",
        branches=count(archive, "blocks.0.attns.") if parallel else 1,
    )
    beit = not archive.names.isdisjoint(
        {f"{attention}.q_bias", f"{attention}.{TABLE}", f"rel_pos_bias.{TABLE}"},
    )
    return values, Naming(beit, f"{attention}.{'q_bias' if beit else 'qkv.bias'}" in archive)


def _stem(archive: Archive) -> dict[str, Any]:
    """Return patch, channels and, for a hybrid, the ResNet in front as fields of the config."""
    _, channels, kernel = stem_sizes(archive, "patch_embed.proj.weight")
    backbone = "patch_embed.backbone."
    if not any(name.startswith(backbone) for name in archive.names):
        return dict(patch=kernel, channels=channels)
    stages = range(count(archive, f"{backbone}stages."))
    units = tuple(count(archive, f"{backbone}stages.{stage}.blocks.") for stage in stages)
    root = shape_of(archive, f"{backbone}{'stem.' if units else ''}conv.weight", 4)
    return dict(
        stem="resnet",
        stem_units=units,
        patch=kernel * 4 * 2 ** max(len(units) - 1, 0),
        channels=root[1],
        std_conv="timm",
        group_norm_eps=GROUP_NORM_EPS,
    )


def _tokens(archive: Archive, name: str) -> int:
    """Return the number of tokens in the tensor `name`, 0 if the archive lacks it."""
    return shape_of(archive, name, 3)[1] if name in archive else 0


def _scaled(archive: Archive) -> bool:
    """Return whether the blocks have LayerScale."""
    return not archive.names.isdisjoint({"blocks.0.ls1.gamma", "blocks.0.gamma_1", "blocks.0.attns.0.ls.gamma"})


def _gelu(hub: TimmConfig, mlp: str) -> Literal["erf", "tanh"]:
    """Return the kind of GELU: from `act_layer`, else from the architecture."""
    act = hub.argument("act_layer", str)
    if mlp == "swiglu" or act is None:
        return "tanh" if _TANH.match(hub.architecture) else "erf"
    if act not in ("gelu", "gelu_tanh"):
        raise WeightsError(f"{hub.path}: act_layer of config.json is {act!r}; valid: gelu, gelu_tanh")
    return "tanh" if act == "gelu_tanh" else "erf"


def _heads(archive: Archive, hub: TimmConfig, width: int, notes: list[str]) -> int:
    """Return the number of heads: from `num_heads`, else the architecture, else as usual for this width."""
    given: int | None = hub.argument("num_heads", int)
    known = (number for pattern, number in _HEADS if re.match(pattern, hub.architecture))
    heads = given or next(known, None)
    if heads:
        return heads
    if width == 1152:
        heads, why = 16, "16 heads, as in SO-400M models, which have this width of 1152"
    else:
        heads, why = usual_heads(archive, width)
    if not hub.architecture:
        notes.append(why)
    return heads


def _pooling(archive: Archive, hub: TimmConfig, cls: bool, notes: list[str]) -> dict[str, Any]:
    """Return pooling, class token and final norm as fields of the config; `cls`: the file has a class token."""
    norms = [name for name in ("norm", "fc_norm") if f"{name}.weight" in archive]
    if len(norms) != 1:
        found = "both 'norm.weight' and 'fc_norm.weight'" if norms else "neither 'norm.weight' nor 'fc_norm.weight'"
        raise WeightsError(f"{archive.path} has {found}; a ViT has exactly one norm after its last block")
    if hub.pool == "map" or "attn_pool.latent" in archive:
        if (probes := shape_of(archive, "attn_pool.latent", 3)[1]) != 1:
            raise WeightsError(f"{archive.path}: 'attn_pool.latent' holds {probes} probes; vitrail supports one")
        pool = "map"
    elif hub.pool:
        if hub.pool not in _POOLS:
            raise WeightsError(f"{archive.path}: global_pool of config.json is {hub.pool!r}; valid: token, avg, map")
        pool = _POOLS[hub.pool]
    else:
        pool = "cls" if cls and norms == ["norm"] else "gap"
        if cls:
            what = "those of the class token" if pool == "cls" else "the average over the grid's tokens"
            notes.append(
                f"features are {what}, as the name {norms[0]!r} suggests; the file does not say how they are pooled"
            )
    token = None if cls == (pool == "cls") else cls  # None: what the pool implies
    return dict(pool=pool, class_token=token, final_norm="pooled" if norms == ["fc_norm"] else "tokens")


def _positions(archive: Archive, hub: TimmConfig, patch: int, tokens: dict[str, int]) -> dict[str, Any]:
    """Return kind of positions, image size and tokens with positions as config fields; for BEiT also heads."""
    each, shared = f"blocks.0.attn.{TABLE}", f"rel_pos_bias.{TABLE}"
    found = [name for name in ("pos_embed", each, shared) if name in archive]
    if len(found) > 1:
        raise WeightsError(f"{archive.path} has two kinds of positions, {found[0]!r} and {found[1]!r}; a model has one")
    given = hub.image_size()
    grid = None if given is None else (given[0] // patch, given[1] // patch)
    fields: dict[str, Any]
    if not found:
        if not hub.architecture:
            raise WeightsError(
                f"{archive.path} has no 'pos_embed', so it has none or rotary ones, and names do "
                "not tell which. Add a config.json that names the architecture."
            )
        size = grid or (max(224 // patch, 1),) * 2
        fields = dict(positions="none")
    elif found == ["pos_embed"]:
        first, registers = tokens["cls_token"] + tokens["dist_token"], tokens["reg_token"]
        size, front = _grid(archive, (0, first, first + registers), grid)
        own = bool(registers) and front == first + registers
        fields = dict(positions="1d", cls_position=front >= first, register_positions=own)
    else:
        offsets, heads = shape_of(archive, found[0], 2)
        size = _window(archive, found[0], offsets - 3, grid)
        fields = dict(positions="relative_bias", place="shared" if found == [shared] else "every", heads=heads)
    return fields | dict(image_size=(size[0] * patch, size[1] * patch))


def _grid(archive: Archive, fronts: tuple[int, ...], given: tuple[int, int] | None) -> tuple[tuple[int, int], int]:
    """Return the grid (rows, columns) of the positions, and the number of positions in front for other tokens."""
    length = shape_of(archive, "pos_embed", 3)[1]
    possible = sorted(set(fronts))
    if given and length - given[0] * given[1] in possible:
        return given, length - given[0] * given[1]
    squares = [front for front in possible if length > front and isqrt(length - front) ** 2 == length - front]
    if len(squares) != 1:
        raise WeightsError(
            f"{archive.path}: 'pos_embed' has {length} positions, which fit {'more than one' if squares else 'no'} "
            f"square grid with {' or '.join(map(str, possible))} in front of it. Add a config.json with an "
            "architecture and pretrained_cfg.input_size."
        )
    side = isqrt(length - squares[0])
    return (side, side), squares[0]


def _window(archive: Archive, name: str, offsets: int, given: tuple[int, int] | None) -> tuple[int, int]:
    """Return the grid (rows, columns) of a table with (2 rows - 1) * (2 columns - 1) offsets."""
    if given and offsets == (2 * given[0] - 1) * (2 * given[1] - 1):
        return given
    side = isqrt(max(offsets, 0))
    if side * side != offsets or side % 2 == 0:
        raise WeightsError(
            f"{archive.path}: {name!r} has {offsets + 3} rows, which fit no square grid. Add a config.json with "
            "an architecture and pretrained_cfg.input_size."
        )
    return (side + 1) // 2, (side + 1) // 2


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
"""(pattern of tensor names, what such a tensor is part of) for parts that vitrail does not have."""

_ARCHITECTURES = (
    (r"rope|eva02|dinov3|vit_pe_", "rotary positions"),
    (r"naflex", "patches of any aspect ratio"),
    (r"_rpn_", "norms behind attention and MLP"),
    (r"quickgelu", "another approximation of GELU"),
    (r"^test_vit3$", "pooling over registers"),
)
"""(pattern of architectures, what they have that vitrail does not) where names and shapes do not show it."""

_ARGUMENTS = {"norm_layer": ("layernorm", "layernormfp32"), "padding_same": (True,)}
"""Argument -> supported values, for arguments that leave no trace in names and shapes."""

_UNUSED = (
    (r"relative_position_index$", "computed from the size of the grid"),
    (r"^mask_token$", "the mask token of pre-training"),
    (r"^decoder_", "the decoder of MAE's pre-training"),
    (r"^lm_head\.", "the head of BEiT's pre-training"),
)


def refuse(archive: Archive, hub: TimmConfig) -> None:
    """Raise WeightsError, naming the tensor or the entry of config.json, for a model that vitrail cannot express."""
    for pattern, what in _ARCHITECTURES:
        if re.search(pattern, hub.architecture):
            raise WeightsError(f"{archive.path}: {hub.architecture!r} has {what}, which vitrail does not support")
    for name, known in _ARGUMENTS.items():
        value = hub.arguments.get(name)
        if value is not None and value not in known:
            raise WeightsError(f"{archive.path}: {name} of config.json is {value!r}; valid: {known[0]!r}")
    for pattern, what in _TENSORS:
        if found := sorted(name for name in archive.names if re.search(pattern, name)):
            raise WeightsError(f"{archive.path}: {found[0]!r} is part of {what}, which vitrail does not support")


def unused(archive: Archive) -> dict[str, str]:
    """Return name -> reason for the tensors that the model does not use."""
    return {name: why for pattern, why in _UNUSED for name in sorted(archive.names) if re.search(pattern, name)}
