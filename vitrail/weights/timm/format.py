"""timm's format: state dicts, and the hub's folders with a config.json, of its Vision Transformers and BiT ResNets.

It reads plain ViTs, DeiT (distilled) and DeiT-III, DINOv2, BEiT, registers, average and attention pooling, parallel
blocks, hybrids with a ResNet in front, AIMv2, networks with relative positions (relpos) and with rotary ones (DINOv3,
EVA-02, RoPE-ViT, PE), NaFlexViT, and BiT. It recognises them by the names and shapes of their tensors (`names.py`,
`relpos.py`, `eva.py`, `naflex.py`, `bit.py`). Whatever these do not show is read from config.json (`file.py`), or
assumed and reported. timm computes with the erf GELU, a LayerNorm epsilon of 1e-6 (DINOv3 and PE: 1e-5), and kernels
standardised by sqrt(var + 1e-8). It resamples positions with an antialiased bicubic kernel.

It writes a folder, or a bare state dict for a path that ends in .safetensors, .pth, .pt or .bin. A bare file describes
a model less completely than a folder. Before either is written, its names and shapes are read, and rejected if they
describe another model.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ResNetConfig, ViTConfig, flat
from vitrail.model.vit import ViT
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import check_finite, expected
from vitrail.weights.card import Card
from vitrail.weights.formats import (
    ForeignModel,
    foreign_tensors,
    origin_of,
    refuse_folder,
    state_of,
    write_folder,
    write_tensors,
)
from vitrail.weights.mapping import dense_biases, qkv_biases, without_stem_bias
from vitrail.weights.parts import first_reason, own_pool, without_place
from vitrail.weights.timm.bit import bit_conversions, bit_tensors, infer_bit, is_bit
from vitrail.weights.timm.config_json import bit_json, descriptive, vit_json
from vitrail.weights.timm.eva import eva_naming, eva_refusal
from vitrail.weights.timm.file import (
    BARE,
    CLIP_EPS,
    GROUP_NORM_EPS,
    NORM_EPS,
    class_names,
    is_deits_own,
    preprocessing,
    read_timm_file,
)
from vitrail.weights.timm.naflex import as_vit, is_naflex, naflex_entries, native
from vitrail.weights.timm.names import Naming, absent, conversions, is_aimv2
from vitrail.weights.timm.vit import infer, unused

HAS = "stem=resnet block=parallel positions=none positions=sincos positions=relative_bias sines cls_position"
HAS += " registers register_positions distilled tokenless unread pool=gap pool=map pool_prefix pre_logits layer_scale"
HAS += " mlp=swiglu gelu norm norm_eps patch_norm pre_norm norm_after qk_norm=head pooled_norm unnormed oblong"
"""The parts in `vitrail.weights.parts` that timm's Vision Transformers without rotary positions have."""

Tensors = dict[str, Tensor]


class Timm:
    """The format of timm."""

    name = "timm"

    def recognises(self, archive: Archive) -> bool:
        """See `Format.recognises`: a BiT ResNet, or a ViT under timm's names that is not the DeiT repository's own."""
        if is_bit(archive) or is_naflex(archive):
            return True
        attention = ("blocks.0.attn.", "blocks.0.attns.0.", "blocks.0.in_proj.")
        vit = any(name.startswith("patch_embed.") for name in archive.names)
        vit = vit and any(name.startswith(attention) for name in archive.names)
        return vit and not is_deits_own(archive)

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        file = read_timm_file(archive)
        naming: Naming | None = None
        config: ViTConfig | ResNetConfig
        origin: dict[str, Any] = {"format": self.name, "file": archive.path.name, "architecture": file.architecture}
        origin |= {"pretrained": descriptive(file.pretrained)}
        if is_bit(archive):
            config = infer_bit(file)
        else:
            file = as_vit(file) if is_naflex(archive) else file
            config, naming = infer(file)
            origin |= said_of_naming(naming, bool(config.origin.rotary))
        preprocess = preprocessing(file, config.image_size)
        if is_naflex(archive):
            assert isinstance(config, ViTConfig)
            config, preprocess = native(file, config, preprocess)
        card = Card(
            config,
            class_names=class_names(file, config.classes),
            preprocess=preprocess,
            source=self.name,
            licence=licence if isinstance(licence := file.pretrained.get("license"), str) else "",
            provenance={"origin": origin},
        )
        expected(config, archive.path)  # an error names the file if no network can be built from its config
        if naming is None or isinstance(config, ResNetConfig):
            assert isinstance(config, ResNetConfig)
            return ForeignModel(card, bit_conversions(config), unused(archive), {}, file.notes)
        for_config = partial(conversions, naming=naming) if naming.relpos in ("cr", "swin") else None
        entries, zeros = conversions(config, naming), absent(config, naming)
        if is_naflex(archive):
            entries = naflex_entries(entries, config.patch)
        return ForeignModel(card, entries, unused(archive), zeros, file.notes, for_config=for_config)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """Write a folder with config.json and model.safetensors, or a bare state dict if `path` has such an ending.

        Raises WeightsError with the reason if timm has no such model, or a bare file would describe another one.
        """
        if bare := path.suffix in BARE:
            refuse_folder(path, "model.safetensors")
        if isinstance(model, ResNet):
            tensors, values = bit_tensors(model), None if bare else bit_json(model.config, card)
        elif isinstance(model, ViT):
            tensors, values = _vit(model, card, bare)
        else:
            raise WeightsError(f"timm's format is for a ViT or a ResNet, not a {type(model).__name__}")
        for name, tensor in tensors.items():
            check_finite(name, tensor, f"the model is not saved to {path}")
        if values is None:
            write_tensors(path, tensors)
        else:
            write_folder(path, tensors, {"config.json": values})


