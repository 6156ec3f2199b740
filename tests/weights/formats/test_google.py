"""Google's .npz against a NumPy forward pass written by the published names, and back into the same file."""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from flax_arrays import PREFIXES, from_bfloat16, google, hybrid, to_bfloat16
from flax_checks import (
    Change,
    agree,
    agrees_at_full_size,
    differs,
    error,
    having,
    identical,
    pixels,
    randomised,
    read,
    save,
    scaled,
    without,
)
from flax_reference import LINEN, OLD, vision_transformer
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise
from timm.layers import HybridEmbed
from timm.models.vision_transformer_hybrid import _resnetv2

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.flax.vit import GOOGLE as FORMAT
from vitrail.weights.load import load
from vitrail.weights.save import save as save_model

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pre-logits": dict(pre_logits=16),
    "features": dict(classes=None),
    "pre-logits without a head": dict(pre_logits=16, classes=None),
    "average": dict(cls=False),
    "odd sizes": dict(width=35, heads=5, mlp=51, patch=7, grid=(5, 5), classes=3),
    "one channel": dict(channels=1, depth=1),
    "flat grid": dict(grid=(2, 3)),
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "R50 like": dict(units=(1, 2), wide=True),
    "squeezed": dict(units=(1, 1), wide=False, pre_logits=16),
    "root alone": dict(units=(), cell=8, grid=(2, 2)),
    "three stages": dict(units=(2, 1, 1), grid=(2, 2)),
    "narrow root": dict(units=(1, 1), root=32),
    "narrow root alone": dict(units=(), root=32, cell=2),
}
TINY = dict(width=24, depth=2, heads=3, mlp_dim=48, patch=8, image_size=(32, 32), classes=5, gelu="tanh")


def images_for(options: dict[str, Any]) -> np.ndarray:
    patch, (rows, columns) = options.get("patch", 8), options.get("grid", (4, 4))
    return pixels(rows * patch, columns * patch, options.get("channels", 3))


@pytest.mark.parametrize(("prefix", "naming", "options"), pairwise(PREFIXES, (OLD, LINEN), OPTIONS.values()))
def test_computes_what_the_reference_does_and_goes_back_as_it_came(
    prefix: str, naming: tuple[str, str, str], options: dict[str, Any], tmp_path: Path
) -> None:
    arrays = google(naming=naming, **options)
    model = load(save(tmp_path / "a.npz", arrays, prefix))
    images = images_for(options)
    agree(model, images, vision_transformer(arrays, images, options.get("grid")))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz", prefix), arrays)


