"""Tiny networks of timm's with random weights, one of every kind, and how ours are compared with them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from block_outputs import block_outputs
from safetensors.torch import load_file
from timm.layers import StdConv2d
from timm.models import save_for_hf
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
TINY: dict[str, Any] = dict(embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, img_size=32, patch_size=8, num_classes=5)
HYBRID: dict[str, Any] = {name: value for name, value in TINY.items() if name not in ("patch_size", "img_size")}

PLAIN = "vit_base_patch16_224"
BEIT = "beit_base_patch16_224"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "not square": (PLAIN, dict(img_size=(24, 40))),
    "odd": (PLAIN, dict(embed_dim=35, num_heads=5, mlp_ratio=1.7, patch_size=7, img_size=21, depth=11)),
    "one channel": (PLAIN, dict(in_chans=1)),
    "no head": (PLAIN, dict(num_classes=0)),
    "tanh by argument": (PLAIN, dict(act_layer="gelu_tanh")),
    "no bias": (PLAIN, dict(qkv_bias=False)),
    "no positions": (PLAIN, dict(pos_embed="none")),
    "distilled": ("deit_base_distilled_patch16_224", {}),
    "distilled without heads": ("deit_base_distilled_patch16_224", dict(num_classes=0)),
    "registers with positions": (PLAIN, dict(reg_tokens=3)),
    "registers": (PLAIN, dict(reg_tokens=3, no_embed_class=True)),
    "registers alone": (PLAIN, dict(reg_tokens=2, class_token=False, global_pool="avg")),
    "average": (PLAIN, dict(class_token=False, global_pool="avg", fc_norm=False)),
    "average, pooled norm": (PLAIN, dict(global_pool="avg")),
    "average beside a class token": (PLAIN, dict(global_pool="avg", fc_norm=False)),
    "class token, pooled norm": (PLAIN, dict(fc_norm=True)),
    "DeiT-III": ("deit3_small_patch16_224", {}),
    "DINOv2": ("vit_small_patch14_dinov2", {}),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {}),
    "gated": ("vit_giant_patch14_reg4_dinov2", dict(mlp_ratio=3)),
    "attention pooling": ("vit_base_patch16_siglip_224", {}),
    "attention pooling with a class token": ("vit_base_patch16_siglip_224", dict(class_token=True, reg_tokens=1)),
    "tanh by name": ("vit_base_patch32_siglip_256", {}),
    "parallel": ("vit_small_patch16_18x2_224", {}),
    "CLIP": ("vit_base_patch32_clip_224", {}),
    "CLIP, quick GELU": ("vit_base_patch16_clip_quickgelu_224", {}),
    "CLIP, average": ("vit_base_patch16_clip_224", dict(global_pool="avg", act_layer="gelu_tanh")),
    "InternViT": ("vit_intern300m_patch14_448", {}),
    "RADIO": ("vit_base_patch16_radio_v3", {}),
    "rpn": ("vit_base_patch16_rpn_224", {}),
    "EVA-02, E": ("eva02_enormous_patch14_clip_224", {}),
    "relpos": ("vit_relpos_base_patch16_cls_224", dict(rel_pos_type="bias")),
    "PE": ("vit_pe_core_base_patch16_224", dict(attn_pool_num_heads=4)),
    "AIMv2": ("aimv2_large_patch14_224", {}),
    "AIMv2 with biases": (
        "aimv2_large_patch14_224",
        dict(proj_bias=True, qkv_bias=True, class_token=True, num_classes=0),
    ),
    "QK norm": (PLAIN, dict(qk_norm=True)),
    "QK norm, parallel": ("vit_small_patch16_18x2_224", dict(qk_norm=True)),
    "QK norm, AIMv2": ("aimv2_large_patch14_224", dict(qk_norm=True)),
    "BEiT v2": ("beitv2_base_patch16_224", {}),
    "BEiT": (BEIT, {}),
    "BEiT, not square": (BEIT, dict(img_size=(24, 40))),
    "BEiT, one table": (BEIT, dict(use_rel_pos_bias=False, use_shared_rel_pos_bias=True)),
    "BEiT, absolute": (BEIT, dict(use_rel_pos_bias=False, use_abs_pos_emb=True)),
    "BEiT, class token": (BEIT, dict(global_pool="token")),
    "BEiT, no bias, no scale": (BEIT, dict(qkv_bias=False, init_values=0.0)),
}
"""Kind: architecture, and arguments beyond `TINY`."""

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "R50, stage 3": ("vit_base_r50_s16_224", dict(img_size=32)),
    "R26": ("vit_small_r26_s32_224", dict(img_size=64)),
    "root alone": ("vit_tiny_r_s16_p8_224", dict(img_size=64)),
}


def peer(kind: str, **changes: Any) -> nn.Module:
    """A tiny network of a kind, every parameter random, those that start at zero or one too."""
    architecture, arguments = (FAMILIES | HYBRIDS)[kind]
    base = HYBRID if kind in HYBRIDS else TINY
    return randomised(timm.create_model(architecture, **(base | arguments | changes)))


def bit(units: tuple[int, ...] = (1, 2), width: int = 32, **changes: Any) -> nn.Module:
    """A tiny BiT of timm's, made as its architectures are."""
    channels = tuple(4 * width * 2**stage for stage in range(len(units)))
    conv = partial(StdConv2d, eps=1e-8)
    arguments: dict[str, Any] = dict(layers=units, channels=channels, stem_chs=width, num_classes=5)
    return randomised(ResNetV2(**(arguments | changes), stem_type="fixed", conv_layer=conv))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a value that matters; kernels are small, so that the epsilon beside their variance does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one = parameter.dim() == 1 and not name.endswith("bias")
            small = parameter.dim() == 4 and ("stages." in name or "stem." in name or "backbone.conv" in name)
            parameter.normal_(1.0 if one else 0.0, 2e-3 if small else 0.2)
    return model.eval()