FORMAT = Timm()


def vit_tensors(model: ViT, card: Card) -> Tensors:
    """Return a ViT's tensors under timm's names. Raises WeightsError with the reason if timm cannot express it."""
    return _vit(model, card, bare=False)[0]


def _vit(model: ViT, card: Card, bare: bool) -> tuple[Tensors, dict[str, Any] | None]:
    if reason := eva_refusal(model.config) if model.config.origin.rotary else vit_refusal(model.config, bare):
        raise WeightsError(f"timm cannot express this ViT: {reason}")
    config, state = _folded(model)
    state = without_stem_bias(state, config) if config.origin.pre_norm else state
    naming = naming_of(config, card, state)
    missing = absent(config, naming)
    state = {name: tensor for name, tensor in state.items() if name not in missing}
    tensors = foreign_tensors(state, conversions(config, naming), "timm")
    values = None if bare else vit_json(config, card, naming)
    _check_meaning(tensors, values, config)
    return tensors, values


def _any(state: Tensors, names: list[str]) -> bool:
    """Return whether any of these tensors has values other than zero."""
    return any(bool(state[name].any()) for name in names)


def _folded(model: ViT) -> tuple[ViTConfig, Tensors]:
    """Return config and tensors of an equivalent model that timm can express.

    In timm, either all tokens in front of the grid have positions or none has. If only some have one, it is added to
    the token, as the model would do. A fixed table of sines becomes a learned one.
    """
    config, state = model.config, state_of(model)
    if config.positions == "sincos":
        table = model.positions.table(0, config.grid)
        assert table is not None
        state["positions.embedding"] = table.detach().cpu().clone()
        return replace(config, positions="1d", cls_position=False), state
    if config.positions != "1d" or config.front in (0, config.prefix):
        return config, state
    first = (config.has_class_token + config.origin.distilled) * config.cls_position
    table = state["positions.embedding"]
    for name, own in (("cls", table[:, :first]), ("registers", table[:, first : config.front])):
        if own.shape[1]:
            state[name] = state[name] + own
    state["positions.embedding"] = table[:, config.front :].clone()
    return config.changed(cls_position=False, register_positions=False), state


def said_of_naming(naming: Naming, rotary: bool) -> dict[str, Any]:
    """Return a naming as entries of a card's origin, which `naming_of` reads."""
    if rotary:
        return {"layout": dict(apart=naming.apart, bias=naming.bias, gate_apart=naming.gate_apart)}
    values = {"beit": naming.beit, "qkv_bias": naming.bias, "dense_bias": naming.dense_bias}
    return values | ({"relpos": True} if naming.relpos else {})


def naming_of(config: ViTConfig, card: Card, state: Tensors) -> Naming:
    """Return the naming of the file that the model was loaded from, if it still fits."""
    origin, biases = origin_of(card, "timm"), _any(state, qkv_biases(config))
    if config.origin.rotary:
        return eva_naming(config, origin.get("layout", {}), biases)
    relative = config.positions == "relative_bias"
    relpos = relative and (bool(origin.get("relpos")) or config.origin.norm_after or not fits_beit(config))
    beit = not relpos and (relative or (bool(origin.get("beit")) and fits_beit(config)))
    return Naming(
        beit,
        biases or bool(origin.get("qkv_bias", True)),
        _any(state, dense_biases(config)) or bool(origin.get("dense_bias", True)),
        "table" if relpos else "",
        gate_apart=is_aimv2(config),
    )


