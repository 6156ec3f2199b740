"""Tiny models of transformers, every tensor of them with values that matter, and what they compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from block_outputs import block_outputs
from einops import rearrange
from torch import Tensor, nn

LABELS = {0: "cat", 1: "dog", 2: "<b>"}
ENCODER = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
PLAIN = dict(ENCODER, intermediate_size=48)
DINO = dict(ENCODER, mlp_ratio=2)
BEIT = dict(PLAIN, drop_path_rate=0.0)
RELATIVE = dict(BEIT, use_relative_position_bias=True)
SHARED = dict(BEIT, use_shared_relative_position_bias=True)
MAE = dict(
    PLAIN,
    mask_ratio=0.0,
    decoder_hidden_size=16,
    decoder_num_attention_heads=2,
    decoder_num_hidden_layers=1,
    decoder_intermediate_size=24,
)
DINO3 = dict(
    **{name: value for name, value in PLAIN.items() if "dropout" not in name}, num_register_tokens=3, drop_path_rate=0.0
)
SWIGLU = dict(use_swiglu_ffn=True)
TOWER = {name: value for name, value in PLAIN.items() if not name.endswith("_prob")}
TEXTS = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=24,
    vocab_size=50,
    max_position_embeddings=8,
    **dict(bos_token_id=1, eos_token_id=2),
)
PAIR = dict(vision_config=TOWER, text_config=TEXTS)
NAFLEX = dict(TOWER, num_patches=16)

# name: class, config
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", PLAIN),
    "vit-tanh": ("ViTForImageClassification", dict(PLAIN, hidden_act="gelu_new", layer_norm_eps=1e-5)),
    "vit-biasless": ("ViTForImageClassification", dict(PLAIN, qkv_bias=False)),
    "vit-gray": ("ViTForImageClassification", dict(PLAIN, num_channels=1)),
    "vit-bare": ("ViTModel", PLAIN),
    "vit-pooler": ("ViTModel", dict(PLAIN, pooler_output_size=24)),
    "vit-masked": ("ViTForMaskedImageModeling", dict(PLAIN, encoder_stride=8)),
    "deit": ("DeiTForImageClassification", PLAIN),
    "deit-taught": ("DeiTForImageClassificationWithTeacher", PLAIN),
    "deit-bare": ("DeiTModel", PLAIN),
    "deit-masked": ("DeiTForMaskedImageModeling", dict(PLAIN, encoder_stride=8)),
    "beit": ("BeitForImageClassification", RELATIVE),
    "beit-shared": ("BeitForImageClassification", SHARED),
    "beit-absolute": ("BeitForImageClassification", dict(BEIT, use_absolute_position_embeddings=True)),
    "beit-nowhere": ("BeitForImageClassification", BEIT),
    "beit-unscaled": ("BeitForImageClassification", dict(RELATIVE, layer_scale_init_value=0.0)),
    "beit-cls": ("BeitForImageClassification", dict(RELATIVE, use_mean_pooling=False)),
    "beit-bare": ("BeitModel", RELATIVE),
    "beit-masked": ("BeitForMaskedImageModeling", dict(SHARED, use_mask_token=True, vocab_size=7)),
    "mae": ("ViTMAEForPreTraining", MAE),
    "mae-bare": ("ViTMAEModel", MAE),
    "dinov2": ("Dinov2ForImageClassification", DINO),
    "dinov2-bare": ("Dinov2Model", DINO),
    "dinov2-swiglu": ("Dinov2ForImageClassification", dict(DINO, **SWIGLU)),
    "dinov2-registers": ("Dinov2WithRegistersForImageClassification", dict(DINO, num_register_tokens=3)),
    "dinov3": ("DINOv3ViTModel", DINO3),
    "dinov3-gated": ("DINOv3ViTModel", dict(DINO3, use_gated_mlp=True, hidden_act="silu")),
    "dinov3-biasless": ("DINOv3ViTModel", dict(DINO3, query_bias=False, value_bias=False, rope_theta=50.0)),
    "dinov2-registers-bare": ("Dinov2WithRegistersModel", dict(DINO, num_register_tokens=2, **SWIGLU)),
    "clip": ("CLIPVisionModelWithProjection", dict(TOWER, projection_dim=20)),
    "clip-bare": ("CLIPVisionModel", dict(TOWER, hidden_act="gelu")),
    "clip-pair": ("CLIPModel", dict(PAIR, projection_dim=20)),
    "clip-classes": ("CLIPForImageClassification", PAIR),
    "siglip": ("SiglipVisionModel", TOWER),
    "siglip-pair": ("SiglipModel", PAIR),
    "siglip-classes": ("SiglipForImageClassification", PAIR),
    "siglip2": ("Siglip2VisionModel", NAFLEX),
    "siglip2-classes": ("Siglip2ForImageClassification", dict(PAIR, vision_config=NAFLEX)),
    "msn": ("ViTMSNForImageClassification", PLAIN),
    "msn-bare": ("ViTMSNModel", PLAIN),
    "ijepa": ("IJepaForImageClassification", PLAIN),
    "ijepa-bare": ("IJepaModel", PLAIN),
    "internvl": ("InternVLVisionModel", TOWER),
    "internvl-normed": ("InternVLVisionModel", dict(TOWER, attention_bias=True, use_mean_pooling=False)),
    "internvl-6b": ("InternVLVisionModel", dict(TOWER, use_qk_norm=True, norm_type="rms_norm")),
    "aimv2": ("Aimv2VisionModel", TOWER),
    "aimv2-native": ("Aimv2VisionModel", dict(TOWER, is_native=True)),
    "aimv2-biased": ("Aimv2VisionModel", dict(TOWER, use_head=False, qkv_bias=True, mlp_bias=True)),
    "data2vec": ("Data2VecVisionForImageClassification", RELATIVE),
    "data2vec-bare": ("Data2VecVisionModel", SHARED),
}


def randomise(model: nn.Module) -> nn.Module:
    """Give every parameter a value that matters: biases, norms, tokens, tables and scales included."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def peer(name: str, **changes: Any) -> nn.Module:
    """The tiny model of a case, with three named classes where its class has a classifier."""
    architecture, values = CASES[name]
    return build(architecture, **{**values, **changes})