@pytest.mark.parametrize(("prefix", "options"), zip(itertools.cycle(("", "params/")), HYBRIDS.values()), ids=HYBRIDS)
def test_hybrids_too(prefix: str, options: dict[str, Any], tmp_path: Path) -> None:
    arrays = hybrid(**options)
    model = load(save(tmp_path / "a.npz", arrays, prefix))
    images = pixels(*model.config.image_size)
    agree(model, images, vision_transformer(arrays, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz", prefix), arrays)


def test_the_config_is_read_from_the_shapes(tmp_path: Path) -> None:
    arrays = google(width=30, heads=5, depth=3, mlp=41, patch=7, grid=(3, 3), classes=11, pre_logits=13)
    model = load(save(tmp_path / "a.npz", arrays))
    expected = ViTConfig.of(
        width=30, heads=5, depth=3, mlp_dim=41, patch=7, image_size=(21, 21), classes=11, pre_logits=13, gelu="tanh"
    )
    assert model.config == expected == model.card.config
    assert model.card.source == "google"
    assert model.card.preprocess == Preprocess((21, 21), resize="squash")
    assert model.load_report.assumptions == []
    assert model.load_report.unused == {}
    assert not model.training


@pytest.mark.parametrize(
    ("options", "units", "patch", "side"),
    [
        (dict(units=(1, 1, 2), grid=(3, 3)), (1, 1, 2), 16, 48),
        (dict(units=(1, 1, 1, 1), grid=(1, 1)), (1, 1, 1, 1), 32, 32),
        (dict(units=(), cell=8, grid=(7, 7)), (), 32, 224),  # R+Ti/16: really one token per 32 x 32 pixels
    ],
)
def test_a_hybrids_grid_comes_from_its_layers(
    options: dict[str, Any], units: tuple[int, ...], patch: int, side: int, tmp_path: Path
) -> None:
    config = load(save(tmp_path / "a.npz", hybrid(depth=1, **options))).config
    assert (config.stem, config.stem_units, config.patch) == ("resnet", units, patch)
    assert config.image_size == (side, side)


def test_a_grid_that_is_not_square_is_an_assumption(tmp_path: Path) -> None:
    model = load(save(tmp_path / "a.npz", google(grid=(3, 2))))
    assert model.config.grid == (2, 3)
    assert "6 positions, not a square number" in model.load_report.assumptions[0]
    assert "a grid of 2 x 3" in str(model.load_report)


@pytest.mark.parametrize("size", [(40, 24), (56, 64), (8, 16)])
@pytest.mark.parametrize("options", [{}, dict(cls=False), dict(pre_logits=16)])
def test_positions_are_resampled_as_officially(options: dict[str, Any], size: tuple[int, int], tmp_path: Path) -> None:
    arrays = google(**options)
    path = save(tmp_path / "a.npz", arrays)
    images = pixels(*size)
    expected = vision_transformer(arrays, images)
    agree(load(path), images, expected)
    resized = load(path, image_size=size)
    assert resized.config.image_size == size
    agree(resized, images, expected)


def test_the_epsilon_is_the_origins(tmp_path: Path) -> None:
    arrays = scaled(google(), 1e-3, "cls", "pos_embedding", "embedding/kernel", "embedding/bias")
    model = load(save(tmp_path / "a.npz", arrays))
    images = pixels(32, 32)
    expected = vision_transformer(arrays, images)
    agree(model, images, expected)
    differs(model, images, expected, norm_eps=1e-5)


def test_a_hybrids_epsilons_are_the_origins(tmp_path: Path) -> None:
    kernels = ("conv_root/kernel", "conv1/kernel", "conv2/kernel", "conv3/kernel", "conv_proj/kernel")
    arrays = scaled(hybrid(), 1e-4, *kernels)
    model = load(save(tmp_path / "a.npz", arrays))
    images = pixels(32, 32) * np.float32(1e-3)
    expected = vision_transformer(arrays, images)
    agree(model, images, expected)
    differs(model, images, expected, std_conv="timm")
    differs(model, images, expected, group_norm_eps=1e-5)


def test_a_resampled_hybrid(tmp_path: Path) -> None:
    arrays = hybrid(units=(1, 1), grid=(3, 3))
    images = pixels(48, 16)
    agree(load(save(tmp_path / "a.npz", arrays)), images, vision_transformer(arrays, images))


@pytest.mark.full_size
@given(
    heads=st.integers(1, 4), features=st.integers(3, 6), depth=st.integers(1, 3), mlp=st.integers(1, 20),
    patch=st.integers(1, 6), side=st.integers(1, 4), classes=st.one_of(st.none(), st.integers(1, 4)),
    pre_logits=st.one_of(st.none(), st.integers(1, 5)), cls=st.booleans(), naming=st.sampled_from([OLD, LINEN]),
    rows=st.integers(1, 3),
)  # fmt: skip
def test_any_architecture(heads: int, features: int, side: int, rows: int, **options: Any) -> None:
    arrays = google(heads=heads, width=heads * features, grid=(side, side), **options)
    patch = options["patch"]
    with tempfile.TemporaryDirectory() as folder:
        model = load(save(Path(folder) / "a.npz", arrays))
        images = pixels(rows * patch, side * patch)
        expected = vision_transformer(arrays, images)
        with torch.inference_mode():
            logits = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
        np.testing.assert_allclose(logits, expected.logits, rtol=1e-4, atol=1e-4)
        FORMAT.write(model, model.card, Path(folder) / "b.npz")
        identical(read(Path(folder) / "b.npz"), arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(pool="gap"),
        dict(pre_logits=12),
        dict(classes=0),
        dict(stem="resnet", stem_units=(1, 1)),
        dict(stem="resnet", stem_units=(), patch=16),
        dict(resize_mode="timm"),
        dict(mean=(0.4, 0.5, 0.5), std=(0.2, 0.2, 0.2)),
    ],
)
def test_a_model_of_ours_is_read_by_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    model = randomised(build(ViTConfig.of(**(TINY | changes))))
    FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    arrays = read(tmp_path / "a.npz")
    images = pixels(32, 32)
    agree(model, images, vision_transformer(arrays, images))
    half = dict(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert load(tmp_path / "a.npz").config == model.config.changed(resize_mode="official", **half)


@pytest.mark.parametrize("source", ["ours", "opt/target/"])
def test_timm_reads_what_is_written(source: str, tmp_path: Path) -> None:
    if source == "ours":
        model = randomised(build(ViTConfig.of(**TINY)))
        card = Card(model.config)
    else:
        model = load(save(tmp_path / "a.npz", google(mlp=48, classes=5), source))
        card = model.card
    FORMAT.write(model, card, tmp_path / "b.npz")
    peer = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=2, num_classes=5,
        act_layer="gelu_tanh",
    ).eval()  # fmt: skip
    peer.load_pretrained(str(tmp_path / "b.npz"))
    images = torch.from_numpy(pixels(32, 32)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        assert error(model(images).numpy(), peer(images).numpy()) <= 1e-5


def test_timm_reads_a_hybrid(tmp_path: Path) -> None:
    model = randomised(build(ViTConfig.of(**(TINY | dict(stem="resnet", stem_units=(1, 2))))))
    FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    peer = timm.models.VisionTransformer(
        img_size=32, patch_size=1, embed_dim=24, depth=2, num_heads=3, mlp_ratio=2, num_classes=5,
        act_layer="gelu_tanh", embed_layer=partial(HybridEmbed, backbone=_resnetv2((1, 2))),
    ).eval()  # fmt: skip
    peer.load_pretrained(str(tmp_path / "a.npz"))
    images = torch.from_numpy(pixels(32, 32)).permute(0, 3, 1, 2)
    with torch.inference_mode():  # its kernels are standardised with other epsilons
        assert error(model(images).numpy(), peer(images).numpy()) <= 2e-3


def test_the_text_tower_and_the_state_of_a_run_are_left_out_and_named(tmp_path: Path) -> None:
    arrays = google()
    image = {f"params/img/{name}": array for name, array in arrays.items()}
    text = {"params/txt/head/kernel": np.ones((2, 2), np.float32), "params/t": np.ones(1, np.float32)}
    model = load(save(tmp_path / "a.npz", image | text | {"opt/count": np.zeros((), np.int32)}))
    assert model.load_report.unused == {
        "params/txt/head/kernel": "not of the image tower",
        "params/t": "not of the image tower",
        "opt/count": "state of the training run",
    }
    assert "7 features shared with the text tower" in str(model.load_report)
    images = pixels(32, 32)
    agree(model, images, vision_transformer(arrays, images))


def test_a_new_head_is_written_without_the_old_pre_logits(tmp_path: Path) -> None:
    arrays = google(pre_logits=16)
    model = load(save(tmp_path / "a.npz", arrays, "params/"), classes=3)
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    written = read(tmp_path / "b.npz", "params/")
    assert written["head/kernel"].shape == (24, 3)
    kept = {name: array for name, array in arrays.items() if not name.startswith(("head", "pre_logits"))}
    identical({name: written[name] for name in written if not name.startswith("head")}, kept)


def test_types_go_back_as_they_came(tmp_path: Path) -> None:
    arrays = google()
    halves = {name: to_bfloat16(array) for name, array in arrays.items()}
    halves["cls"], halves["head/bias"] = arrays["cls"], arrays["head/bias"].astype(np.float16)
    model = load(save(tmp_path / "a.npz", halves))
    values = {name: from_bfloat16(array) if array.dtype == "V2" else array for name, array in halves.items()}
    images = pixels(32, 32)
    agree(model, images, vision_transformer(values, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz"), halves)
    with torch.no_grad():
        model.norm.weight += 1e-5  # as training does: more digits than bfloat16 has
    FORMAT.write(model, model.card, tmp_path / "c.npz")
    trained = read(tmp_path / "c.npz")
    np.testing.assert_array_equal(trained["Transformer/encoder_norm/scale"], model.norm.weight.detach().numpy())
    assert trained["Transformer/encoder_norm/bias"].dtype == "V2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gelu="erf"), "does not store the kind of GELU.* tanh approximation.*gelu='tanh'"),
        (dict(norm_eps=1e-12), "epsilon of LayerNorm.*1e-12"),
        (dict(registers=2), "no place for 2 registers"),
        (dict(layer_scale=0.1), "no place for LayerScale"),
        (dict(block="parallel", branches=2), "no place for parallel blocks"),
        (dict(block="axial", pool="gap"), "no place for axial blocks"),
        (dict(stem="hmlp"), r"no place for stem 'hmlp' \(valid: linear, resnet\)"),
        (dict(positions="relative"), r"no place for positions 'relative' \(valid: 1d\)"),
        (dict(positions="sincos"), r"no place for positions 'sincos' \(valid: 1d\)"),
        (dict(positions="none"), r"no place for positions 'none' \(valid: 1d\)"),
        (dict(place="every"), r"positions at place 'every' \(valid: input\)"),
        (dict(pool="map"), "no place for pool 'map'"),
        (dict(pool="cls+gap"), r"no place for pool 'cls\+gap'"),
        (dict(pool="gap", class_token=True), "a class token that pool 'gap' does not read"),
        (dict(final_norm="pooled"), "a norm after the pooling"),
        (dict(distilled=True), "a distillation token"),
        (dict(mlp="swiglu"), "a swiglu MLP"),
        (dict(cls_position=False), "a position for the class token, and this model has none.*'big_vision'"),
        (dict(image_size=(32, 8)), "this model's grid of 4 x 1 would be read as 2 x 2"),
        (dict(image_size=(24, 16)), "this model's grid of 3 x 2 would be read as 2 x 3"),
        (dict(stem="resnet", stem_units=(1, 1), std_conv="timm"), "how a hybrid standardises its kernels"),
        (dict(stem="resnet", stem_units=(1, 1), group_norm_eps=1e-5), "GroupNorm"),
    ],
)
def test_what_the_format_cannot_say_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build(ViTConfig.of(**(TINY | changes)))
    with pytest.raises(WeightsError, match=f"format 'google' .*{message}"):
        FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []


def test_other_networks_and_folders_are_refused(tmp_path: Path) -> None:
    resnet = build(ResNetConfig(units=(1,), width=32, classes=2))
    with pytest.raises(WeightsError, match="a ResNetV2 goes into 'bit'"):
        FORMAT.write(resnet, Card(resnet.config), tmp_path / "a.npz")
    model = build(ViTConfig.of(**TINY))
    with pytest.raises(WeightsError, match="is a folder; this format is a single file"):
        FORMAT.write(model, Card(model.config), tmp_path)


ATTENTION = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("Transformer/encoderblock_1/LayerNorm_2/bias"),
            "lacks .*'Transformer/encoderblock_1/LayerNorm_2/bias'",
        ),
        (
            without("Transformer/encoderblock_1/"),
            "has 'Transformer/encoderblock_2' but no 'Transformer/encoderblock_1'",
        ),
        (without(ATTENTION.format(0)), "no attention in its first layer"),
        (without("head/kernel"), "lacks the tensor 'head/kernel'"),
        (without("embedding/bias"), "lacks the tensor 'embedding/bias'"),
        (having("Transformer/encoderblock_1/more", 3), "'Transformer/encoderblock_1/more' of shape \\(3,\\)"),
        (having("block1/unit1/conv1/kernel", 1, 1, 64, 64), "'block1/unit1/conv1/kernel'"),
        (having(ATTENTION.format(1) + "/key/kernel", 24, 6, 4), "key/kernel.*3 heads"),
        (having(ATTENTION.format(1) + "/query/bias", 24), "query/bias"),
        (having(ATTENTION.format(1) + "/out/kernel", 6, 4, 24), "out/kernel.*3 heads"),
        (having(ATTENTION.format(0) + "/query/kernel", 24, 3, 7), "3 heads of 7 features for a width of 24"),
        (having(ATTENTION.format(0) + "/query/kernel", 24, 0, 0), "should be \\(width, heads, features of a head\\)"),
        (having("embedding/kernel", 8, 4, 3, 24), "patches of 8 x 4"),
        (having("head/kernel", 24), "'head/kernel' in shape \\(24,\\); it should be \\(features, classes\\)"),
        (having("Transformer/posembed_input/pos_embedding", 1, 1, 24), "only the class token's position"),
        (having("cls", 1, 1, 23), "'cls' of shape \\(1, 1, 23\\)"),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_the_name_of_the_tensor(
    change: Change, message: str, tmp_path: Path
) -> None:
    arrays = google(depth=3)
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        load(save(tmp_path / "a.npz", arrays))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("block1/unit1/conv2"), "lacks the tensor 'block1/unit1/conv2/kernel'"),
        (without("block1/unit1/"), "has 'block1/unit2' but no 'block1/unit1'"),
        (having("block2/unit3/conv1/kernel", 1, 1, 512, 128), "has 'block2/unit3' but no 'block2/unit2'"),
        (having("conv_root/kernel", 5, 5, 3, 64), "7 x 7 kernels"),
    ],
)
def test_a_hybrid_with_gaps_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    arrays = hybrid(units=(2, 1))
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        load(save(tmp_path / "a.npz", arrays))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_file_goes_back_as_it_came_even_through_a_folder_of_ours(prefix: str, tmp_path: Path) -> None:
    arrays = hybrid(units=(1,), naming=LINEN)
    model = load(save(tmp_path / "a.npz", arrays, prefix))
    save_model(model, tmp_path / "ours")
    save_model(load(tmp_path / "ours"), tmp_path / "b.npz", "google")
    identical(read(tmp_path / "b.npz", prefix), arrays)


@pytest.mark.nightly("test_computes_what_the_reference_does_and_goes_back_as_it_came, of small networks")
@pytest.mark.full_size
@pytest.mark.parametrize(
    ("name", "width", "depth"), [("B/16", 768, 2), ("B/16", 96, 12), ("R50+B/16", 768, 2)], ids=lambda value: str(value)
)
def test_full_size(name: str, width: int, depth: int, tmp_path: Path) -> None:
    """As wide as the published files, or as deep: both at once takes ten times as long."""
    sizes: dict[str, Any] = dict(width=width, depth=depth, heads=12, mlp=4 * width, grid=(14, 14), classes=1000)
    arrays = google(patch=16, **sizes) if name == "B/16" else hybrid(units=(3, 4, 9), **sizes)
    model = load(save(tmp_path / "a.npz", arrays))
    images = pixels(224, 224, batch=1)
    agrees_at_full_size(model, images, vision_transformer(arrays, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz"), arrays)
