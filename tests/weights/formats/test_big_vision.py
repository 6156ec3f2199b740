"""big_vision's .npz against a NumPy forward pass written by the published names, and back into the same file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from flax_arrays import PREFIXES, big_vision, from_bfloat16, google, scanned, to_bfloat16
from flax_checks import Change, agree, error, having, identical, pixels, randomised, read, save, without
from flax_reference import LINEN, big_vision_vit
from pairwise import pairwise
from random_inputs import MANY

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.flax.vit import BIG_VISION as FORMAT
from vitrail.weights.flax.vit import GOOGLE
from vitrail.weights.load import load
from vitrail.weights.save import save as save_model

OPTIONS: dict[str, dict[str, Any]] = {
    "average": {},
    "MAP head": dict(pool="map"),
    "class token": dict(pool="tok"),
    "class token with a row": dict(pool="tok", positions="old"),
    "pre-logits": dict(pool="map", pre_logits=16),
    "features": dict(pool="map", classes=None),
    "odd sizes": dict(width=35, heads=5, mlp=51, patch=7, grid=(5, 5), classes=3),
    "flat grid": dict(pool="map", grid=(2, 4)),
}
TINY = dict(width=24, depth=2, heads=3, mlp_dim=48, patch=8, image_size=(32, 32), classes=5, gelu="tanh", pool="gap")


def images_for(options: dict[str, Any]) -> np.ndarray:
    patch, (rows, columns) = options.get("patch", 8), options.get("grid", (4, 4))
    return pixels(rows * patch, columns * patch)


@pytest.mark.parametrize(("prefix", "stack", "options"), pairwise(PREFIXES, (False, True), OPTIONS.values()))
def test_computes_what_the_reference_does_and_goes_back_as_it_came(
    prefix: str, stack: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    arrays = big_vision(**options)
    arrays = scanned(arrays) if stack else arrays
    model = load(save(tmp_path / "a.npz", arrays, prefix))
    images = images_for(options)
    agree(model, images, big_vision_vit(arrays, images, options.get("grid")))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz", prefix), arrays)


@pytest.mark.parametrize("stack", [False, True], ids=["layers", "scanned"])
@pytest.mark.parametrize("pool", ["gap", "map", "tok"])
def test_bfloat16(pool: str, stack: bool, tmp_path: Path) -> None:
    arrays = big_vision(pool=pool)
    arrays = {name: to_bfloat16(array) for name, array in (scanned(arrays) if stack else arrays).items()}
    model = load(save(tmp_path / "a.npz", arrays, "params/"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    images = pixels(32, 32)
    values = {name: from_bfloat16(array) for name, array in arrays.items()}
    agree(model, images, big_vision_vit(values, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz", "params/"), arrays)


def test_positions_where_google_has_them(tmp_path: Path) -> None:
    arrays = big_vision(pool="map")
    arrays["Transformer/posembed_input/pos_embedding"] = arrays.pop("pos_embedding")
    model = load(save(tmp_path / "a.npz", arrays))
    assert model.card.source == "big_vision"
    images = pixels(40, 32)
    agree(model, images, big_vision_vit(arrays, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz"), arrays)


@pytest.mark.parametrize("size", [(224, 224), (40, 24)])
@pytest.mark.parametrize("pool", ["gap", "map", "tok"])
def test_computed_positions(pool: str, size: tuple[int, int], tmp_path: Path) -> None:
    arrays = big_vision(pool=pool, positions="sincos2d", depth=2)
    model = load(save(tmp_path / "a.npz", arrays, "params/"))
    assert model.config.positions == "sincos"
    assert "positions are sines and cosines" in model.load_report.assumptions[0]
    assert "224 x 224 px" in model.load_report.assumptions[0]
    images = pixels(*size, batch=1)
    agree(model, images, big_vision_vit(arrays, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz", "params/"), arrays)


def test_the_config_is_read_from_the_shapes(tmp_path: Path) -> None:
    arrays = big_vision(width=30, heads=5, depth=3, mlp=41, patch=7, grid=(3, 3), classes=11, pool="map")
    model = load(save(tmp_path / "a.npz", scanned(arrays)))
    expected = ViTConfig.of(
        width=30, heads=5, depth=3, mlp_dim=41, patch=7, image_size=(21, 21), classes=11, pool="map", gelu="tanh",
        cls_position=False,
    )  # fmt: skip
    assert model.config == expected == model.card.config
    assert model.card.source == "big_vision"
    assert model.card.preprocess == Preprocess((21, 21), resize="small", crop=0.875)
    assert model.load_report.assumptions == []


@pytest.mark.parametrize("rows", [12, 10])
def test_a_grid_that_is_not_square_is_an_assumption(rows: int, tmp_path: Path) -> None:
    arrays = big_vision(pool="tok", grid=(rows, 1))
    model = load(save(tmp_path / "a.npz", arrays))
    if rows == 12:
        assert model.config.grid == (3, 4)
        assert "12 positions, not a square number" in model.load_report.assumptions[0]
    else:  # a square and a row for the class token, as in older files
        assert model.config.grid == (3, 3)
        assert model.config.cls_position


SIZES = ((40, 24), (56, 64), (8, 16))
KINDS: list[dict[str, Any]] = [
    *({}, dict(pool="map"), dict(pool="tok"), dict(pool="tok", positions="old"), dict(pool="gap", depth=1))
]


@pytest.mark.parametrize(
    ("options", "size"),
    [(kind, size) for n, kind in enumerate(KINDS) for m, size in enumerate(SIZES) if MANY or (n + m) % 3 != 2],
)
def test_positions_are_resampled_as_officially(options: dict[str, Any], size: tuple[int, int], tmp_path: Path) -> None:
    arrays = big_vision(**options)
    path = save(tmp_path / "a.npz", arrays, "params/")
    images = pixels(*size)
    expected = big_vision_vit(arrays, images)
    agree(load(path), images, expected)
    agree(load(path, image_size=size), images, expected)


def test_it_is_told_from_googles_format_by_its_names(tmp_path: Path) -> None:
    assert load(save(tmp_path / "a.npz", google(naming=LINEN), "params/")).card.source == "google"
    assert load(save(tmp_path / "b.npz", big_vision(pool="tok"))).card.source == "big_vision"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(pool="map"),
        dict(pool="cls"),
        dict(pool="cls", cls_position=False),
        dict(positions="sincos"),
        dict(pool="cls", positions="sincos"),
        dict(pre_logits=12),
        dict(classes=0),
    ],
)
def test_a_model_of_ours_is_read_by_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    model = randomised(build(ViTConfig.of(**(TINY | changes))))
    FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    arrays = read(tmp_path / "a.npz", "params/")
    images = pixels(32, 32)
    agree(model, images, big_vision_vit(arrays, images))
    again = load(tmp_path / "a.npz")
    agree(again, images, big_vision_vit(arrays, images))
    unread = model.config.pool != "cls" or model.config.positions == "sincos"  # nothing has that row
    expected = replace(model.config, cls_position=model.config.cls_position and not unread)
    size = {"image_size": (224, 224)} if model.config.positions == "sincos" else {}
    assert again.config == expected.changed(**size)


def test_a_google_model_goes_into_big_visions_format(tmp_path: Path) -> None:
    model = load(save(tmp_path / "a.npz", google(), "opt/target/"))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    arrays = read(tmp_path / "b.npz", "params/")
    assert "pos_embedding" in arrays
    images = pixels(40, 32)
    agree(model, images, big_vision_vit(arrays, images))
    GOOGLE.write(load(tmp_path / "b.npz"), Card(model.config), tmp_path / "c.npz")
    identical(read(tmp_path / "c.npz"), google())


@pytest.mark.parametrize("pool", ["gap", "map"])
@pytest.mark.parametrize("stack", [False, True], ids=["layers", "scanned"])
def test_timm_reads_what_is_written(stack: bool, pool: str, tmp_path: Path) -> None:
    arrays = big_vision(pool=pool, mlp=96, depth=2)
    model = load(save(tmp_path / "a.npz", scanned(arrays) if stack else arrays, "params/"))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    peer = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=4, num_classes=7,
        act_layer="gelu_tanh", class_token=False, global_pool="avg" if pool == "gap" else "map", fc_norm=False,
    ).eval()  # fmt: skip
    peer.load_pretrained(str(tmp_path / "b.npz"))
    images = torch.from_numpy(pixels(32, 32)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        assert error(model(images).numpy(), peer(images).numpy()) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gelu="erf"), "does not store the kind of GELU"),
        (dict(norm_eps=1e-5), "epsilon of LayerNorm"),
        (dict(registers=2), "no place for 2 registers"),
        (dict(stem="resnet", stem_units=(1, 1)), r"no place for stem 'resnet' \(valid: linear\)"),
        (dict(positions="2d"), r"no place for positions '2d' \(valid: 1d, sincos\)"),
        (dict(pool="cls+gap"), r"no place for pool 'cls\+gap'"),
        (dict(pool="map", class_token=True), "a class token that pool 'map' does not read"),
        (dict(image_size=(32, 8)), "this model's grid of 4 x 1 would be read as 2 x 2"),
        (dict(image_size=(16, 40)), "this model's grid of 2 x 5 would be read as 3 x 3 and a row for the class token"),
    ],
)
def test_what_the_format_cannot_say_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build(ViTConfig.of(**(TINY | changes)))
    with pytest.raises(WeightsError, match=f"format 'big_vision' .*{message}"):
        FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []


SCANNED = "Transformer/encoderblock/"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (having(SCANNED + "LayerNorm_1/bias", 4, 24), "LayerNorm_1/bias' in shape .4, 24.; .* should be the 3 layers"),
        (having(SCANNED + "LayerNorm_1/bias", 3, 23), "LayerNorm_1/bias"),
        (
            without(SCANNED + "MlpBlock_0/Dense_1/bias"),
            "lacks the tensor 'Transformer/encoderblock/MlpBlock_0/Dense_1",
        ),
        (without("MAPHead_0/LayerNorm_0/bias"), "lacks the tensor 'MAPHead_0/LayerNorm_0/bias'"),
        (having("MAPHead_0/MultiHeadDotProductAttention_0/query/kernel", 24, 6, 4), "6 heads and the encoder has 3"),
        (having("cls", 1, 1, 24), "both 'cls' and a MAP head"),
        (having("pos_embedding", 1, 17, 24), "'pos_embedding' has 17 rows, one of them for a class token"),
        (having("pos_embedding", 4, 4, 24), "'pos_embedding'"),
        (having("embedding/kernel", 192, 24), "'embedding/kernel' in shape"),
        (having("probe", 1, 1, 24), "holds the tensor 'probe'"),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_the_name_of_the_tensor(
    change: Change, message: str, tmp_path: Path
) -> None:
    arrays = scanned(big_vision(pool="map"))
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        load(save(tmp_path / "a.npz", arrays))


def test_a_google_file_without_its_positions_is_not_taken_for_computed_ones(tmp_path: Path) -> None:
    arrays = google()
    del arrays["Transformer/posembed_input/pos_embedding"]
    with pytest.raises(WeightsError, match="lacks the tensor 'Transformer/posembed_input/pos_embedding'"):
        load(save(tmp_path / "a.npz", arrays))


def test_a_file_goes_back_as_it_came_even_through_a_folder_of_ours(tmp_path: Path) -> None:
    arrays = {name: to_bfloat16(array) for name, array in scanned(big_vision(pool="map", pre_logits=16)).items()}
    model = load(save(tmp_path / "a.npz", arrays, "params/img/"))
    save_model(model, tmp_path / "ours")
    save_model(load(tmp_path / "ours"), tmp_path / "b.npz", "big_vision")
    identical(read(tmp_path / "b.npz", "params/img/"), arrays)


@pytest.mark.nightly("test_computes_what_the_reference_does_and_goes_back_as_it_came, of small networks")
@pytest.mark.full_size
@pytest.mark.parametrize(("width", "depth"), [(768, 2), (96, 12)])
def test_full_size(width: int, depth: int, tmp_path: Path) -> None:
    """As wide as the published files, or as deep: both at once takes ten times as long."""
    sizes = dict(width=width, depth=depth, heads=12, mlp=4 * width)
    arrays = big_vision(**sizes, patch=16, grid=(14, 14), classes=1000, pool="map")
    arrays = {name: to_bfloat16(array) for name, array in scanned(arrays).items()}
    model = load(save(tmp_path / "a.npz", arrays, "params/img/"))
    images = pixels(224, 224, batch=1)
    agree(model, images, big_vision_vit({name: from_bfloat16(array) for name, array in arrays.items()}, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz", "params/img/"), arrays)
