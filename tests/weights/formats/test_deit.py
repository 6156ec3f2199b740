"""DeiT-III's and "Three things"' files against their definition, written down once more in plain float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_outputs import block_outputs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vitrail
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.archive import open_archive
from vitrail.weights.card import Card
from vitrail.weights.deit import FORMAT, TABLE
from vitrail.weights.formats import recognise
from vitrail.weights.load import load
from vitrail.weights.mapping import apply_table

State = dict[str, Tensor]
PARALLEL = {"norm1": "norm11", "attn": "attn1", "gamma_1": "gamma_1_1"}
PARALLEL |= {"norm2": "norm21", "mlp": "mlp1", "gamma_2": "gamma_2_1"}
KINDS = {
    "DeiT-III": dict(scaled=True),
    "parallel": dict(parallel=True),
    "parallel with LayerScale": dict(parallel=True, scaled=True),
    "hMLP": dict(hmlp=True),
    "all of it": dict(parallel=True, scaled=True, hmlp=True, depth=3, classes=0),
}


def published(
    *,
    width: int = 128,
    depth: int = 2,
    side: int = 3,
    classes: int = 5,
    parallel: bool = False,
    scaled: bool = False,
    hmlp: bool = False,
) -> State:
    """A random model under the names of the repository's `models_v2.py`."""
    torch.manual_seed(0)

    def dense(name: str, rows: int, columns: int) -> State:
        weight = torch.randn(rows, columns) / math.sqrt(columns)
        return {f"{name}.weight": weight, f"{name}.bias": 0.1 * torch.randn(rows)}

    def norm(name: str, features: int) -> State:
        return {f"{name}.weight": 1 + 0.2 * torch.randn(features), f"{name}.bias": 0.1 * torch.randn(features)}

    state = {"cls_token": torch.randn(1, 1, width), "pos_embed": torch.randn(1, side**2, width)}
    if hmlp:
        quarter = width // 4
        for place, (rows, inputs, kernel) in enumerate([(quarter, 3, 4), (quarter, quarter, 2), (width, quarter, 2)]):
            conv, batch = 3 * place, 3 * place + 1
            kernel_ = torch.randn(rows, inputs, kernel, kernel) / math.sqrt(inputs * kernel * kernel)
            state |= {f"patch_embed.proj.{conv}.weight": kernel_, f"patch_embed.proj.{conv}.bias": torch.randn(rows)}
            state |= norm(f"patch_embed.proj.{batch}", rows)
            state[f"patch_embed.proj.{batch}.running_mean"] = 0.3 * torch.randn(rows)
            state[f"patch_embed.proj.{batch}.running_var"] = 0.5 + torch.rand(rows)
            state[f"patch_embed.proj.{batch}.num_batches_tracked"] = torch.tensor(1234)
    else:
        state["patch_embed.proj.weight"] = torch.randn(width, 3, 16, 16) / 28
        state["patch_embed.proj.bias"] = torch.randn(width)
    for layer in range(depth):
        block = f"blocks.{layer}"
        for second in (False, True)[: 1 + parallel]:
            called = {name: PARALLEL[name] if second else name for name in PARALLEL}
            state |= norm(f"{block}.{called['norm1']}", width) | norm(f"{block}.{called['norm2']}", width)
            state |= dense(f"{block}.{called['attn']}.qkv", 3 * width, width)
            state |= dense(f"{block}.{called['attn']}.proj", width, width)
            state |= dense(f"{block}.{called['mlp']}.fc1", 2 * width, width)
            state |= dense(f"{block}.{called['mlp']}.fc2", width, 2 * width)
            if scaled:
                state[f"{block}.{called['gamma_1']}"] = torch.randn(width)
                state[f"{block}.{called['gamma_2']}"] = torch.randn(width)
    state |= norm("norm", width)
    return state | (dense("head", classes, width) if classes else {})


