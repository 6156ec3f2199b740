"""timm's format: state dicts, and the hub's folders with a config.json, of its Vision Transformers and BiT ResNets.

It reads plain ViTs, DeiT (distilled) and DeiT-III, DINOv2, BEiT, registers, average and attention pooling, parallel
blocks, hybrids with a ResNet in front, AIMv2, networks with relative positions (relpos) and with rotary ones (DINOv3,
EVA-02, RoPE-ViT, PE), and BiT. It recognises them by the names and shapes of their tensors (`names.py`, `relpos.py`,
`eva.py`, `bit.py`). Whatever these do not show is read from config.json (`file.py`), or assumed and reported. timm
computes with the erf GELU, a LayerNorm epsilon of 1e-6 (DINOv3 and PE: 1e-5), and kernels standardised by sqrt(var +
1e-8). It resamples positions with an antialiased bicubic kernel.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel
from vitrail.weights.timm.bit import bit_conversions, infer_bit, is_bit
from vitrail.weights.timm.config_json import descriptive
from vitrail.weights.timm.eva import infer_eva, is_rotary
from vitrail.weights.timm.file import class_names, has_timm_config, preprocessing, read_timm_file
from vitrail.weights.timm.names import EvaNaming, Naming, absent, conversions
from vitrail.weights.timm.relpos import TABLE
from vitrail.weights.timm.vit import infer, unused
from vitrail.weights.timm.write import write_timm

_DEIT = {"blocks.0.gamma_1", "blocks.0.norm11.weight", "patch_embed.proj.0.weight"}
"""Tensors in the DeiT repository's later files. Of timm's models, only BEiT and similar ones have such names."""


@dataclass(frozen=True)
class Timm:
    """The format of timm."""

    name: str = "timm"

    def recognises(self, archive: Archive) -> bool:
        """See `Format.recognises`: a BiT ResNet, or a ViT under timm's names that is not the DeiT repository's own."""
        if is_bit(archive):
            return True
        attention = ("blocks.0.attn.", "blocks.0.attns.0.", "blocks.0.in_proj.")
        vit = any(name.startswith("patch_embed.") for name in archive.names)
        vit = vit and any(name.startswith(attention) for name in archive.names)
        beit = any(name.endswith((TABLE, ".q_bias", ".v_bias")) for name in archive.names)
        rotary = "pos_embed" not in archive or "rope.freqs" in archive
        return vit and (beit or rotary or has_timm_config(archive) or archive.names.isdisjoint(_DEIT))

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        file = read_timm_file(archive)
        naming: Naming | EvaNaming | None = None
        config: ViTConfig | ResNetConfig
        origin: dict[str, Any] = {"format": self.name, "file": archive.path.name, "architecture": file.architecture}
        origin |= {"pretrained": descriptive(file.pretrained)}
        if is_bit(archive):
            config = infer_bit(file)
        elif is_rotary(archive, file.architecture):
            config, naming = infer_eva(file)
            origin["layout"] = asdict(naming)
        else:
            config, naming = infer(file)
            origin |= {"beit": naming.beit, "qkv_bias": naming.qkv_bias, "dense_bias": naming.dense_bias}
            origin |= {"relpos": True} if naming.relpos else {}
        card = Card(
            config,
            class_names=class_names(file, config.classes),
            preprocess=preprocessing(file, config.image_size),
            source=self.name,
            licence=licence if isinstance(licence := file.pretrained.get("license"), str) else "",
            provenance={"origin": origin},
        )
        expected(config, archive.path)  # an error names the file if no network can be built from its config
        if naming is None or isinstance(config, ResNetConfig):
            assert isinstance(config, ResNetConfig)
            return ForeignModel(card, bit_conversions(config), unused(archive), {}, file.notes)
        computed = isinstance(naming, Naming) and naming.relpos in ("cr", "swin")
        for_config = partial(conversions, naming=naming) if computed else None
        entries, zeros = conversions(config, naming), absent(config, naming)
        return ForeignModel(card, entries, unused(archive), zeros, file.notes, for_config=for_config)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """See `write_timm`."""
        write_timm(model, card, path)


FORMAT = Timm()
