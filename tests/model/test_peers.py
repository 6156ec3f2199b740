"""What other libraries' models have beyond the paper's ViT, against those models with the same random weights."""

from __future__ import annotations

import re

import pytest
import timm
import torch
import transformers
from timm.layers import SwiGLUPacked, resize_rel_pos_bias_table
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor

from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT

TINY = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)
IN_TIMM = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=5)
IN_TRANSFORMERS = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8, num_labels=5,
)  # fmt: skip

TIMM = (  # vitrail's names -> timm's
    (r"^stem\.", "patch_embed.proj."),
    (r"^cls$", "cls_token"),
    (r"^dist$", "dist_token"),
    (r"^registers$", "reg_token"),
    (r"^positions\.embedding$", "pos_embed"),
    (r"attentions\.0\.norm\.", "norm1."),
    (r"attentions\.0\.attention\.out\.", "attn.proj."),
    (r"attentions\.0\.attention\.", "attn."),
    (r"attentions\.0\.residual\.gamma", "ls1.gamma"),
    (r"mlps\.0\.norm\.", "norm2."),
    (r"mlps\.0\.residual\.gamma", "ls2.gamma"),
    (r"mlps\.0\.", ""),
    (r"^pool\.probe$", "attn_pool.latent"),
    (r"^pool\.query\.", "attn_pool.q."),
    (r"^pool\.key_value\.", "attn_pool.kv."),
    (r"^pool\.out\.", "attn_pool.proj."),
    (r"^pool\.", "attn_pool."),
)

TRANSFORMERS = (  # vitrail's names -> those that BEiT and DINOv2 share
    (r"^cls$", "embeddings.cls_token"),
    (r"^registers$", "embeddings.register_tokens"),
    (r"^positions\.embedding$", "embeddings.position_embeddings"),
    (r"^stem\.", "embeddings.patch_embeddings.projection."),
    (r"attentions\.0\.attention\.out\.", "attention.o_proj."),
    (r"^head\.", "classifier."),
)


def renamed(tensors: dict[str, Tensor], rules: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        for ours, theirs in rules:
            name = re.sub(ours, theirs, name)
        result[name] = tensor
    return result


def to_timm(tensors: dict[str, Tensor], norm: str = "norm") -> dict[str, Tensor]:
    return renamed(tensors, (*TIMM, (r"^norm\.", f"{norm}.")))


def random_model(**options: object) -> ViT:
    """A model in which every tensor matters: biases, norms, tokens and the zero heads included."""
    torch.manual_seed(0)
    model = build(ViTConfig.of(**(TINY | options)))  # type: ignore[arg-type]
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def assert_equal_forward_and_backward(model: ViT, peer: torch.nn.Module, size: tuple[int, int], names) -> None:
    """The same logits, and the same gradient of each parameter, on both ways of computing attention."""
    peer.load_state_dict(names(model.state_dict()))
    images = torch.randn(3, 3, *size)
    expected = peer(images)
    expected = getattr(expected, "logits", expected)
    expected.square().sum().backward()
    for path in ("fused", "explicit"):
        model.zero_grad()
        with attention_path(path):  # type: ignore[arg-type]
            out = model(images)
            out.square().sum().backward()
        assert error(out, expected) < 1e-5
        ours = names({name: p.grad for name, p in model.named_parameters()})
        for name, parameter in peer.named_parameters():
            difference = (ours[name] - parameter.grad).norm()
            assert difference <= 1e-4 * parameter.grad.norm() + 1e-5, name  # a key's bias: rounding alone


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dict(registers=4, register_positions=True), dict(reg_tokens=4)),
        (dict(registers=4, cls_position=False), dict(reg_tokens=4, no_embed_class=True)),
        (
            dict(pool="map", registers=3, register_positions=True),
            dict(global_pool="map", class_token=False, reg_tokens=3),
        ),
        (dict(pool="map", class_token=True), dict(global_pool="map")),
        (dict(pool="gap", class_token=True), dict(global_pool="avg", fc_norm=False)),
        (dict(pool="gap", class_token=True, final_norm="pooled"), dict(global_pool="avg")),
        (
            dict(pool="gap", final_norm="pooled", registers=2),
            dict(global_pool="avg", class_token=False, reg_tokens=2, no_embed_class=True),
        ),
        (dict(final_norm="pooled"), dict(fc_norm=True)),
        (dict(mlp="swiglu"), dict(mlp_layer=SwiGLUPacked, act_layer=torch.nn.SiLU, mlp_ratio=4)),
    ],
    ids=str,
)
def test_timms_vision_transformer(ours: dict, theirs: dict) -> None:
    peer = timm.models.VisionTransformer(**(IN_TIMM | theirs))
    norm = "fc_norm" if ours.get("final_norm") == "pooled" else "norm"
    assert_equal_forward_and_backward(random_model(**ours), peer, (32, 32), lambda w: to_timm(w, norm))