def forward(state: State, images: Tensor, heads: int, patch: int = 16) -> tuple[list[Tensor], Tensor]:
    """Every block's output and the logits (features, without a head), by the definition, in float64.

    Positions for another grid are resampled as DeiT does it: bicubic, corners not aligned, no antialiasing.
    """
    s = {name: tensor.double() for name, tensor in state.items()}

    def dense(name: str, x: Tensor) -> Tensor:
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * s[f"{name}.weight"] + s[f"{name}.bias"]
        )

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def attention(name: str, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = dense(f"{name}.qkv", x).reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        maps = (q @ k.transpose(-1, -2) / math.sqrt(width // heads)).softmax(-1)
        return dense(f"{name}.proj", (maps @ v).transpose(1, 2).reshape(batch, tokens, width))

    def mlp(name: str, x: Tensor) -> Tensor:
        return dense(f"{name}.fc2", gelu(dense(f"{name}.fc1", x)))

    x = images.double()
    if "patch_embed.proj.0.weight" in s:
        for conv in (0, 3, 6):
            name, batch_norm = f"patch_embed.proj.{conv}", f"patch_embed.proj.{conv + 1}"
            x = F.conv2d(x, s[f"{name}.weight"], s[f"{name}.bias"], stride=s[f"{name}.weight"].shape[-1])
            mean, variance, weight, bias = (
                s[f"{batch_norm}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
            )
            x = (x - mean) / (variance + 1e-5).sqrt() * weight + bias
            x = gelu(x) if conv < 6 else x
    else:
        x = F.conv2d(x, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=patch)
    grid = x.shape[-2:]
    x = x.flatten(2).transpose(1, 2)
    tokens = [s["cls_token"]] + [s[name] for name in ("dist_token",) if name in s]
    table = s["pos_embed"]
    front = len(tokens) if math.isqrt(table.shape[1]) ** 2 != table.shape[1] else 0
    side = math.isqrt(table.shape[1] - front)
    square = table[:, front:].transpose(1, 2).unflatten(2, (side, side))
    if tuple(grid) != (side, side):
        square = F.interpolate(square, size=tuple(grid), mode="bicubic", align_corners=False)
    x = x + square.flatten(2).transpose(1, 2)
    first = torch.cat(tokens, 1) + (table[:, :front] if front else 0)
    x = torch.cat([first.expand(len(x), -1, -1), x], dim=1)

    outputs = []
    depth = 1 + max(int(name.split(".")[1]) for name in s if name.startswith("blocks."))
    for layer in range(depth):
        for kind, norm_name, inner, gamma in (("a", "norm1", "attn", "gamma_1"), ("m", "norm2", "mlp", "gamma_2")):
            total = x
            for called in ({n: n for n in PARALLEL}, PARALLEL):
                block = f"blocks.{layer}"
                if f"{block}.{called[norm_name]}.weight" not in s:
                    continue
                normed = norm(f"{block}.{called[norm_name]}", x)
                branch = (attention if kind == "a" else mlp)(f"{block}.{called[inner]}", normed)
                total = total + branch * s.get(f"{block}.{called[gamma]}", torch.ones(1, dtype=torch.float64))
            x = total
        outputs.append(x)
    x = norm("norm", x)
    if "head_dist.weight" in s:
        return outputs, (dense("head", x[:, 0]) + dense("head_dist", x[:, 1])) / 2
    return outputs, dense("head", x[:, 0]) if "head.weight" in s else x[:, 0]


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).abs().max() / expected.abs().max())


def compare(model: Any, state: State, images: Tensor, heads: int = 2) -> None:
    """Every block and the logits, to the rounding of float32."""
    outputs, logits = forward(state, images, heads)
    for layer, found in block_outputs(model, images).items():
        assert error(found, outputs[layer]) < 1e-5, layer
    with torch.inference_mode():
        assert error(model(images), logits) < 1e-5


def written(folder: Path, state: State) -> Path:
    path = folder / "weights.pth"
    torch.save({"model": state}, path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_computes_what_its_definition_says(tmp_path: Path, kind: str) -> None:
    state = published(**KINDS[kind])
    model = load(written(tmp_path, state))
    assert model.load_report.format == "deit" and not model.load_report.unused
    compare(model, state, torch.randn(2, 3, 48, 48))


@pytest.mark.parametrize("kind", ["DeiT-III", "hMLP"])
def test_other_sizes_resample_positions_as_deit_does(tmp_path: Path, kind: str) -> None:
    state = published(**KINDS[kind])
    path = written(tmp_path, state)
    images = torch.randn(2, 3, 64, 112)
    compare(load(path), state, images)  # as it runs
    model = load(path, image_size=(64, 112))  # once, when it is loaded
    assert model.config.origin.resize_mode == "deit" and "positions.embedding" in model.load_report.resampled
    compare(model, state, images)


def test_what_the_file_says_and_what_is_assumed(tmp_path: Path) -> None:
    model = load(written(tmp_path, published(scaled=True)))
    config, preprocess = model.config, model.card.preprocess
    assert (config.depth, config.width, config.heads, config.mlp_dim, config.patch) == (2, 128, 2, 256, 16)
    assert (config.image_size, config.classes, config.cls_position, config.stem) == ((48, 48), 5, False, "linear")
    assert (config.origin.gelu, config.origin.norm_eps, config.drop_path_shape) == ("erf", 1e-6, "constant")
    assert config.mean == (0.485, 0.456, 0.406) and config.std == (0.229, 0.224, 0.225)
    assert (preprocess.crop, preprocess.interpolation, preprocess.resize) == (1.0, "bicubic", "small")
    assert preprocess.image_size == (48, 48)
    assumed = " ".join(model.load_report.assumptions)
    assert "2 heads" in assumed and "ImageNet" in assumed
    assert model.card.source == "deit"


def test_every_entry_of_a_synchronised_batch_norm_has_a_place() -> None:
    names = [f"stem.proj.1.{entry}" for entry in nn.SyncBatchNorm(4).state_dict()]
    assert [entry.ours for entry in apply_table(names, TABLE)] == names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_load_and_save_give_the_file_back(tmp_path: Path, kind: str, ending: str) -> None:
    state = published(**KINDS[kind])
    model = load(written(tmp_path, state))
    out = tmp_path / f"again{ending}"
    vitrail.save(model, out, "deit")
    again = load_file(out) if ending == ".safetensors" else torch.load(out, weights_only=True)["model"]
    assert again.keys() == state.keys()
    for name, tensor in state.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


def test_a_model_of_ours_opens_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig.of(
        **dict(width=128, depth=2, heads=2, mlp_dim=256, patch=16, image_size=(48, 48), classes=5),
        **dict(block="parallel", branches=2, layer_scale=0.1, stem="hmlp", cls_position=False),
    )
    model: Any = build(config)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(0.5 + torch.rand_like(tensor) if "running_var" in name else 0.2 * torch.randn_like(tensor))
    model.eval()
    vitrail.save(model, tmp_path / "ours.pth", "deit")
    state = torch.load(tmp_path / "ours.pth", weights_only=True)["model"]
    like = published(parallel=True, scaled=True, hmlp=True)
    assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in like.items()}
    compare(model, state, torch.randn(2, 3, 48, 48))


@pytest.mark.parametrize("distilled", [False, True])
def test_the_first_deit_goes_out_under_timms_names_and_comes_back(tmp_path: Path, distilled: bool) -> None:
    torch.manual_seed(0)
    config = ViTConfig.of(
        **dict(width=128, depth=2, heads=2, mlp_dim=256, patch=16, image_size=(48, 48), classes=5),
        distilled=distilled,
    )
    model = build(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    vitrail.save(model, tmp_path / "v1.pth", "deit")
    state = torch.load(tmp_path / "v1.pth", weights_only=True)["model"]
    assert state["pos_embed"].shape == (1, 9 + 1 + distilled, 128)
    assert ("dist_token" in state and "head_dist.weight" in state) == distilled
    images = torch.randn(2, 3, 48, 48)
    compare(model, state, images)
    compare(load(tmp_path / "v1.pth"), state, images)


def test_beits_file_is_not_taken_for_deits(tmp_path: Path) -> None:
    state = published(scaled=True)
    save_file(state, tmp_path / "deit.safetensors")
    beit = {**state, "blocks.0.attn.q_bias": torch.zeros(128), "blocks.0.attn.v_bias": torch.zeros(128)}
    save_file(beit, tmp_path / "beit.safetensors")
    with open_archive(tmp_path / "deit.safetensors") as archive:
        assert recognise(archive).name == "deit"
    with open_archive(tmp_path / "beit.safetensors") as archive:
        assert not FORMAT.recognises(archive)


def without(name: str) -> Any:
    return lambda state: state.pop(name)


def replaced(name: str, tensor: Tensor) -> Any:
    return lambda state: state.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("DeiT-III", without("blocks.1.gamma_2"), "lacks the tensor 'blocks.1.gamma_2'"),
        ("DeiT-III", without("pos_embed"), "lacks the tensor 'pos_embed'"),
        (
            "DeiT-III",
            replaced("pos_embed", torch.zeros(1, 12, 128)),
            "'pos_embed' has 12 positions, which fit no square grid with 0 or 1 in front",
        ),
        ("DeiT-III", replaced("pos_embed", torch.zeros(9, 128)), r"'pos_embed' in shape \(9, 128\)"),
        ("DeiT-III", replaced("norm.weight", torch.full((128,), math.nan)), "'norm.weight' are NaN"),
        ("DeiT-III", replaced("blocks.0.gamma_3", torch.zeros(128)), "'blocks.0.gamma_3' of shape"),
        ("DeiT-III", replaced("blocks.0.attn.proj.weight", torch.zeros(64, 128)), "'blocks.0.attn.proj.weight'"),
        ("parallel", without("blocks.1.mlp1.fc1.bias"), "lacks the tensor 'blocks.1.mlp1.fc1.bias'"),
        ("hMLP", without("patch_embed.proj.4.running_mean"), "lacks 'patch_embed.proj.4.running_mean'"),
        ("hMLP", replaced("patch_embed.proj.0.weight", torch.zeros(32, 3, 5, 5)), r"kernels \(5, 2, 2\)"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, kind: str, change: Any, said: str) -> None:
    state = published(**KINDS[kind])
    change(state)
    with pytest.raises(WeightsError, match=said):
        load(written(tmp_path, state))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(gelu="tanh"), "GELU of kind 'tanh'"),
        (dict(norm_eps=1e-12), "LayerNorm epsilon 1e-12"),
        (dict(pool="gap"), "pool 'gap'"),
        (dict(registers=4), "4 registers"),
        (dict(positions="2d"), "positions '2d'"),
        (dict(pre_logits=8), "pre-logits"),
        (dict(layer_scale=0.1), "positions for a class token beside LayerScale"),
        (dict(distilled=True, cls_position=False), "a distillation token without a position"),
        (dict(block="parallel", branches=3, cls_position=False), "3 branches"),
        (dict(stem="levit"), "stem 'levit'"),
        (dict(image_size=(32, 48)), "not square"),
        (dict(final_norm="pooled"), "a norm after the pooling"),
        (dict(stem="hmlp", stem_norm="layer", cls_position=False), "layer norms in the hMLP stem"),
        (dict(width=32), "its file does not say how many heads its 32 features are split into"),
    ],
    ids=str,
)
def test_what_deit_has_no_place_for_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    values = dict(width=128, depth=1, heads=2, mlp_dim=64, patch=16, image_size=(32, 32), classes=2)
    config = ViTConfig.of(**{**values, **changes})
    with pytest.raises(WeightsError, match=reason):
        FORMAT.write(build(config), Card(config), tmp_path / "no.pth")
    assert not list(tmp_path.iterdir())


def test_a_resnet_is_refused(tmp_path: Path) -> None:
    config = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32))
    with pytest.raises(WeightsError, match="it is a ResNet"):
        FORMAT.write(build(config), Card(config), tmp_path / "no.pth")


@pytest.mark.nightly("test_load_and_save_give_the_file_back, of small networks")
@pytest.mark.full_size
def test_deit_iii_s_at_full_size(tmp_path: Path) -> None:
    state = published(width=384, depth=12, side=14, classes=1000, scaled=True)
    for layer in range(12):  # as wide as it really is
        block = f"blocks.{layer}.mlp"
        state[f"{block}.fc1.weight"] = torch.randn(1536, 384) / 20
        state[f"{block}.fc1.bias"] = 0.1 * torch.randn(1536)
        state[f"{block}.fc2.weight"] = torch.randn(384, 1536) / 40
    model = load(written(tmp_path, state))
    assert (model.config.heads, model.config.image_size) == (6, (224, 224))
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_059_496
    compare(model, state, torch.randn(1, 3, 224, 224), heads=6)
