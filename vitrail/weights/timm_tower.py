"""OpenCLIP's image towers that are networks of timm: `visual.trunk.` in front of timm's names, and a projection.

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
from typing import Any

from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.variants import Config
from vitrail.model.vit import ViT
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel
from vitrail.weights.mapping import Conversion, size_in
from vitrail.weights.timm.format import FORMAT as TIMM
from vitrail.weights.timm.format import vit_tensors
from vitrail.words import shown

TRUNK, HEAD = "visual.trunk.", "visual.head."
PROJECTION = f"{HEAD}proj."
POOLS = ("avg", "token", "map", "")
PROJECTIONS = ("linear", "none", "", None)
"""Supported values of `timm_proj`; with the last two, timm's own classifier is the projection."""
_OWN_POOLS = ((r"vit_relpos_.*_cls_", "token"), (r"vit_relpos_.*_clsgap_", "avg"))
"""(pattern of architectures with a class token, their own pooling), for `timm_pool` "", which keeps it."""
_IGNORED = ("timm_model_pretrained", "timm_proj_bias", "timm_drop", "timm_drop_path", "patch_dropout", "output_tokens")
_KNOWN = ("image_size", "timm_model_name", "timm_pool", "timm_proj", *_IGNORED)


def is_tower(archive: Archive) -> bool:
    """Return whether the image tower is a network of timm."""
    return any(name.startswith(TRUNK) for name in archive.names)


def find_tower(archive: Archive, vision: Mapping[str, Any], where: str) -> ForeignModel:
    """Return the network of timm in an archive, with `vision`, the vision_cfg of the file `where`.

    Mean, standard deviation and preprocessing on its card are not those of OpenCLIP. Raises WeightsError.
    """
    name, pool, projection = _settings(archive, vision, where)
    size = size_in(vision.get("image_size", 224), "image_size", where)
    left_out = _left_out(archive) if projection == "none" else {}
    found = TIMM.find(_trunk(archive, left_out.keys(), name, pool, size))
    bias = projection != "linear" or f"{PROJECTION}bias" in archive
    zeros = found.zeros | ({} if bias else {"head.bias": "no bias of the projection"})
    unused = {f"{TRUNK}{name}": why for name, why in found.unused.items()} | left_out

    def renamed(entries: list[Conversion]) -> list[Conversion]:
        """Return conversions of timm with the names in the file of OpenCLIP, without those of tensors that it lacks."""
        there = [entry for entry in entries if entry.ours not in zeros]
        return [replace(entry, theirs=tuple(_whole(one, projection) for one in entry.theirs)) for entry in there]

    again = None if (computed := found.for_config) is None else lambda config: renamed(computed(config))
    return replace(found, conversions=renamed(found.conversions), unused=unused, zeros=zeros, for_config=again)


def _left_out(archive: Archive) -> dict[str, str]:
    """Return the tensors of a projection that vision_cfg leaves out, and why."""
    names = sorted(name for name in archive.names if name.startswith((HEAD, f"{TRUNK}head.")))
    return dict.fromkeys(names, "the projection, because timm_proj is 'none'")


def _settings(archive: Archive, vision: Mapping[str, Any], where: str) -> tuple[str, str, str | None]:
    """Return architecture, pooling and projection. Raises WeightsError for values that vitrail does not support."""
    name = vision.get("timm_model_name")
    if not isinstance(name, str):
        raise WeightsError(
            f"{archive.path} has an image tower of timm, and nothing names its architecture. Add open_clip_config.json "
            "beside the weights, with timm_model_name in vision_cfg"
        )
    for entry, value in vision.items():
        if entry not in _KNOWN:
            raise WeightsError(f"{where}: {entry} is {shown(value)} in vision_cfg, which vitrail does not support")
    pool, projection = vision.get("timm_pool", "avg"), vision.get("timm_proj", "linear")
    if projection == "mlp":
        raise WeightsError(
            f"{where}: timm_proj is 'mlp' in vision_cfg, but the last layer of a model of vitrail is linear and cannot "
            f"hold an MLP ({HEAD}mlp). Valid: {', '.join(map(repr, PROJECTIONS))}. To load the tower without its "
            "projection, replace 'mlp' by 'none' there; its outputs are then the features in front of the projection"
        )
    if not pool:
        pool = next((own for pattern, own in _OWN_POOLS if re.match(pattern, name)), pool)
    if pool not in POOLS or projection not in PROJECTIONS:
        raise WeightsError(
            f"{where}: timm_pool is {shown(pool)} and timm_proj is {shown(projection)} in vision_cfg; valid: "
            f"{', '.join(map(repr, POOLS))} and {', '.join(map(repr, PROJECTIONS))}"
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


def sizes_of(config: Config) -> dict[str, str]:
    """Return the sizes of a tower that OpenCLIP takes from the name of its architecture."""
    height, width = config.image_size
    return dict(
        images=f"{height} x {width} pixels", patch=str(getattr(config, "patch", 0)), outputs=str(config.classes)
    )


def tower_tensors(model: ViT, card: Card, trunk: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a tower for OpenCLIP. `trunk` and `vision` describe the file that it was loaded from.

    Raises WeightsError with the reason if OpenCLIP would build another network.
    """
    if (sizes := sizes_of(model.config)) != trunk.get("sizes"):
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