@pytest.mark.parametrize("size", [(32, 32), (40, 24)])
def test_timms_distilled_deit(size: tuple[int, int]) -> None:
    """Both tokens have a position; the logits of the two heads are averaged, in training as in evaluation."""
    model = random_model(distilled=True, image_size=size)
    peer = VisionTransformerDistilled(**(IN_TIMM | dict(img_size=size)))
    assert_equal_forward_and_backward(model, peer, size, to_timm)
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        peer.set_distilled_training()
        heads = peer(images)
        ours = model.features(images).chunk(2, dim=1)
        assert error(model.head(ours[0]), heads[0]) < 1e-5
        assert error(model.head_dist(ours[1]), heads[1]) < 1e-5
        assert error(model.eval()(images), peer.eval()(images)) < 1e-5


def to_beit(tensors: dict[str, Tensor], norm: str) -> dict[str, Tensor]:
    """timm's BEiT has no bias for keys, LayerScale and tables under other names, and a table in each block."""
    theirs = {}
    for name, tensor in to_timm(tensors, norm).items():
        if name.endswith("attn.qkv.bias"):
            query, _, value = tensor.chunk(3)  # a key's bias adds the same to all logits of a query
            theirs[name.replace("qkv.bias", "q_bias")] = query
            theirs[name.replace("qkv.bias", "v_bias")] = value
        elif name == "positions.bias" and len(tensor) == 1:
            theirs["rel_pos_bias.relative_position_bias_table"] = tensor[0]
        elif name == "positions.bias":
            for layer, table in enumerate(tensor):
                theirs[f"blocks.{layer}.attn.relative_position_bias_table"] = table
        else:
            theirs[name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")] = tensor
    return theirs


BEIT = dict(positions="relative_bias", layer_scale=0.1)


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@pytest.mark.parametrize(
    ("ours", "theirs", "norm"),
    [
        (dict(pool="gap", class_token=True, final_norm="pooled"), dict(use_rel_pos_bias=True), "fc_norm"),
        (dict(), dict(use_rel_pos_bias=True, global_pool="token"), "norm"),
        (
            dict(pool="gap", class_token=True, final_norm="pooled", place="shared"),
            dict(use_shared_rel_pos_bias=True),
            "fc_norm",
        ),
    ],
    ids=["mean", "token", "shared"],
)
def test_timms_beit(ours: dict, theirs: dict, norm: str, size: tuple[int, int]) -> None:
    model = random_model(**(BEIT | ours), image_size=size)
    peer = Beit(**(IN_TIMM | theirs | dict(img_size=size)), use_abs_pos_emb=False, init_values=0.1)
    assert_equal_forward_and_backward(model, peer, size, lambda w: to_beit(w, norm))


@pytest.mark.parametrize("size", [(48, 48), (16, 16), (48, 24)])
def test_timms_beit_at_another_resolution(size: tuple[int, int]) -> None:
    model = random_model(**BEIT, pool="gap", class_token=True, final_norm="pooled", resize_mode="timm")
    peer = Beit(**(IN_TIMM | dict(img_size=size)), use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1)
    weights = to_beit(model.state_dict(), "fc_norm")
    grid = (size[0] // 8, size[1] // 8)
    for name in [name for name in weights if name.endswith("bias_table")]:
        shape = ((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, 2)
        weights[name] = resize_rel_pos_bias_table(weights[name], grid, shape, old_window_size=(4, 4))
    peer.load_state_dict(weights)
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        assert error(model(images), peer(images)) < 1e-5


def to_hf(tensors: dict[str, Tensor], model: str, layers: str, rules: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    theirs = {}
    for name, tensor in renamed(tensors, (*TRANSFORMERS, *rules, (r"^blocks\.", f"{layers}."))).items():
        name = name if name.startswith("classifier.") else f"{model}.{name}"
        if "attention.qkv" in name:
            for part, value in zip("qkv", tensor.chunk(3), strict=True):
                theirs[name.replace("attentions.0.attention.qkv", f"attention.{part}_proj")] = value
        else:
            theirs[name] = tensor
    return theirs


def to_hf_beit(tensors: dict[str, Tensor], pool: str) -> dict[str, Tensor]:
    rules = (
        (r"attentions\.0\.norm\.", "layernorm_before."),
        (r"attentions\.0\.residual\.gamma", "lambda_1"),
        (r"mlps\.0\.norm\.", "layernorm_after."),
        (r"mlps\.0\.residual\.gamma", "lambda_2"),
        (r"mlps\.0\.", ""),
        (r"^norm\.", "pooler.layernorm." if pool == "gap" else "layernorm."),
    )
    theirs = to_hf(tensors, "beit", "layers", rules)
    tables = theirs.pop("beit.positions.bias")
    for layer, table in enumerate(tables):
        place = "shared_position_bias" if len(tables) == 1 else f"layers.{layer}.relative_position_bias"
        theirs[f"beit.{place}.relative_position_bias_table"] = table
    return {name: tensor for name, tensor in theirs.items() if not name.endswith("k_proj.bias")}


@pytest.mark.parametrize("size", [(32, 32), (48, 24), (16, 64)])
@pytest.mark.parametrize("place", ["input", "shared"])
@pytest.mark.parametrize("pool", ["gap", "cls"])
def test_transformers_beit(pool: str, place: str, size: tuple[int, int]) -> None:
    """Larger images too: biases are resampled in every forward pass, here and there."""
    final_norm = "pooled" if pool == "gap" else "tokens"
    model = random_model(
        **BEIT, pool=pool, class_token=True, final_norm=final_norm, place=place, resize_mode="hf", norm_eps=1e-12
    )
    config = transformers.BeitConfig(
        **IN_TRANSFORMERS, intermediate_size=64, drop_path_rate=0.0, use_mean_pooling=pool == "gap",
        use_relative_position_bias=place == "input", use_shared_relative_position_bias=place == "shared",
    )  # fmt: skip
    peer = transformers.BeitForImageClassification(config)
    assert_equal_forward_and_backward(model, peer, size, lambda w: to_hf_beit(w, pool))


DINOV2 = (
    (r"attentions\.0\.norm\.", "norm1."),
    (r"attentions\.0\.residual\.gamma", "layer_scale1.lambda1"),
    (r"mlps\.0\.norm\.", "norm2."),
    (r"mlps\.0\.residual\.gamma", "layer_scale2.lambda1"),
    (r"mlps\.0\.mlp\.fc2\.", "mlp.down_proj."),
    (r"mlps\.0\.", ""),
    (r"^norm\.", "layernorm."),
)


def to_dinov2(tensors: dict[str, Tensor], model: str) -> dict[str, Tensor]:
    theirs = {}
    for name, tensor in to_hf(tensors, model, "encoder.layer", DINOV2).items():
        if "mlp.fc1" in name:
            for part, value in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                theirs[name.replace("fc1", part)] = value
        else:
            theirs[name] = tensor
    return theirs


@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
@pytest.mark.parametrize("registers", [0, 3])
def test_transformers_dinov2(registers: int, size: tuple[int, int]) -> None:
    """The giant's gated MLP, and a classifier that sees the class token next to the mean of the grid's."""
    options = dict(IN_TRANSFORMERS, mlp_ratio=2, use_swiglu_ffn=True)
    if registers:
        name, resize_mode = "dinov2_with_registers", "timm"  # it resamples with antialiasing, unlike the other
        config = transformers.Dinov2WithRegistersConfig(**options, num_register_tokens=registers)
        peer = transformers.Dinov2WithRegistersForImageClassification(config)
        peer.dinov2_with_registers.embeddings.mask_token = None  # for pre-training
    else:
        name, resize_mode = "dinov2", "hf"
        peer = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**options, use_mask_token=False))
    model = random_model(
        pool="cls+gap", mlp="swiglu", mlp_dim=48, layer_scale=0.1, registers=registers, resize_mode=resize_mode
    )
    assert_equal_forward_and_backward(model, peer, size, lambda w: to_dinov2(w, name))