def _check_meaning(tensors: Tensors, values: dict[str, Any] | None, config: ViTConfig) -> None:
    """Raise WeightsError if vitrail would read another model from these tensors and this config.json."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config_json = json.loads(json.dumps(values or {}))
    archive = Archive(Path("this model"), "safetensors", shapes, tensors.__getitem__, config=config_json)
    folder = ". Save to a folder, which has a config.json" if values is None else ""
    try:
        read = _meaning(infer(read_timm_file(archive))[0])
    except WeightsError as error:
        raise WeightsError(f"the file would not describe its model: {str(error).rstrip('.')}{folder}") from error
    meant = _meaning(config)
    wrong = [f"{name} {read[name]!r}, not {value!r}" for name, value in meant.items() if read[name] != value]
    if wrong:
        raise WeightsError(f"timm's names and shapes would describe a model with {', '.join(wrong)}{folder}")


def _meaning(config: ViTConfig) -> dict[str, Any]:
    """Return the values of a config that affect the logits of a preprocessed image."""
    plain = ("width", "depth", "heads", "mlp_dim", "patch", "image_size", "channels", "classes", "stem", "stem_units")
    tokens = ("has_class_token", "distilled", "registers")
    rest = ("norm_after", "pre_norm", "block", "branches", "mlp", "positions", "pool", "final_norm", "pre_logits")
    inner = ("mlp_norm", "attention_norm", "qk_norm", "rotary", "norm", "patch_norm")
    values = flat(config) | {"has_class_token": config.has_class_token}
    return {name: values[name] for name in (*plain, *tokens, *rest, *inner)} | dict(
        own_pool=own_pool(config),
        pool_prefix=config.origin.pool_prefix and config.prefix > 0,
        norm_eps=config.origin.norm_eps if config.origin.rotary else None,
        layer_scale=config.layer_scale is not None,
        gelu=config.origin.gelu if config.origin.mlp == "gelu" else None,
        front=config.front if config.positions == "1d" else None,
        shared=config.positions == "relative_bias" and config.place == "shared",
    )


def fits_beit(config: ViTConfig) -> bool:
    """Return whether timm's BEiT can express this model, apart from its positions."""
    plain = (config.stem, config.block) == ("linear", "sequential")
    plain = plain and (config.origin.mlp, config.origin.gelu) == ("gelu", "erf")
    plain = plain and config.origin.qk_norm == "none"
    return plain and config.has_class_token and config.prefix == 1 and config.pool in ("cls", "gap")


def fits_relpos(config: ViTConfig) -> bool:
    """Return whether timm's relpos networks can express this model, apart from its positions."""
    plain = (config.stem, config.block) == ("linear", "sequential")
    plain = plain and (config.origin.mlp, config.origin.gelu) == ("gelu", "erf")
    plain = plain and not config.origin.pre_norm and config.origin.final_norm != "none"
    return plain and config.prefix == config.has_class_token and config.pool in ("cls", "gap")


def _read_as_square(config: ViTConfig) -> bool:
    """Return whether timm takes the tables of relative positions of a grid for those of a square one."""
    (rows, columns), offsets = config.grid, math.prod(2 * side - 1 for side in config.grid)
    return rows != columns and math.isqrt(offsets) ** 2 == offsets


def vit_refusal(config: ViTConfig, bare: bool) -> str:
    """Return why timm cannot express this ViT, "" if it can. `bare`: there is no config.json."""
    if part := without_place(config, HAS):
        return f"it has {part}"
    origin, hybrid, relative = config.origin, config.stem == "resnet", config.positions == "relative_bias"
    gated = origin.mlp == "swiglu"
    special = {
        "a ResNet stem": hybrid,
        "a distillation token": origin.distilled,
        "parallel blocks": config.block == "parallel",
        "gated MLPs": gated and not is_aimv2(config),
        "RMSNorm and a norm of the patches": is_aimv2(config),
        "BEiT's positions": relative and not fits_relpos(config),
        "a norm before the first block": origin.pre_norm,
        "norms behind attention and MLP": origin.norm_after,
    }
    together = " together with ".join(name for name, there in special.items() if there)
    kernels, eps = config.std_conv, config.group_norm_eps
    norm_eps = CLIP_EPS if origin.pre_norm or is_aimv2(config) else NORM_EPS
    like_deit = config.positions == "1d" and config.cls_position and not config.registers
    checks = {
        "it has RMSNorm or a norm of the patches, but not both with gated MLPs, as AIMv2": (
            origin.norm == "rms" or origin.patch_norm
        )
        and not is_aimv2(config),
        f"its LayerNorm has the epsilon {origin.norm_eps}, timm's {norm_eps}": origin.norm_eps != norm_eps,
        "it has LayerScale and norms behind attention and MLP": origin.norm_after and config.layer_scale is not None,
        f"its stem standardises kernels as {kernels!r} and has the GroupNorm epsilon {eps}; timm's are 'timm' and "
        f"{GROUP_NORM_EPS}": hybrid and (kernels, eps) != ("timm", GROUP_NORM_EPS),
        f"its ResNet starts with {config.stem_width} features, timm's with 64": hybrid and config.stem_width != 64,
        f"it has {together}": sum(special.values()) > 1,
        "its attention pooling comes after gated MLPs": gated and config.pool == "map",
        "its distillation token has no learned position, registers beside it, or no norm": origin.distilled
        and not (like_deit and origin.final_norm == "tokens"),
        "its positions are those of BEiT and of timm's relpos networks, but neither has all of its other parts": (
            relative and not (fits_beit(config) or fits_relpos(config))
        ),
        f"timm would take its positions for a grid of {config.grid[0]} x {config.grid[1]} for those of a square grid, "
        "because a square grid has as many offsets": relative and _read_as_square(config),
        f"it has {config.branches} branches in a block; timm's architectures have 2 (to save the tensors alone, give a "
        "path that ends in .safetensors)": config.branches > 2 and not bare,
        "it has a pre-logits layer, which current versions of timm lack (to save the tensors under the names of older "
        "versions, give a path that ends in .safetensors)": config.pre_logits is not None and not bare,
    }
    return first_reason(checks)
