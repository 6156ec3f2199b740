"""transformers' folders: ViT, DeiT, BEiT, CLIP, SigLIP, AIMv2, ViT-MAE, DINOv2 and DINOv3, with their `config.json`.

A folder holds `config.json`, `model.safetensors` (or `pytorch_model.bin`) and `preprocessor_config.json`. A bare
state dict is read too, with transformers' defaults in place of config.json. Parts that do not affect predictions are
not read: mask tokens and decoders of masked pre-training, and a pooler next to a classifier.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.config import merge
from vitrail.errors import UsageError, WeightsError, did_you_mean
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel, for_channels, foreign_tensors, origin_of, state_of, write_folder
from vitrail.weights.hf.config_json import class_names, infer, meaning, to_json
from vitrail.weights.hf.encoder import EVERY_HAS, QKV, STEM, Encoder
from vitrail.weights.hf.eomt import Eomt, EomtDinoV3
from vitrail.weights.hf.families import (
    MAE,
    MSN,
    Beit,
    Data2Vec,
    DeiT,
    DinoV2,
    DinoV2WithRegisters,
    DinoV3,
    IJepa,
    InternVL,
)
from vitrail.weights.hf.processor import Processing, read_processor, write_processor
from vitrail.weights.hf.towers import Aimv2, Clip, Siglip, Siglip2, tower
from vitrail.weights.mapping import text_in
from vitrail.weights.parts import without_place
from vitrail.words import shown

ENCODERS: dict[str, type[Encoder]] = {
    encoder.model_type: encoder
    for encoder in (
        *(Encoder, DeiT, MAE, MSN, DinoV2, DinoV2WithRegisters, Beit, Data2Vec),
        *(IJepa, Clip, Siglip, Siglip2, InternVL, DinoV3, Aimv2, Eomt, EomtDinoV3),
    )
}
"""`model_type` -> encoder. The first that can express a model is the one in which it is saved."""
ANY_HAS = " ".join((EVERY_HAS, *(encoder.has for encoder in ENCODERS.values())))
"""The parts in `vitrail.weights.parts` that some encoder has."""
PREFIXES = ("", *sorted({encoder.headed for encoder in ENCODERS.values()}))
STEMS = [f"{prefix}{stem}.weight" for prefix in PREFIXES for stem in (Encoder.stem, Clip.stem, DinoV3.stem, Aimv2.stem)]
TOWERS = {encoder.whole: kind for kind, encoder in ENCODERS.items() if issubclass(encoder, Clip)}
"""`model_type` of a model of images and texts -> that of its image tower."""
SIGNS = {
    "upscale_block.block.0.conv1.weight": "eomt",
    "encoder.layer.0.attention.projection_layer.weight": "internvl_vision",
    "layer.0.layer_scale1.lambda1": "dinov3_vit",
    "model.layer.0.layer_scale1.lambda1": "dinov3_vit",
    "embeddings.register_tokens": "dinov2_with_registers",
    "encoder.layer.0.layer_scale1.lambda1": "dinov2",
    "embeddings.distillation_token": "deit",
    "decoder.decoder_embed.weight": "vit_mae",
    "encoder.layer.0.lambda_1": "beit",
    "layers.0.lambda_1": "beit",
    "embeddings.rms_norm.weight": "aimv2_vision_model",
    "pre_layrnorm.weight": "clip_vision_model",
    "head.probe": "siglip_vision_model",
}
"""Tensor, with or without a prefix -> the only `model_type` that has it."""


class HuggingFace:
    """The format of transformers."""

    name = "hf"

    def recognises(self, archive: Archive) -> bool:
        """See `Format.recognises`: its patch embedding, or a config.json with a `model_type` and no `architecture`."""
        named = any(name in archive for name in STEMS)
        return named or ("model_type" in archive.config and "architecture" not in archive.config)

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        archive = tower(archive, TOWERS)
        encoder = _encoder(archive)
        values, notes = infer(archive, encoder)
        if archive.config.get("auto_map"):
            notes.append("code of the model's own (auto_map of config.json) is not run; it may compute something else")
        if not encoder.architecture.startswith(re.split("For|Vision|Model", encoder.bare())[0]):
            notes.append(
                f"read as a {encoder.model_type}, but its class {shown(encoder.architecture)} is not one of "
                "transformers' and may compute something else"
            )
        processing = _processing(archive, encoder, values)
        native = processing.preprocess.resize == "native"
        config = ViTConfig.of(**values, mean=processing.mean, std=processing.std, native=native)
        origin: dict[str, Any] = dict(format=self.name, file=str(archive.path), architecture=encoder.architecture)
        origin["layout"] = {"model_type": encoder.model_type, **asdict(encoder)}
        origin["config"] = {name: v for name, v in archive.config.items() if name not in ("id2label", "label2id")}
        origin["processor"] = dict(archive.processor)
        card = Card(
            config,
            class_names=class_names(archive, config.classes),
            **meaning(archive, config.classes, notes),
            preprocess=processing.preprocess,
            source=self.name,
            provenance={"origin": origin},
        )
        absent = _absent(encoder, config)
        names = [name for name in expected(config, archive.path) if name not in absent]
        conversions = encoder.conversions(names, config)
        others = sorted(archive.names - {name for entry in conversions for name in entry.theirs})
        unused = {name: why for pattern, why in encoder.unused for name in others if re.fullmatch(pattern, name)}
        zeros = dict.fromkeys(absent, "a bias that the file has not") | encoder.absent(config)
        differences = processing.notes if archive.processor else []
        return ForeignModel(card, conversions, unused, zeros, [*notes, *processing.notes], differences)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write the folder `path`. Raises WeightsError if transformers has no such model."""
        config = model.config
        if card.answers:
            raise WeightsError("format 'hf' cannot express several answers for an image; keep the folder of the model")
        if not isinstance(config, ViTConfig):
            raise WeightsError("format 'hf' cannot express this model: it is a ResNet; save it as 'timm' or 'bit'")
        encoder = _target(model, config, card)
        absent = _absent(encoder, config)
        state = {ours: tensor for ours, tensor in state_of(model).items() if ours not in absent}
        state = encoder.written(config, state)
        tensors = encoder.required(config) | foreign_tensors(state, encoder.conversions(state, config), "hf")
        kinds = {tensor.dtype for tensor in tensors.values()}
        dtype = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
        values = to_json(config, card, encoder, dtype)
        write_folder(path, tensors, {"config.json": values, "preprocessor_config.json": _processor(card, config)})


