"""OpenCLIP's Vision Transformers: OpenAI's names of tensors, with the prefix `visual.`, and open_clip_config.json.

The patch embedding and the projection (`proj`) have no bias. The outputs of the projection are the embedding that is
compared with texts; they count as classes.

The tensors do not tell quick_gelu from GELU. Only OpenAI's own files, which also hold `input_resolution`, are known to
have quick_gelu; the others need open_clip_config.json.

Some image towers are networks of timm: `visual.trunk.` in front of timm's names, and a projection.

| theirs | ours |
|---|---|
| `visual.trunk.blocks.0.attn.qkv.weight` | as in timm, without the prefix |
| `visual.head.proj` (`timm_proj` "linear"), `visual.trunk.head` (`timm_proj` null) | `head` |
| any of them with `timm_proj` "none" | left out: the outputs are the features of the tower |

The last layer of a model of vitrail is linear, so a projection of `timm_proj` "mlp" has no place. With "none" in place
of "mlp" in open_clip_config.json, such a tower is loaded without it.

vision_cfg of open_clip_config.json names the architecture, its pooling and the projection. OpenCLIP builds the network
from this name alone. So a model goes back only with the sizes with which it was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.data.images.geometry import Interpolation
from vitrail.data.settings import GREY, Preprocess
from vitrail.errors import WeightsError
from vitrail.model.limits import Gelu
from vitrail.model.variants import Config, ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, for_channels, foreign_tensors, origin_of, state_of, write_folder
from vitrail.weights.mapping import (
    CLIP,
    Conversion,
    NameTable,
    apply_table,
    count,
    grid_of,
    number_in,
    numbers_in,
    reshaped,
    row_count,
    shape_of,
    size_in,
    stem_sizes,
    turned,
    unbatched,
    usual_heads,
    within,
    without_stem_bias,
)
from vitrail.weights.parts import without_place
from vitrail.weights.timm.format import FORMAT as TIMM
from vitrail.weights.timm.format import vit_tensors
from vitrail.words import shown

FILES = ("open_clip_model.safetensors", "open_clip_config.json")
PREFIXES = ("visual.", "")
NORM_EPS = 1e-5
_BLOCK = {
    "attentions.0.norm.{part}": "ln_1.{part}",
    "attentions.0.attention.qkv.{part}": "attn.in_proj_{part}",
    "attentions.0.attention.out.{part}": "attn.out_proj.{part}",
    "attentions.0.residual.gamma": "ls_1.gamma",
    "mlps.0.norm.{part}": "ln_2.{part}",
    "mlps.0.mlp.fc1.{part}": "mlp.c_fc.{part}",
    "mlps.0.mlp.fc2.{part}": "mlp.c_proj.{part}",
    "mlps.0.residual.gamma": "ls_2.gamma",
}
TABLE: NameTable = {
    "stem.weight": "{prefix}conv1.weight",
    "cls": reshaped("{prefix}class_embedding", (-1,)),
    "positions.embedding": unbatched("{prefix}positional_embedding"),
    "pre_norm.{part}": "{prefix}ln_pre.{part}",
    **within("blocks.{layer}.", "{prefix}transformer.resblocks.{layer}.", _BLOCK),
    "norm.{part}": "{prefix}ln_post.{part}",
    "head.weight": turned("{prefix}proj"),
}
"""Name in the model -> name in the file. Patch embedding and projection have no bias."""
_TEXTS: tuple[str, ...] = ("positional_embedding", "text_projection", "logit_scale", "logit_bias", "attn_mask")
_TEXTS += ("transformer.", "text.", "token_embedding.", "ln_final.")
"""Names of the tower for texts, or their start."""
_OPENAI = ("input_resolution", "context_length", "vocab_size")
_KNOWN: dict[str, Any] = {
    **dict.fromkeys(("image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size", "ls_init_value")),
    **dict.fromkeys(("patch_dropout", "norm_kwargs", "act_kwargs", "output_tokens", "no_ln_pre")),
    **dict(pool_type="tok", pos_embed_type="learnable", attentional_pool=False, final_ln_after_pool=False),
}
"""Entry of vision_cfg -> the only value that is supported; None for any."""
HAS = "layer_scale pre_norm gelu norm_eps oblong pooled_norm"
"""The parts in `vitrail.weights.parts` that OpenCLIP's image towers have."""


