"""torchvision's ViTs: a plain `state_dict()`, which contains neither the number of heads nor the preprocessing.

| theirs | ours |
|---|---|
| `conv_proj`, `class_token`, `encoder.pos_embedding` | stem, class token, positions |
| `encoder.layers.encoder_layer_I.{ln_1, self_attention, ln_2, mlp}` | the branches of block I |
| `encoder.ln`, `heads.pre_logits`, `heads.head` | norm, pre-logits, head |

Files written before 2022 have `mlp.linear_1` and `mlp.linear_2` for `mlp.0` and `mlp.3`; torchvision reads both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, refuse_folder, state_of, write_tensors
from vitrail.weights.mapping import (
    Conversion,
    first_reason,
    imagenet_statistics,
    rows,
    same,
    same_pair,
    shape_of,
    special_parts,
    square_side,
    stem_sizes,
    usual_heads,
)

POSITIONS = "encoder.pos_embedding"
NEW, OLD = ("0", "3"), ("linear_1", "linear_2")
"""Names of the two dense layers of an MLP."""

# width, patch, image size -> size before the crop, if it is not 256
_RESIZED = {(1024, 16, 224): 242, (1280, 14, 224): 224}


@dataclass(frozen=True)
class Torchvision:
    """The format of torchvision's `VisionTransformer`."""

    name: str = "torchvision"

    def recognises(self, archive: Archive) -> bool:
        """Return whether the class token and the positions have the names that only torchvision uses."""
        return {"class_token", POSITIONS} <= archive.names

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        old = f"{_layer(0)}.mlp.{OLD[0]}.weight" in archive
        config, notes = _config(archive, OLD if old else NEW)
        preprocess, note = _preprocess(config)
        origin: dict[str, Any] = dict(format=self.name, file=str(archive.path), mlp=list(OLD if old else NEW))
        card = Card(config, preprocess=preprocess, source=self.name, provenance={"origin": origin})
        return ForeignModel(card, conversions(config, OLD if old else NEW), assumptions=[*notes, note])

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write a state dict with `torch.save`, or a safetensors file if `path` ends in .safetensors.

        Raises WeightsError.
        """
        config = model.config
        if reason := _refusal(config):
            raise WeightsError(f"format 'torchvision' has no place for this model: {reason}")
        assert isinstance(config, ViTConfig)
        refuse_folder(path, "vit.pth")
        first, second = OLD if origin_of(card, self.name).get("mlp") == list(OLD) else NEW
        write_tensors(path, foreign_tensors(state_of(model), conversions(config, (first, second)), self.name))


FORMAT = Torchvision()


def conversions(config: ViTConfig, mlp: tuple[str, str] = NEW) -> list[Conversion]:
    """Return the conversions of all tensors of a model to torchvision's names; `mlp` names the dense layers."""
    found = [
        *same_pair("stem", "conv_proj"),
        same("cls", "class_token"),
        same("positions.embedding", POSITIONS),
        *same_pair("norm", "encoder.ln"),
    ]
    for layer in range(config.depth):
        theirs, attention, dense = _layer(layer), f"blocks.{layer}.attentions.0", f"blocks.{layer}.mlps.0"
        found += [
            *same_pair(f"{attention}.norm", f"{theirs}.ln_1"),
            same(f"{attention}.attention.qkv.weight", f"{theirs}.self_attention.in_proj_weight"),
            same(f"{attention}.attention.qkv.bias", f"{theirs}.self_attention.in_proj_bias"),
            *same_pair(f"{attention}.attention.out", f"{theirs}.self_attention.out_proj"),
            *same_pair(f"{dense}.norm", f"{theirs}.ln_2"),
            *same_pair(f"{dense}.mlp.fc1", f"{theirs}.mlp.{mlp[0]}"),
            *same_pair(f"{dense}.mlp.fc2", f"{theirs}.mlp.{mlp[1]}"),
        ]
    if config.pre_logits:
        found += same_pair("pre_logits.hidden", "heads.pre_logits")
    return found + (same_pair("head", "heads.head") if config.classes else [])


def _layer(index: int) -> str:
    return f"encoder.layers.encoder_layer_{index}"


def _config(archive: Archive, mlp: tuple[str, str]) -> tuple[ViTConfig, list[str]]:
    """Return the config of the model in a file, and the assumptions made."""
    if "conv_proj.conv_last.weight" in archive:
        raise WeightsError(
            f"{archive.path} has torchvision's convolutional stem ('conv_proj.conv_last.weight'). No tensor shows its "
            "strides, so only the linear stem of torchvision's published models is supported."
        )
    width, channels, patch = stem_sizes(archive, "conv_proj.weight")
    side = square_side(archive, POSITIONS, shape_of(archive, POSITIONS, 3)[1] - 1) * patch
    heads, sentence = usual_heads(archive, width)
    depth = 0
    while f"{_layer(depth)}.ln_1.weight" in archive:
        depth += 1
    config = ViTConfig(
        width=width,
        depth=depth,
        heads=heads,
        mlp_dim=shape_of(archive, f"{_layer(0)}.mlp.{mlp[0]}.weight", 2)[0],
        patch=patch,
        image_size=(side, side),
        channels=channels,
        classes=rows(archive, "heads.head.weight"),
        pre_logits=rows(archive, "heads.pre_logits.weight") or None,
        resize_mode="torchvision",
        norm_eps=1e-6,
        gelu="erf",
        **imagenet_statistics(channels),  # type: ignore[arg-type]
    )
    return config, [sentence]


def _preprocess(config: ViTConfig) -> tuple[Preprocess, str]:
    """Return the preprocessing of torchvision's published weights of this size, and a note for the load report."""
    size = config.image_size[0]
    end_to_end = size > 224  # SWAG's models were fine-tuned at 384, 512 or 518 px without a crop
    resized = size if end_to_end else _RESIZED.get((config.width, config.patch, size), round(size / 0.875))
    bicubic = end_to_end or resized == size
    preprocess = Preprocess((size, size), "small", size / resized, "bicubic" if bicubic else "bilinear")
    note = (
        f"preprocessing of torchvision's published weights of this size, because the file contains none: short side to "
        f"{resized}, centre of {size}, {preprocess.interpolation}, ImageNet's mean and std"
    )
    return preprocess, note


def _refusal(config: object) -> str:
    """Return why torchvision cannot express this model, "" if it can."""
    if not isinstance(config, ViTConfig):
        return "it is a ResNet"
    height, width = config.image_size
    reasons = {
        f"stem {config.stem!r}": config.stem != "linear",
        f"{config.channels} channels: its models take 3": config.channels != 3,
        f"{config.block} blocks": config.block != "sequential",
        f"positions {config.positions!r} at place {config.place!r}": (config.positions, config.place)
        != ("1d", "input"),
        "a class token without a position": not config.cls_position,
        f"pool {config.pool!r}": config.pool != "cls",
        "a distillation token": config.distilled,
        "registers": bool(config.registers),
        "LayerScale": config.layer_scale is not None,
        f"an MLP with {config.mlp}": config.mlp != "gelu",
        f"GELU of kind {config.gelu!r}: its models have erf": config.gelu != "erf",
        f"LayerNorm epsilon {config.norm_eps:g}: its models have 1e-06": config.norm_eps != 1e-6,
        f"images of {height} x {width} pixels, which are not square": height != width,
        "a pre-logits layer without a classifier": bool(config.pre_logits and not config.classes),
        **special_parts(config),
    }
    return first_reason(reasons)
