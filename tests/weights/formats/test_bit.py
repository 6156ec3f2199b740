"""BiT's .npz against a NumPy forward pass written by the published names, and back into the same file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax_arrays import bit
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
from flax_reference import bit as reference
from timm.layers import StdConv2d
from timm.models.resnetv2 import ResNetV2

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.flax.bit import FORMAT
from vitrail.weights.load import load
from vitrail.weights.save import save as save_model

OPTIONS: dict[str, dict[str, Any]] = {
    "two stages": {},
    "features": dict(classes=None),
    "four stages": dict(units=(1, 2, 1, 1)),
    "wide": dict(units=(1, 1), width=64),
    "eleven units": dict(units=(11,)),
}


def numbered(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As TensorFlow saves a graph: the first layer of a kind is without a number, the others count on."""
    renamed = {}
    for place, (name, array) in enumerate(arrays.items()):
        for kind in ("standardized_conv2d", "group_norm"):
            name = name.replace(f"/{kind}/", f"/{kind}_{place // 3}/") if place > 5 else name
        renamed[name] = array
    return renamed


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [(64, 64), (37, 51)])
def test_computes_what_the_reference_does_and_goes_back_as_it_came(
    size: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    arrays = bit(**options)
    model = load(save(tmp_path / "a.npz", arrays))
    images = pixels(*size)
    agree(model, images, reference(arrays, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz"), arrays)


def test_the_epsilons_are_the_origins(tmp_path: Path) -> None:
    arrays = scaled(bit(), 1e-4, "standardized_conv2d/kernel")
    model = load(save(tmp_path / "a.npz", arrays))
    images = pixels(64, 64) * np.float32(1e-3)
    expected = reference(arrays, images)
    agree(model, images, expected)
    differs(model, images, expected, std_conv="timm")
    differs(model, images, expected, std_conv="hybrid")
    differs(model, images, expected, group_norm_eps=1e-6)


def test_numbered_layers(tmp_path: Path) -> None:
    arrays = bit()
    model = load(save(tmp_path / "a.npz", numbered(arrays)))
    assert any("conv2d_" in name for name in numbered(arrays))
    images = pixels(48, 32)
    agree(model, images, reference(arrays, images))
    save_model(model, tmp_path / "ours")
    save_model(load(tmp_path / "ours"), tmp_path / "b.npz", "bit")
    identical(read(tmp_path / "b.npz"), numbered(arrays))


def test_the_config_is_read_from_the_shapes(tmp_path: Path) -> None:
    model = load(save(tmp_path / "a.npz", bit(units=(1, 3, 2), width=64, classes=9)))
    assert model.config == ResNetConfig(units=(1, 3, 2), width=64, classes=9)
    assert (model.config.std_conv, model.config.group_norm_eps) == ("bit", 1e-5)
    assert model.card.source == "bit"
    assert model.card.preprocess == Preprocess((224, 224), resize="small", crop=0.875)
    assert "image size 224 px, because the file does not contain it" in str(model.load_report)


def test_a_thousand_classes_are_taken_for_a_fine_tuned_network(tmp_path: Path) -> None:
    model = load(save(tmp_path / "a.npz", bit(units=(1,), classes=1000)))
    assert model.config.image_size == (480, 480)
    assert model.card.preprocess == Preprocess((480, 480), resize="squash")
    assert "image size 480 px, because the file does not contain it (1000 classes: fine-tuned" in str(model.load_report)


def test_a_new_head_leaves_the_rest(tmp_path: Path) -> None:
    arrays = bit()
    model = load(save(tmp_path / "a.npz", arrays), classes=2)
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    written = read(tmp_path / "b.npz")
    assert written["resnet/head/conv2d/kernel"].shape == (1, 1, 256, 2)
    assert not written["resnet/head/conv2d/kernel"].any()
    rest = [{name: one for name, one in file.items() if "head" not in name} for file in (written, arrays)]
    identical(*rest)


@pytest.mark.parametrize("changes", [{}, dict(classes=0), dict(width=64, units=(1, 1, 1))])
def test_a_model_of_ours_is_read_by_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    model = randomised(build(ResNetConfig(**(dict(units=(1, 2), width=32, classes=4) | changes))))
    FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    images = pixels(40, 64)
    agree(model, images, reference(read(tmp_path / "a.npz"), images))


def test_timm_reads_what_is_written(tmp_path: Path) -> None:
    model = randomised(build(ResNetConfig(units=(1, 2), width=64, classes=4)))
    FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    peer = ResNetV2(
        layers=(1, 2), channels=(256, 512), num_classes=4, stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-10),
    ).eval()  # fmt: skip
    peer.load_pretrained(str(tmp_path / "a.npz"))
    images = torch.from_numpy(pixels(64, 48)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        assert error(model(images).numpy(), peer(images).numpy()) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(std_conv="timm"), "how kernels are standardised.*'timm'"),
        (dict(group_norm_eps=1e-6), "GroupNorm epsilon of 1e-5.*1e-06"),
        (dict(axial=True), "no place for axial attention"),
    ],
)
def test_what_the_format_cannot_say_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build(ResNetConfig(units=(1,), width=32, classes=2, image_size=(32, 32), **changes))
    with pytest.raises(WeightsError, match=f"format 'bit' .*{message}"):
        FORMAT.write(model, Card(model.config), tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_vision_transformer_is_refused(tmp_path: Path) -> None:
    model = build(ViTConfig(width=8, depth=1, heads=1, mlp_dim=8, patch=8, image_size=(8, 8), classes=1))
    with pytest.raises(WeightsError, match="Save a ViT as 'google'"):
        FORMAT.write(model, Card(model.config), tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("resnet/block1/unit02/b/group_norm/beta"), "lacks .*'resnet/block1/unit02/b/group_norm/beta'"),
        (without("resnet/block1/unit01/"), "has 'resnet/block1/unit02' but no 'resnet/block1/unit01'"),
        (without("resnet/block"), "ResNet without units: there is no resnet/block1/unit01"),
        (without("resnet/head/conv2d/kernel"), "'resnet/head/conv2d/bias'"),
        (having("resnet/block1/unit02/a/proj/standardized_conv2d/kernel", 1, 1, 128, 128), "unit02/a/proj"),
        (having("resnet/block1/unit02/b/standardized_conv2d/kernel", 1, 1, 32, 32), "unit02/b/standardized_conv2d"),
        (having("resnet/block1/unit02/b/standardized_conv2d_4/kernel", 3, 3, 32, 32), "which are the same layer"),
        (having("resnet/root_block/standardized_conv2d/kernel", 7, 7, 32), "should be \\(7, 7, channels, width\\)"),
        (having("global_step"), "holds the tensor 'global_step'"),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_the_name_of_the_tensor(
    change: Change, message: str, tmp_path: Path
) -> None:
    arrays = bit()
    change(arrays)
    with pytest.raises(WeightsError, match=message):
        load(save(tmp_path / "a.npz", arrays))


@pytest.mark.nightly("test_computes_what_the_reference_does_and_goes_back_as_it_came, of small networks")
@pytest.mark.full_size
def test_full_size(tmp_path: Path) -> None:
    arrays = bit(units=(3, 4, 6, 3), width=64, classes=1000)
    model = load(save(tmp_path / "a.npz", arrays))
    images = pixels(224, 224, batch=1)
    agrees_at_full_size(model, images, reference(arrays, images))
    FORMAT.write(model, model.card, tmp_path / "b.npz")
    identical(read(tmp_path / "b.npz"), arrays)