class OpenClip:
    """The format of OpenCLIP, which is OpenAI's."""

    name = "open_clip"

    def recognises(self, archive: Archive) -> bool:
        """See `Format.recognises`: OpenAI's names of the patch and the class embedding, or a tower of timm."""
        own = ({f"{prefix}conv1.weight", f"{prefix}class_embedding"} for prefix in PREFIXES)
        return _is_tower(archive) or any(names <= archive.names for names in own)

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        if _is_tower(archive):
            return _find_tower(archive)
        prefix = next(prefix for prefix in PREFIXES if f"{prefix}conv1.weight" in archive)
        config, notes = _config(archive, prefix)
        preprocess = _preprocess(archive, config.image_size, notes)
        zeros = {"stem.bias": "no bias of the patch embedding", "head.bias": "no bias of the projection"}
        entries = apply_table(expected(config, archive.path), TABLE, prefix=prefix)
        origin = dict(format=self.name, file=archive.path.name, prefix=prefix, config=dict(archive.config))
        card = Card(config, preprocess=preprocess, source=self.name, provenance={"origin": origin})
        unused = _texts(archive) if prefix else {}
        unused |= dict.fromkeys(_OPENAI, "a size of the towers")
        return ForeignModel(card, entries, {k: why for k, why in unused.items() if k in archive}, zeros, notes)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write a folder with the image tower and open_clip_config.json. Raises WeightsError.

        OpenCLIP builds a model only with a tower for texts; `model.visual.load_state_dict` takes this one.
        """
        origin = origin_of(card, self.name)
        if "trunk" in origin and isinstance(model, ViT):
            read = origin.get("config", {})
            cfg = _mapping(read, "model_cfg", "the model's card")
            tensors = _tower_tensors(model, card, origin["trunk"], _mapping(cfg, "vision_cfg", "the model's card"))
            values = {**read, "preprocess_cfg": _preprocess_json(model.config, card)}
            write_folder(path, tensors, {FILES[1]: values}, FILES[0])
            return
        config = model.config
        if card.preprocess.resize == "squash-crop":
            raise WeightsError(
                f"format {self.name!r} cannot squash images and crop them (preprocess.resize squash-crop)"
            )
        if reason := _refusal(config):
            raise WeightsError(f"format {self.name!r} has no place for this model: {reason}")
        assert isinstance(config, ViTConfig)
        state = without_stem_bias(state_of(model), config)
        if state.pop("head.bias").any():
            raise WeightsError(
                f"format {self.name!r} has no place for this model: its last layer has a bias, and a projection none"
            )
        entries = apply_table(state, TABLE, prefix=origin.get("prefix", PREFIXES[0]))
        values = _json(config, card, origin.get("config", {}))
        write_folder(path, foreign_tensors(state, entries, self.name), {FILES[1]: values}, FILES[0])


FORMAT = OpenClip()


def _texts(archive: Archive) -> dict[str, str]:
    """Return the tensors of the tower for texts, and why they are not used."""
    return dict.fromkeys((one for one in sorted(archive.names) if one.startswith(_TEXTS)), "the tower for texts")


def _config(archive: Archive, prefix: str) -> tuple[ViTConfig, list[str]]:
    """Return the config of the image tower, and the assumptions made. Raises WeightsError."""
    where, notes = f"{archive.path}, {FILES[1]}", list[str]()
    model = _mapping(archive.config, "model_cfg", where)
    vision = _mapping(model, "vision_cfg", where)
    _refuse_unknown(vision, _KNOWN, where)
    width, channels, patch = stem_sizes(archive, f"{prefix}conv1.weight")
    table, layers = f"{prefix}positional_embedding", f"{prefix}transformer.resblocks"
    if vision.get("image_size") is None:
        side = grid_of(archive, table, shape_of(archive, table, 2)[0], (1,))[0][0] * patch
        size = side, side
    else:
        size = size_in(vision["image_size"], "image_size", where)
    if vision:
        heads = width // int(number_in({"head_width": 64} | vision, "head_width", where) or 1)
    else:
        heads, sentence = usual_heads(archive, width)
        notes.append(f"{sentence}, because there is no {FILES[1]}")
    mean, std = _statistics(archive, channels, where, notes)
    gamma = {"ls_init_value": vision.get("ls_init_value") or 1e-5}
    config = ViTConfig.of(
        width=width,
        depth=count(archive, f"{layers}."),
        heads=heads,
        mlp_dim=row_count(archive, f"{layers}.0.mlp.c_fc.weight"),
        patch=patch,
        image_size=size,
        channels=channels,
        classes=shape_of(archive, f"{prefix}proj", 2)[1],
        pre_norm=f"{prefix}ln_pre.weight" in archive,
        layer_scale=number_in(gamma, "ls_init_value", where) if f"{layers}.0.ls_1.gamma" in archive else None,
        norm_eps=number_in({"eps": NORM_EPS} | _mapping(vision, "norm_kwargs", where), "eps", where),
        gelu=_gelu(archive, model, vision, where),
        resize_mode="timm",  # bicubic, antialiased
        mean=mean,
        std=std,
    )
    return config, notes


def _refuse_unknown(vision: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Raise WeightsError for an entry of vision_cfg that is not known, or does not have the only supported value."""
    for name, value in vision.items():
        if name not in known or (known[name] is not None and value != known[name]):
            raise WeightsError(f"{where}: {name} is {shown(value)} in vision_cfg, which vitrail does not support")