def hub(model: nn.Module, folder: Path, **extra: Any) -> Path:
    """The network as a folder of the hub, written by timm itself."""
    save_for_hf(model, str(folder), model_config=extra or None, safe_serialization=True)
    return folder


def rebuilt(folder: Path) -> nn.Module:
    """The network that timm makes of a folder, its weights strictly loaded."""
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def error(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|"""
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / theirs.norm()).item()


def images(model: ViT | ResNet, size: tuple[int, int] | None = None, seed: int = 1) -> Tensor:
    """Two random images, at the model's own size by default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, model.config.channels, *(size or model.config.image_size), generator=generator)


@torch.no_grad()
def assert_equal(ours: ViT | ResNet, theirs: nn.Module, batch: Tensor) -> None:
    """Logits, and the output of every block, are the same up to rounding."""
    outputs: list[Tensor] = []
    blocks = theirs.blocks if isinstance(ours, ViT) else [unit for stage in theirs.stages for unit in stage.blocks]
    handles = [block.register_forward_hook(lambda _, __, output: outputs.append(output)) for block in blocks]
    expected = theirs(batch)
    for handle in handles:
        handle.remove()
    for layer, (mine, other) in enumerate(zip(_blocks(ours, batch), outputs, strict=True)):
        assert error(mine, other) < TOLERANCE[batch.dtype], f"block {layer}"
    found = ours(batch)
    if isinstance(ours, ViT) and ours.config.origin.distilled and not ours.config.classes:
        found = found.unflatten(1, (2, -1)).mean(1)  # timm's features are the average of the two tokens'
    assert error(found, expected) < TOLERANCE[batch.dtype]


def assert_equal_in_double(ours: ViT | ResNet, theirs: nn.Module, batch: Tensor) -> None:
    """The same in float64: in the 16 bottlenecks of an R50 float32 alone makes an error of 1e-5 in either library."""
    assert_equal(copy.deepcopy(ours).double(), copy.deepcopy(theirs).double(), batch.double())


def _blocks(model: ViT | ResNet, batch: Tensor) -> list[Tensor]:
    if isinstance(model, ViT):
        return list(block_outputs(model, batch).values())
    outputs: list[Tensor] = []
    units = [unit for stage in model.stages for unit in stage]
    handles = [unit.register_forward_hook(lambda _, __, output: outputs.append(output)) for unit in units]
    model.features(batch)
    for handle in handles:
        handle.remove()
    return outputs


def resized(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A copy of a network of timm's at another size, as timm resizes it."""
    other = copy.deepcopy(model)
    other.set_input_size(img_size=size)
    return other.eval()


def assert_same_tensors(path: Path, model: nn.Module) -> None:
    """A file holds exactly the network's tensors: names, shapes and values."""
    found, state = load_file(path), model.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
