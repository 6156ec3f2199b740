"""timm's format: state dicts, and the hub's folders with a config.json, of its Vision Transformers and BiT ResNets.

Plain, distilled (DeiT), with registers or average or attention pooling, DeiT-III, DINOv2, BEiT, parallel blocks,
hybrids with a ResNet in front, and BiT: all recognised by the names and shapes of their tensors (`names.py`,
`bit.py`). What those do not say is read from config.json (`read_config.py`), or is assumed and reported.
timm computes with the erf GELU, a LayerNorm epsilon of 1e-6, and kernels standardised by sqrt(var + 1e-8). It
resamples positions with an antialiased bicubic kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.formats import ForeignModel
from vitrail.weights.timm.bit import USUAL, bit_conversions, infer_bit, is_bit
from vitrail.weights.timm.names import TABLE, conversions, qkv_biases
from vitrail.weights.timm.read_config import class_names, is_timms, preprocessing, read_timm_config
from vitrail.weights.timm.vit import infer, unused, usual
from vitrail.weights.timm.write import write_timm
from vitrail.weights.timm.write_config import kept_pretrained

_DEIT = {"blocks.0.gamma_1", "blocks.0.norm11.weight", "patch_embed.proj.0.weight"}
"""What the DeiT repository's later files have, and of timm's BEiT and its like."""


@dataclass(frozen=True)
class Timm:
    """See the module."""

    name: str = "timm"

    def recognises(self, archive: Archive) -> bool:
        """Blocks or a BiT ResNet under timm's names; unless a config.json is timm's, not the DeiT repository's own."""
        if is_bit(archive):
            return True
        attention = ("blocks.0.attn.", "blocks.0.attns.0.", "blocks.0.in_proj.")
        vit = any(name.startswith("patch_embed.") for name in archive.names)
        vit = vit and any(name.startswith(attention) for name in archive.names)
        beit = any(name.endswith((TABLE, ".q_bias", ".v_bias")) for name in archive.names)
        return vit and (beit or is_timms(archive) or archive.names.isdisjoint(_DEIT))

    def find(self, archive: Archive) -> ForeignModel:
        """See `Format.find`."""
        hub = read_timm_config(archive)
        notes: list[str] = []
        zeros: dict[str, str] = {}
        config: ViTConfig | ResNetConfig
        origin: dict[str, Any] = {"format": self.name, "file": archive.path.name, "architecture": hub.architecture}
        origin |= {"pretrained": kept_pretrained(hub.pretrained)}
        if is_bit(archive):
            config = resnet = infer_bit(archive, hub, notes)
            found, common = bit_conversions(resnet), USUAL
        else:
            vit, naming = infer(archive, hub, notes)
            config, found, common = vit, conversions(vit, naming), usual(archive)
            if not naming.qkv_bias:
                zeros = dict.fromkeys(qkv_biases(vit), "no bias of queries, keys and values")
            origin |= {"beit": naming.beit, "qkv_bias": naming.qkv_bias}
        card = Card(
            config,
            class_names=class_names(hub, config.classes, notes),
            preprocess=preprocessing(hub, config.image_size, common, notes),
            source=self.name,
            licence=str(hub.pretrained.get("license") or ""),
            provenance={"origin": origin},
        )
        return ForeignModel(card, found, unused(archive), zeros, notes)

    def write(self, model: nn.Module, card: Card, path: Path) -> None:
        """See `write_timm`."""
        write_timm(model, card, path)


FORMAT = Timm()