def _gelu(archive: Archive, model: Mapping[str, Any], vision: Mapping[str, Any], where: str) -> Gelu:
    """Return the kind of GELU. Raises WeightsError if nothing tells it."""
    if set(_OPENAI) <= archive.names or model.get("quick_gelu"):
        return "quick"
    if not model:
        raise WeightsError(
            f"{archive.path} is a CLIP model, and its tensors do not say whether the MLPs have quick_gelu, as OpenAI's "
            f"weights, or GELU, as most of OpenCLIP's. Give a folder with the weights, named {FILES[0]} or "
            f'open_clip_pytorch_model.bin, and {FILES[1]}; {{"model_cfg": {{"quick_gelu": false}}}} is enough'
        )
    return "tanh" if _mapping(vision, "act_kwargs", where).get("approximate") == "tanh" else "erf"


def _mapping(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the JSON object `name`, {} if there is none. Raises WeightsError for anything else."""
    found = values.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise WeightsError(f"{where}: {name} is {shown(found)}; valid: an object")
    return dict(found or {})


def _statistics(archive: Archive, channels: int, where: str, notes: list[str]) -> list[tuple[float, ...]]:
    """Return mean and standard deviation of the channels."""
    values: dict[str, Any] = dict(zip(("mean", "std"), CLIP, strict=True)) | _mapping(
        archive.config, "preprocess_cfg", where
    )
    return [for_channels(name, numbers_in(values, name, where), channels, notes) for name in ("mean", "std")]


def _preprocess(archive: Archive, image_size: tuple[int, int], notes: list[str]) -> Preprocess:
    """Return the preprocessing in open_clip_config.json, or CLIP's: the short side to the size, bicubic, the centre."""
    values = _mapping(archive.config, "preprocess_cfg", f"{archive.path}, {FILES[1]}")
    mode, named = values.get("resize_mode") or "shortest", values.get("interpolation") or "bicubic"
    interpolation: Interpolation = "bilinear" if named == "bilinear" else "bicubic"
    if not values:
        notes.append(f"the preprocessing of OpenAI's CLIP, because no {FILES[1]} describes one")
    if named != interpolation:
        notes.append(f"bicubic resizing instead of {shown(named)}")
    if mode == "squash":
        return Preprocess(image_size, "squash", interpolation=interpolation)
    if mode == "longest":
        fill = int(number_in({"fill_color": values.get("fill_color") or 0}, "fill_color", str(archive.path)))
        return Preprocess(image_size, "pad", interpolation=interpolation, fill=(fill, fill, fill))
    if mode != "shortest":
        notes.append(f"the centre of the image instead of resize_mode {shown(mode)}")
    return Preprocess(image_size, "small", 1.0, interpolation)


def _refusal(config: Any) -> str:
    """Return why OpenCLIP cannot express a model, "" if it can."""
    if not isinstance(config, ViTConfig):
        return "it is a ResNet"
    headless = "" if config.classes else "no projection of the class token, because it has 0 classes"
    return without_place(config, HAS) or headless


def _json(config: ViTConfig, card: Card, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return open_clip_config.json, with the text tower of the file from which the model was loaded."""
    height, width = config.image_size
    vision: dict[str, Any] = dict(
        image_size=height if height == width else [height, width],
        layers=config.depth,
        width=config.width,
        head_width=config.width // config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        patch_size=config.patch,
        ls_init_value=config.layer_scale,
        no_ln_pre=not config.origin.pre_norm,
        norm_kwargs=dict(eps=config.origin.norm_eps),
    )
    if config.origin.gelu == "tanh":
        vision["act_kwargs"] = dict(approximate="tanh")
    texts = {key: value for key, value in dict(origin.get("model_cfg") or {}).items() if key == "text_cfg"}
    return dict(
        model_cfg=dict(embed_dim=config.classes, quick_gelu=config.origin.gelu == "quick", vision_cfg=vision, **texts),
        preprocess_cfg=_preprocess_json(config, card),
    )


def _preprocess_json(config: ViTConfig, card: Card) -> dict[str, Any]:
    padded = card.preprocess.resize == "pad"  # otherwise the picture fills the whole image
    fill = round(sum(card.preprocess.fill or GREY) / 3) if padded else 0  # one number for all colours
    return dict(
        mean=list(config.mean),
        std=list(config.std),
        interpolation=card.preprocess.interpolation,
        resize_mode={"squash": "squash", "pad": "longest", "small": "shortest"}[card.preprocess.resize],
        # OpenCLIP's own files name it nowhere, and 0 is what it takes then
        **({"fill_color": fill} if fill else {}),
    )


TRUNK, TOWER_HEAD = "visual.trunk.", "visual.head."
PROJECTION = f"{TOWER_HEAD}proj."
_POOLS = ("avg", "token", "map", "")
PROJECTIONS = ("linear", "none", "", None)
"""Supported values of `timm_proj`; with the last two, timm's own classifier is the projection."""
_OWN_POOLS = ((r"vit_relpos_.*_cls_", "token"), (r"vit_relpos_.*_clsgap_", "avg"))
"""(pattern of architectures with a class token, their own pooling), for `timm_pool` "", which keeps it."""
_IGNORED = ("timm_model_pretrained", "timm_proj_bias", "timm_drop", "timm_drop_path", "patch_dropout", "output_tokens")
_TOWER_KNOWN = ("image_size", "timm_model_name", "timm_pool", "timm_proj", *_IGNORED)


def _is_tower(archive: Archive) -> bool:
    """Return whether the image tower is a network of timm."""
    return any(name.startswith(TRUNK) for name in archive.names)


def _find_tower(archive: Archive) -> ForeignModel:
    """Return the network of timm in an archive, with OpenCLIP's preprocessing. Raises WeightsError."""
    where, notes = f"{archive.path}, {FILES[1]}", list[str]()
    vision = _mapping(_mapping(archive.config, "model_cfg", where), "vision_cfg", where)
    name, pool, projection = _tower_settings(archive, vision, where)
    size = size_in(vision.get("image_size", 224), "image_size", where)
    heads = (one for one in sorted(archive.names) if one.startswith((TOWER_HEAD, f"{TRUNK}head.")))
    left_out = dict.fromkeys(heads, "the projection, because timm_proj is 'none'") if projection == "none" else {}
    found = TIMM.find(_trunk(archive, left_out.keys(), name, pool, size))
    bias = projection != "linear" or f"{PROJECTION}bias" in archive
    zeros = found.zeros | ({} if bias else {"head.bias": "no bias of the projection"})
    unused = {f"{TRUNK}{name}": why for name, why in found.unused.items()} | left_out | _texts(archive)

    def renamed(entries: list[Conversion]) -> list[Conversion]:
        """Return conversions of timm with the names in the file of OpenCLIP, without those of tensors that it lacks."""
        there = [entry for entry in entries if entry.ours not in zeros]
        return [replace(entry, theirs=tuple(_whole(one, projection) for one in entry.theirs)) for entry in there]

    mean, std = _statistics(archive, found.card.config.channels, where, notes)
    config = replace(found.card.config, mean=mean, std=std)
    preprocess = _preprocess(archive, config.image_size, notes)
    trunk = found.card.provenance["origin"] | dict(sizes=_sizes_of(config))
    origin = dict(format=FORMAT.name, file=archive.path.name, config=dict(archive.config), trunk=trunk)
    card = Card(config, preprocess=preprocess, source=FORMAT.name, provenance={"origin": origin})
    again = None if (computed := found.for_config) is None else lambda config: renamed(computed(config))
    assumptions = [*found.assumptions, *notes]
    return ForeignModel(card, renamed(found.conversions), unused, zeros, assumptions, for_config=again)


def _tower_settings(archive: Archive, vision: Mapping[str, Any], where: str) -> tuple[str, str, str | None]:
    """Return architecture, pooling and projection. Raises WeightsError for values that vitrail does not support."""
    name = vision.get("timm_model_name")
    if not isinstance(name, str):
        raise WeightsError(
            f"{archive.path} has an image tower of timm, and nothing names its architecture. Add open_clip_config.json "
            "beside the weights, with timm_model_name in vision_cfg"
        )
    _refuse_unknown(vision, dict.fromkeys(_TOWER_KNOWN), where)
    pool, projection = vision.get("timm_pool", "avg"), vision.get("timm_proj", "linear")
    if projection == "mlp":
        raise WeightsError(
            f"{where}: timm_proj is 'mlp' in vision_cfg, but the last layer of a model of vitrail is linear and cannot "
            f"hold an MLP ({TOWER_HEAD}mlp). Valid: {', '.join(map(repr, PROJECTIONS))}. To load the tower without its "
            "projection, replace 'mlp' by 'none' there; its outputs are then the features in front of the projection"
        )
    if not pool:
        pool = next((own for pattern, own in _OWN_POOLS if re.match(pattern, name)), pool)
    if pool not in _POOLS or projection not in PROJECTIONS:
        raise WeightsError(
            f"{where}: timm_pool is {shown(pool)} and timm_proj is {shown(projection)} in vision_cfg; valid: "
            f"{', '.join(map(repr, _POOLS))} and {', '.join(map(repr, PROJECTIONS))}"
        )
    if not pool and (projection != "linear" or f"{TRUNK}cls_token" in archive):
        raise WeightsError(
            f"{where}: timm_pool is '' in vision_cfg, so it is not known what the tower computes from its tokens"
        )
    return name, pool, projection


def _trunk(archive: Archive, without: Collection[str], name: str, pool: str, size: tuple[int, int]) -> Archive:
    """Return the tower as an archive in timm's format, without the tensors `without`."""
    used = archive.names.difference(without)
    theirs = {one.removeprefix(TRUNK): one for one in used if one.startswith(TRUNK)}
    for kind in ("weight", "bias"):
        if (projection := f"{PROJECTION}{kind}") in used:
            theirs[f"head.{kind}"] = projection
    shapes = {ours: archive.shape(one) for ours, one in theirs.items()}
    config = dict(architecture=name, model_args=dict(img_size=list(size)), global_pool=pool or None)
    return Archive(archive.path, archive.kind, shapes, lambda one: archive.read(theirs[one]), config=config)


def _whole(name: str, projection: str | None) -> str:
    """Return a name of timm's as it is in the file of OpenCLIP."""
    own = projection == "linear" and name.startswith("head.")
    return f"{PROJECTION}{name.removeprefix('head.')}" if own else f"{TRUNK}{name}"


def _sizes_of(config: Config) -> dict[str, str]:
    """Return the sizes of a tower that OpenCLIP takes from the name of its architecture."""
    height, width = config.image_size
    return dict(
        images=f"{height} x {width} pixels", patch=str(getattr(config, "patch", 0)), outputs=str(config.classes)
    )


def _tower_tensors(model: ViT, card: Card, trunk: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a tower for OpenCLIP. `trunk` and `vision` describe the file that it was loaded from.

    Raises WeightsError with the reason if OpenCLIP would build another network.
    """
    if (sizes := _sizes_of(model.config)) != trunk.get("sizes"):
        raise WeightsError(
            f"OpenCLIP builds this tower from the name {shown(vision.get('timm_model_name'))} alone, and the model has "
            f"other sizes now: {', '.join(f'{name} {value}' for name, value in sizes.items())}. Save it as 'timm'"
        )
    if trunk.get("relpos"):
        raise WeightsError(
            f"OpenCLIP builds {shown(vision.get('timm_model_name'))} with MLPs that compute relative positions, and the"
            " model holds the table that they computed. Save it as 'timm'"
        )
    tensors = vit_tensors(model, replace(card, provenance={"origin": dict(trunk)}))
    projection = vision.get("timm_proj", "linear")
    if projection == "linear" and not vision.get("timm_proj_bias") and tensors.pop("head.bias").any():
        raise WeightsError("OpenCLIP has no place for this model: its last layer has a bias, and this projection none")
    return {_whole(name, projection): tensor for name, tensor in tensors.items()}