def build(architecture: str, **values: Any) -> nn.Module:
    """A model of transformers with random values."""
    cls = getattr(transformers, architecture)
    if "Classification" in architecture:
        values = dict(values, id2label=LABELS, label2id={label: index for index, label in LABELS.items()})
    torch.manual_seed(0)
    return randomise(cls(cls.config_class(**values)))


def saved(folder: Path, name: str, **changes: Any) -> nn.Module:
    """The tiny model of a case, also saved to `folder` by transformers."""
    model = peer(name, **changes)
    model.save_pretrained(folder)
    return model


def tower_of(model: nn.Module) -> Any:
    """The config of a model's image tower."""
    return getattr(model.config, "vision_config", model.config)


@torch.no_grad()
def computed(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What a model makes of images: logits, or the features where it has no classifier, and every block's output."""
    blocks: list[Tensor] = []
    layers = [
        module
        for name, module in model.named_modules()
        if re.fullmatch(r"(\w+\.)?(encoder\.)?layers?\.\d+", name) and not name.startswith(("decoder", "text_"))
    ]
    assert len(layers) == tower_of(model).num_hidden_layers
    handles = [
        layer.register_forward_hook(lambda _, __, out: blocks.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    try:
        return _output(model, images), blocks
    finally:
        for handle in handles:
            handle.remove()


def assert_equal_to(model: nn.Module, theirs: nn.Module, sizes: list[tuple[int, int]]) -> None:
    """Compare the logits, or features, and the output of every block, for images of these sizes."""
    for height, width in sizes:
        images = images_for(theirs, height, width)
        expected, blocks = computed(theirs, images)
        with torch.no_grad():
            assert error(model(images), expected) < 1e-5, (height, width)
        for layer, tokens in block_outputs(model, images).items():
            assert error(tokens, blocks[layer]) < 1e-5, (height, width, layer)


def _output(model: nn.Module, images: Tensor) -> Tensor:
    kind = model.config.model_type
    kwargs: dict[str, Any] = {}
    if kind in (
        "vit",
        "deit",
        "vit_mae",
        "vit_msn",
        "ijepa",
        "clip",
        "clip_vision_model",
        "siglip",
        "siglip_vision_model",
    ):
        size = tower_of(model).image_size
        own = [size, size] if isinstance(size, int) else list(size)
        kwargs["interpolate_pos_encoding"] = list(images.shape[-2:]) != own
    if kind == "vit_mae":  # nothing is masked, and the noise keeps the order
        cells = images.shape[-2] * images.shape[-1] // model.config.patch_size**2
        kwargs["noise"] = torch.arange(float(cells)).expand(len(images), -1)
    architecture = type(model).__name__
    if architecture == "CLIPForImageClassification":  # it has no argument for another size
        return model.classifier(model.vision_model(images, **kwargs).last_hidden_state[:, 1:].mean(1))
    if kind.startswith("siglip2"):
        images, kwargs = _patches(images, tower_of(model).patch_size)
    if "Classification" in architecture:
        return model(images, **kwargs).logits
    if architecture == "CLIPVisionModelWithProjection":
        return model(images, **kwargs).image_embeds
    if architecture in ("CLIPModel", "SiglipModel"):
        return model.get_image_features(images, **kwargs).pooler_output
    if architecture in ("IJepaModel", "Data2VecVisionModel") or (kind.startswith("aimv2") and not model.use_head):
        front = int(architecture == "Data2VecVisionModel")
        return model(images, **kwargs).last_hidden_state[:, front:].mean(1)
    if architecture == "BeitForMaskedImageModeling":
        return model.layernorm(model.beit(images).last_hidden_state)[:, 0]
    base = model if kind == "dinov3_vit" else model.base_model  # there it is the blocks alone
    output = base(images, **kwargs)
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled


def _patches(images: Tensor, patch: int) -> tuple[Tensor, dict[str, Any]]:
    """The arguments of SigLIP 2: patches, of which each image has as many."""
    grid = images.shape[-2] // patch, images.shape[-1] // patch
    cut = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)
    shapes = torch.tensor([grid] * len(images))
    return cut, dict(pixel_attention_mask=torch.ones(cut.shape[:2], dtype=torch.long), spatial_shapes=shapes)


def images_for(model: nn.Module, height: int, width: int) -> Tensor:
    """Two random images, normalised."""
    torch.manual_seed(2)
    return torch.randn(2, tower_of(model).num_channels, height, width)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative error."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / theirs.norm()).item()
