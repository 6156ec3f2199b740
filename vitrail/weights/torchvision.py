"""torchvision's ViTs: a plain `state_dict()`, which contains neither the number of heads nor the preprocessing.

Files written before 2022 have `mlp.linear_1` and `mlp.linear_2` for `mlp.0` and `mlp.3`; torchvision reads both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, refuse_folder, state_of, write_tensors
from vitrail.weights.mapping import (
    apply_table,
    count,
    grid_of,
    imagenet_statistics,
    row_count,
    shape_of,
    stem_sizes,
    untold_heads,
    usual_heads,
    within,
)
from vitrail.weights.parts import first_reason, without_place

POSITIONS = "encoder.pos_embedding"
NEW, OLD = ("0", "3"), ("linear_1", "linear_2")
"""Names of the two dense layers of an MLP."""

_BLOCK = "encoder.layers.encoder_layer_{layer}."
_FIRST = _BLOCK.format(layer=0)
TABLE = {
    "stem.{part}": "conv_proj.{part}",
    "cls": "class_token",
    "positions.embedding": POSITIONS,
    **within(
        "blocks.{layer}.",
        _BLOCK,
        {
            "attentions.0.norm.{part}": "ln_1.{part}",
            "attentions.0.attention.qkv.{part}": "self_attention.in_proj_{part}",
            "attentions.0.attention.out.{part}": "self_attention.out_proj.{part}",
            "mlps.0.norm.{part}": "ln_2.{part}",
            "mlps.0.mlp.fc1.{part}": "mlp.{fc1}.{part}",
            "mlps.0.mlp.fc2.{part}": "mlp.{fc2}.{part}",
        },
    ),
    "norm.{part}": "encoder.ln.{part}",
    "pre_logits.hidden.{part}": "heads.pre_logits.{part}",
    "head.{part}": "heads.head.{part}",
}
"""Name in the model -> name in the file, where {fc1} and {fc2} are `NEW` or `OLD`."""

HAS = "pre_logits pooled_norm"
"""The parts in `vitrail.weights.parts` that torchvision's models have."""

# width, patch, image size -> size before the crop, if it is not 256
_RESIZED = {(1024, 16, 224): 242, (1280, 14, 224): 224}


class Torchvision:
    """The format of torchvision's `VisionTransformer`."""

    name = "torchvision"

    def recognises(self, archive: Archive) -> bool:
        """Return whether the class token and the positions have the names that only torchvision uses."""
        return {"class_token", POSITIONS} <= archive.names

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        mlp = OLD if f"{_FIRST}mlp.{OLD[0]}.weight" in archive else NEW
        config, notes = _config(archive, mlp)
        preprocess, note = _preprocess(config)
        origin: dict[str, Any] = dict(format=self.name, file=str(archive.path), mlp=list(mlp))
        card = Card(config, preprocess=preprocess, source=self.name, provenance={"origin": origin})
        entries = apply_table(expected(config, archive.path), TABLE, fc1=mlp[0], fc2=mlp[1])
        return ForeignModel(card, entries, assumptions=[*notes, note])

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write a state dict with `torch.save`, or a safetensors file if `path` ends in .safetensors.

        Raises WeightsError.
        """
        config = model.config
        if reason := _refusal(config):
            raise WeightsError(f"format 'torchvision' has no place for this model: {reason}")
        assert isinstance(config, ViTConfig)
        refuse_folder(path, "vit.pth")
        fc1, fc2 = OLD if origin_of(card, self.name).get("mlp") == list(OLD) else NEW
        state = state_of(model)
        write_tensors(path, foreign_tensors(state, apply_table(state, TABLE, fc1=fc1, fc2=fc2), self.name))


FORMAT = Torchvision()


def _config(archive: Archive, mlp: tuple[str, str]) -> tuple[ViTConfig, list[str]]:
    """Return the config of the model in a file, and the assumptions made."""
    if "conv_proj.conv_last.weight" in archive:
        raise WeightsError(
            f"{archive.path} has torchvision's convolutional stem ('conv_proj.conv_last.weight'). No tensor shows its "
            "strides, so only the linear stem of torchvision's published models is supported."
        )
    width, channels, patch = stem_sizes(archive, "conv_proj.weight")
    side = grid_of(archive, POSITIONS, shape_of(archive, POSITIONS, 3)[1], (1,))[0][0] * patch
    heads, sentence = usual_heads(archive, width)
    config = ViTConfig.of(
        width=width,
        depth=count(archive, "encoder.layers.encoder_layer_"),
        heads=heads,
        mlp_dim=shape_of(archive, f"{_FIRST}mlp.{mlp[0]}.weight", 2)[0],
        patch=patch,
        image_size=(side, side),
        channels=channels,
        classes=row_count(archive, "heads.head.weight"),
        pre_logits=row_count(archive, "heads.pre_logits.weight") or None,
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
    untold = untold_heads(config.width)
    reasons = {
        f"{config.channels} channels: its models take 3": config.channels != 3,
        "a pre-logits layer without a classifier": bool(config.pre_logits and not config.classes),
        f"its file does not say {untold}": bool(untold),
    }
    return without_place(config, HAS) or first_reason(reasons)
