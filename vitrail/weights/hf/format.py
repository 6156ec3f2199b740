"""transformers' folders: ViT, DeiT, BEiT, ViT-MAE and DINOv2, with what `config.json` says about them.

A folder holds `config.json`, `model.safetensors` (or `pytorch_model.bin`) and `preprocessor_config.json`. A bare
state dict is read too, with transformers' defaults for what only config.json would say. Parts that no
prediction depends on are not read: mask tokens and decoders of masked pre-training, and a pooler beside a classifier.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import WeightsError, did_you_mean
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, foreign_tensors, origin_of, state_of, write_tensors
from vitrail.weights.hf.beit import Beit
from vitrail.weights.hf.config import class_names, infer, to_json
from vitrail.weights.hf.dinov2 import DinoV2, DinoV2WithRegisters
from vitrail.weights.hf.family import STEM, Family, Layout, refusal_of_all
from vitrail.weights.hf.processor import Processing, read_processor, write_processor
from vitrail.weights.hf.vit import MAE, DeiT

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (Family(), DeiT(), MAE(), Beit(), DinoV2(), DinoV2WithRegisters())
}
PREFIXES = ("", *sorted({family.prefix for family in FAMILIES.values()}))


@dataclass(frozen=True)
class HuggingFace:
    """The format of transformers."""

    name: str = "hf"

    def recognises(self, archive: Archive) -> bool:
        """Its patch embedding, or a config.json with a `model_type` (timm's has an `architecture`)."""
        named = any(f"{prefix}{STEM}.weight" in archive for prefix in PREFIXES)
        return named or ("model_type" in archive.config and "architecture" not in archive.config)

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        family, layout = _layout(archive)
        values, notes = infer(archive, family, layout)
        processing = _processing(archive, family, values)
        config = ViTConfig(**values, mean=processing.mean, std=processing.std)
        origin: dict[str, Any] = dict(format=self.name, file=str(archive.path), architecture=layout.architecture)
        origin["layout"] = asdict(layout)
        origin["config"] = {name: v for name, v in archive.config.items() if name not in ("id2label", "label2id")}
        origin["processor"] = dict(archive.processor)
        card = Card(
            config,
            class_names=class_names(archive, config.classes),
            preprocess=processing.preprocess,
            source=self.name,
            provenance={"origin": origin},
        )
        conversions = family.conversions(config, layout)
        used = {name for entry in conversions for name in entry.theirs}
        unused = {name: why for name in sorted(archive.names - used) if (why := _unused(family, name))}
        zeros = {} if layout.qkv_bias else dict.fromkeys(_biases(config), "no bias of queries, keys and values")
        return ForeignModel(card, conversions, unused, zeros, [*notes, *processing.notes])

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the folder `path`. Raises WeightsError where transformers has no model like this."""
        family, layout = _target(model, card)
        config = model.config
        assert isinstance(config, ViTConfig)
        tensors = _tensors(model, family, layout)
        kinds = {tensor.dtype for tensor in tensors.values()}
        dtype = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
        if path.exists() and not path.is_dir():
            raise WeightsError(f"{path} is a file; this format is a folder: give its name")
        path.mkdir(parents=True, exist_ok=True)
        texts = {
            "config.json": to_json(config, card, family, layout, dtype),
            "preprocessor_config.json": _processor(card, config),
        }
        write_tensors(path / "model.safetensors", tensors)
        for name, values in texts.items():
            (path / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


FORMAT = HuggingFace()


def _layout(archive: Archive) -> tuple[Family, Layout]:
    """Return the family and the naming of an archive. Raises WeightsError for another kind of model."""
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}{STEM}.weight" in archive), None)
    kind = archive.config.get("model_type")
    if prefix is None and kind in FAMILIES:
        expected = f"{FAMILIES[kind].prefix}{STEM}.weight"
        raise WeightsError(f"{archive.path} lacks the tensor {expected!r}.{did_you_mean(expected, archive.names)}")
    kind = kind or _guess(archive, prefix or "")
    if kind not in FAMILIES:
        raise WeightsError(
            f"{archive.path} is a model of type {kind!r} (config.json), which vitrail does not have."
            f"{did_you_mean(str(kind), FAMILIES)} Valid: {', '.join(FAMILIES)}"
        )
    family, prefix = FAMILIES[kind], prefix or ""
    query = f"{prefix}encoder.layer.0.attention.attention.query"
    disk = f"{query}.weight" in archive
    layout = Layout(kind, "", prefix, disk, family.final_norm(archive, prefix))
    query = query if disk else f"{family.layers(layout)}.0.{family.parts(layout)['query']}"
    named = archive.config.get("architectures") or [
        family.classifier if "classifier.weight" in archive else family.bare
    ]
    return family, replace(layout, architecture=str(named[0]), qkv_bias=f"{query}.bias" in archive)


def _guess(archive: Archive, prefix: str) -> str:
    """Return the `model_type` of a bare state dict, recognised by the tensors that only one family has."""
    layer = (
        f"{prefix}encoder.layer.0"
        if f"{prefix}encoder.layer.0.layernorm_before.weight" in archive
        else f"{prefix}layers.0"
    )
    signs = {
        "dinov2_with_registers": f"{prefix}embeddings.register_tokens",
        "dinov2": f"{prefix}encoder.layer.0.layer_scale1.lambda1",
        "deit": f"{prefix}embeddings.distillation_token",
        "vit_mae": "decoder.decoder_embed.weight",
        "beit": f"{layer}.lambda_1",
    }
    found = next((kind for kind, name in signs.items() if name in archive), None)
    named = {family.prefix: kind for kind, family in FAMILIES.items() if kind != "vit_mae" and family.prefix}
    return found or named.get(prefix, "vit")


def _processing(archive: Archive, family: Family, values: dict[str, Any]) -> Processing:
    """Return the preprocessing of an archive; if no file describes it, that of the family's published models."""
    image_size, channels = values["image_size"], values["channels"]
    if archive.processor:
        processing = read_processor(archive.processor, image_size, str(archive.path))
    else:
        preprocess, (mean, std) = family.preprocess(image_size, values["patch"])
        note = f"the preprocessing of published models of type {family.model_type}: no preprocessor_config.json"
        processing = Processing(preprocess, mean, std, [note])
    for name in ("mean", "std"):
        numbers = getattr(processing, name)
        if len(numbers) not in (1, channels) and len(set(numbers)) > 1:
            average = sum(numbers) / len(numbers)
            processing.notes.append(f"{name} {average:.4g} for each of {channels} channels: {len(numbers)} are given")
            setattr(processing, name, (average,))
    return processing


def _unused(family: Family, name: str) -> str:
    """Return why the model does not use a tensor, "" if there is no reason."""
    return next((why for pattern, why in family.unused if re.fullmatch(pattern, name)), "")


def _biases(config: ViTConfig) -> list[str]:
    return [f"blocks.{layer}.attentions.0.attention.qkv.bias" for layer in range(config.depth)]


def _target(model: nn.Module, card: Card) -> tuple[Family, Layout]:
    """Return the family that can express a model, preferring its own, and its naming. Raises WeightsError."""
    config = model.config
    if not isinstance(config, ViTConfig):
        raise WeightsError("format 'hf' has no place for this model: it is a ResNet; save it as 'timm' or 'bit'")
    if reason := refusal_of_all(config):
        raise WeightsError(f"format 'hf' has no place for this model: {reason}")
    origin = origin_of(card, "hf")
    kept = Layout(**origin["layout"]) if "layout" in origin else None
    family = FAMILIES[kept.model_type] if kept else FAMILIES[_choose(config)]
    if kept and family.refusal(config):  # the model has changed since it was loaded
        kept, family = None, FAMILIES[_choose(config)]
    if reason := family.refusal(config):
        raise WeightsError(f"format 'hf' has no place for this model: {reason}")
    layout = family.layout(config)
    if kept:
        if not layout.prefix:  # a bare encoder may have been saved with a head that vitrail does not read
            prefix = kept.prefix if kept.prefix in ("", family.prefix) else ""
            same_place = kept.norm.endswith("pooler.layernorm") == layout.norm.endswith("pooler.layernorm")
            layout = replace(layout, prefix=prefix, norm=kept.norm if same_place else f"{prefix}{layout.norm}")
        biased = any(bool(model.get_parameter(name).any()) for name in _biases(config))
        layout = replace(layout, disk=kept.disk, qkv_bias=kept.qkv_bias or biased)
    return family, layout


def _choose(config: ViTConfig) -> str:
    """Return the `model_type` that is most likely to express a config."""
    if config.distilled or (config.registers and config.register_positions):
        return "deit"
    if config.registers:
        return "dinov2_with_registers"
    if config.pool == "cls+gap" or config.mlp == "swiglu":
        return "dinov2"
    if config.pool == "gap" or config.positions in ("relative_bias", "none"):
        return "beit"
    if config.layer_scale is not None:
        return "beit" if config.classes else "dinov2"
    return "vit"


def _tensors(model: nn.Module, family: Family, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a file. Raises WeightsError for a tensor of the model that would be left out."""
    config = model.config
    assert isinstance(config, ViTConfig)
    conversions = family.conversions(config, layout)
    absent = () if layout.qkv_bias else _biases(config)
    state = {ours: tensor for ours, tensor in state_of(model).items() if ours not in absent}
    return family.invented(config, layout) | foreign_tensors(state, conversions, "hf")


def _processor(card: Card, config: ViTConfig) -> dict[str, Any]:
    """Return preprocessor_config.json: the one the model was loaded with, if it still agrees with the card."""
    found = origin_of(card, "hf").get("processor")
    if found:
        processing = read_processor(found, config.image_size, "the model's card")
        if (processing.preprocess, processing.mean, processing.std) == (card.preprocess, config.mean, config.std):
            return dict(found)
    return write_processor(card.preprocess, config)