FORMAT = HuggingFace()


def _encoder(archive: Archive) -> Encoder:
    """Return the encoder of an archive. Raises WeightsError for another kind of model."""
    found = next((name for name in STEMS if name in archive), None)
    prefix = (found or STEM).partition("embeddings.")[0]
    sign = next((kind for name, kind in SIGNS.items() if not archive.names.isdisjoint({name, prefix + name})), None)
    headed = (kind for kind, encoder in ENCODERS.items() if encoder.headed == prefix)
    where = f"{archive.path}, config.json"
    kind = text_in(archive.config.get("model_type") or sign or next(headed, "vit"), "model_type", where)
    if kind not in ENCODERS:
        raise WeightsError(
            f"{archive.path} is a model of type {shown(kind)} (config.json), which vitrail does not have."
            f"{did_you_mean(kind, ENCODERS)} Valid: {', '.join(ENCODERS)}"
        )
    family = ENCODERS[kind]
    if found is None or f"{prefix}{family.stem}.weight" not in archive:
        expected = f"{family.headed if found is None else prefix}{family.stem}.weight"
        raise WeightsError(f"{archive.path} lacks the tensor {expected!r}.{did_you_mean(expected, archive.names)}")
    usual = family.classifier() if "classifier.weight" in archive else family.bare()
    architectures = archive.config.get("architectures") or [usual]
    first = architectures[0] if isinstance(architectures, list) else architectures
    architecture = text_in(first, "architectures", where)
    query = "encoder.layer.0.attention.attention.query.weight"
    loose = bool(prefix) and query in archive
    disk = loose or f"{prefix}{family.disk_sign}" in archive
    encoder = family(architecture, prefix, disk, family.final_norm(archive, prefix), loose=loose)
    qkv, mlp = (encoder.theirs(f"blocks.0.{name}.bias") in archive for name in (QKV, "mlps.0.mlp.fc2"))
    return replace(encoder, qkv_bias=qkv, mlp_bias=mlp)


def _processing(archive: Archive, encoder: Encoder, values: dict[str, Any]) -> Processing:
    """Return the preprocessing of an archive; if no file describes it, that of published models of its type."""
    image_size, channels = values["image_size"], values["channels"]
    if archive.processor:
        processing = read_processor(encoder.processor(archive.processor), image_size, str(archive.path))
    else:
        preprocess, (mean, std) = encoder.preprocess(image_size, values["patch"]), encoder.statistics
        note = (
            f"the preprocessing of published models of type {encoder.model_type}, because there is no "
            "preprocessor_config.json"
        )
        processing = Processing(preprocess, mean, std, [note])
    processing.mean = for_channels("mean", processing.mean, channels, processing.notes)
    processing.std = for_channels("std", processing.std, channels, processing.notes)
    return processing


def _absent(encoder: Encoder, config: ViTConfig) -> set[str]:
    """Return the names of the model's biases that the encoder's file has not."""
    fields = encoder.biases(config).items()
    return {name for field, names in fields if not getattr(encoder, field) for name in names}


def _target(model: nn.Module, config: ViTConfig, card: Card) -> Encoder:
    """Return the encoder that can express a model, preferring the one it was loaded from. Raises WeightsError."""
    origin = _origin(card)
    families = [type(origin), *ENCODERS.values()] if origin else list(ENCODERS.values())
    if part := without_place(config, ANY_HAS):
        raise WeightsError(f"format 'hf' cannot express this model: no encoder of transformers has {part}")
    refusals = {family: family.refusal(config) for family in families}
    family = next((family for family, reason in refusals.items() if not reason), None)
    if family is None:
        reasons = "; ".join(dict.fromkeys(refusals.values()))
        raise WeightsError(f"format 'hf' cannot express this model: {reasons}")
    encoder = family.of_model(config)
    if origin is None or family is not type(origin):  # the model may have changed since it was loaded
        return encoder
    if encoder.architecture == family.bare():  # it may have been saved with a head that vitrail does not read
        prefix = origin.prefix if origin.prefix in ("", family.headed) else ""
        same_place = origin.norm.endswith("pooler.layernorm") == encoder.norm.endswith("pooler.layernorm")
        encoder = replace(encoder, prefix=prefix, norm=origin.norm if same_place else f"{prefix}{encoder.norm}")
    there: dict[str, Any] = {
        field: getattr(origin, field) or any(bool(model.get_parameter(name).any()) for name in names)
        for field, names in encoder.biases(config).items()
    }
    return replace(encoder, disk=origin.disk, **there)


def _origin(card: Card) -> Encoder | None:
    """Return the encoder that a model was loaded from, None if it was not in this format. Raises WeightsError."""
    layout = dict(origin_of(card, "hf").get("layout", {}))
    if not layout:
        return None
    kind = text_in(layout.pop("model_type", None), "provenance.origin.layout.model_type", "the model's card")
    try:
        return merge(ENCODERS.get(kind, Encoder)(""), layout, "provenance.origin.layout")
    except UsageError as error:  # in a card rather than in a flag
        raise WeightsError(f"the model's card does not describe the file it comes from: {error}") from error


def _processor(card: Card, config: ViTConfig) -> dict[str, Any]:
    """Return preprocessor_config.json: the one the model was loaded with, if it still agrees with the card."""
    found = origin_of(card, "hf").get("processor")
    if found:
        processing = read_processor(found, config.image_size, "the model's card")
        if (processing.preprocess, processing.mean, processing.std) == (card.preprocess, config.mean, config.std):
            return dict(found)
    return write_processor(card.preprocess, config)
