"""Folders of transformers read here, and written here and opened by transformers: the same keys, logits and blocks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_peers import CASES, assert_equal_to, computed, error, images_for, randomise, saved
from random_inputs import MANY
from safetensors.torch import load_file
from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.hf.format import FORMAT
from vitrail.weights.load import load


def opened(folder: Path) -> nn.Module:
    """The model in a folder as transformers opens it, which finds every key and no other."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    names = load_file(folder / "model.safetensors")
    bare = architecture in ("ViTModel", "DeiTModel") and not any("pooler" in name for name in names)
    kwargs = dict(add_pooling_layer=False) if bare else {}
    cls = getattr(transformers, architecture)
    model, info = cls.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert {kind: found for kind, found in info.items() if found} == {}
    if architecture == "ViTMAEModel":
        model.config.mask_ratio = 0.0
    return model.eval()


def assert_opens(folder: Path, model: nn.Module, size: tuple[int, int] | None = None) -> None:
    theirs = opened(folder)
    images = images_for(theirs, *(size or model.config.image_size))
    expected, _ = computed(theirs, images)
    with torch.no_grad():
        assert error(model(images), expected) < 1e-5


def effect(preprocess: Preprocess) -> tuple[object, ...]:
    """What a preprocessing does: a crop is known by the whole pixels it is cut from."""
    height, width = preprocess.image_size
    # rounded down as transformers and timm do; a crop of 32 / 36 is not exact
    covered = [math.floor(side / preprocess.crop + 1e-6) for side in (height, width)]
    small = preprocess.resize == "small"
    return preprocess.image_size, preprocess.resize, covered if small else None, preprocess.interpolation


OTHERS = ((48, 48), (32, 56), (24, 24))
"""Sizes of images by turns: a larger, an oblong and a smaller table of positions."""


@pytest.mark.parametrize(("number", "name"), [pytest.param(*case, id=case[1]) for case in enumerate(CASES)])
def test_a_model_of_transformers_computes_the_same_and_goes_back_as_it_came(
    tmp_path: Path, number: int, name: str
) -> None:
    theirs = saved(tmp_path / "theirs", name)
    model = load(tmp_path / "theirs")
    fixed = name in ("aimv2", "aimv2-biased")  # these take no other size
    others = OTHERS if MANY else (OTHERS[number % 3],)
    assert_equal_to(model, theirs, [(32, 32)] if fixed else [(32, 32), *others])
    assert model.card.source == model.load_report.format == "hf"
    assert set(model.load_report.loaded) == {key for key in model.state_dict() if key not in model.load_report.missing}
    FORMAT.write(model, model.card, tmp_path / "ours")
    assert_opens(tmp_path / "ours", model)
    before, after = (load_file(tmp_path / whose / "model.safetensors") for whose in ("theirs", "ours"))
    if name == "msn":  # transformers 5.23 saves its blocks without the prefix of the released files
        before = {"vit." * tensor.startswith("encoder.") + tensor: value for tensor, value in before.items()}
    unused = model.load_report.unused.keys()
    assert after.keys() - unused == before.keys() - unused
    for tensor in after.keys() - unused:
        assert torch.equal(after[tensor], before[tensor]), tensor
    again = load(tmp_path / "ours")
    assert again.config == model.config
    assert again.card.class_names == model.card.class_names
    assert effect(again.card.preprocess) == effect(model.card.preprocess)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["vit", "vit-tanh", "deit-taught", "beit", "dinov2-swiglu", "dinov2-registers"])
def test_config_json_goes_back_as_it_came(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "theirs", name)
    model = load(tmp_path / "theirs")
    FORMAT.write(model, model.card, tmp_path / "ours")
    before, after = (json.loads((tmp_path / whose / "config.json").read_text()) for whose in ("theirs", "ours"))
    assert {key: after[key] for key in before} == before


def ours(**changes: Any) -> nn.Module:
    values = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(32, 32), classes=3)
    model = build(ViTConfig.of(**{**values, **changes}))
    randomise(model)
    return model


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "ViTForImageClassification"),
        (dict(gelu="tanh", norm_eps=1e-5), "ViTForImageClassification"),
        (dict(image_size=(32, 48), channels=1), "ViTForImageClassification"),
        (dict(classes=0), "ViTModel"),
        (dict(classes=0, pre_logits=16), "ViTModel"),
        (dict(distilled=True), "DeiTForImageClassificationWithTeacher"),
        (dict(registers=1, register_positions=True), "DeiTForImageClassification"),
        (dict(layer_scale=0.1), "BeitForImageClassification"),
        (dict(layer_scale=0.1, classes=0), "Dinov2Model"),
        # MAE fine-tuned: mean of the patches, then the norm
        (dict(pool="gap", class_token=True, final_norm="pooled"), "BeitForImageClassification"),
        (
            dict(pool="gap", class_token=True, final_norm="pooled", positions="relative_bias", layer_scale=0.1),
            "BeitForImageClassification",
        ),
        (dict(positions="relative_bias", place="shared"), "BeitForImageClassification"),
        (dict(positions="none", classes=0), "BeitModel"),
        (dict(pool="cls+gap", layer_scale=0.1), "Dinov2ForImageClassification"),
        (dict(pool="cls+gap", layer_scale=0.1, mlp="swiglu", mlp_dim=88), "Dinov2ForImageClassification"),
        (dict(pool="cls+gap", layer_scale=0.1, registers=4), "Dinov2WithRegistersForImageClassification"),
        (dict(registers=2, layer_scale=0.1, classes=0), "Dinov2WithRegistersModel"),
        (dict(pool="gap", gelu="quick"), "IJepaForImageClassification"),
        (dict(pre_norm=True, classes=0), "CLIPVisionModel"),
        (dict(pre_norm=True, pool="gap", class_token=True, final_norm="none"), "CLIPForImageClassification"),
        (dict(pool="map", classes=0, gelu="tanh"), "SiglipVisionModel"),
    ],
)
def test_a_model_of_ours_opens_in_transformers(tmp_path: Path, changes: dict[str, Any], architecture: str) -> None:
    model = ours(**changes)
    names = ["a", "b", "c"] if model.config.classes else []
    card = Card(model.config, names, Preprocess(model.config.image_size, "squash"))
    FORMAT.write(model, card, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    assert_opens(tmp_path, model)
    again = load(tmp_path)
    images = torch.randn(1, model.config.channels, *model.config.image_size)
    with torch.no_grad():
        assert error(again(images), model(images)) < 1e-5
    assert again.card.class_names == names
    assert again.card.preprocess == card.preprocess


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(stem="hmlp"), r"no encoder of transformers has stem 'hmlp' \(valid: linear\)"),
        (dict(block="parallel", branches=2), "no encoder of transformers has parallel blocks"),
        (dict(pool="map"), "SiglipVisionModel has a classifier that reads the mean of the patches"),
        (dict(pool="gap", final_norm="pooled"), "IJepaModel has no place for a norm after the pooling"),
        (dict(pre_norm=True, pool="gap", class_token=True), "its classifier reads the mean of the patches as it is"),
        (dict(pre_norm=True), "a layer with a bias, and the projection of CLIPVisionModelWithProjection has none"),
        (dict(norm_after=True), "no encoder of transformers has norms behind attention and MLP"),
        (dict(pool="gap", class_token=True), "no mean of normalised tokens"),
        (dict(cls_position=False), "ViTModel has no place for a class token without a position"),
        (dict(place="every"), r"no encoder of transformers has positions at place 'every' \(valid: input\)"),
        (dict(positions="2d"), "no encoder of transformers has positions '2d'"),
        (dict(positions="sincos"), "ViTModel has no place for positions 'sincos'"),
        (dict(positions="relative"), "no encoder of transformers has positions 'relative'"),
        (dict(pre_logits=16), "pre-logits layer in front of a classifier"),
        (dict(positions="relative_bias", image_size=(32, 48)), "not square"),
        (dict(pool="cls+gap"), "Dinov2Model needs LayerScale"),
        (dict(registers=2, layer_scale=0.1), "reads the class token and the mean"),
        (dict(pool="cls+gap", layer_scale=0.1, mlp_dim=65), "which 65 is not"),
        (dict(registers=2, register_positions=True), "one token between the class token and the grid"),
        (dict(distilled=True, layer_scale=0.1), "DeiTModel has no place for LayerScale"),
    ],
)
def test_what_transformers_cannot_express_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    model = ours(**changes)
    with pytest.raises(WeightsError, match=reason):
        FORMAT.write(model, Card(model.config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_resnet_is_refused(tmp_path: Path) -> None:
    config = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32))
    with pytest.raises(WeightsError, match="it is a ResNet"):
        FORMAT.write(build(config), Card(config), tmp_path / "out")


@pytest.mark.full_size
@pytest.mark.parametrize("name", ["vit", "vit-masked", "vit-bare", "beit", "beit-masked", "mae", "deit", "deit-taught"])
def test_a_new_head_is_written_too(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "theirs", name)
    model = load(tmp_path / "theirs", classes=5)
    randomise(model)
    FORMAT.write(model, model.card, tmp_path / "ours")
    assert_opens(tmp_path / "ours", model)
    assert load(tmp_path / "ours").config.classes == 5


@pytest.mark.parametrize("name", ["vit", "beit"])
def test_another_resolution_is_written_too(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "theirs", name)
    model = load(tmp_path / "theirs", image_size=48)
    FORMAT.write(model, model.card, tmp_path / "ours")
    assert_opens(tmp_path / "ours", model, (48, 48))


def test_biases_that_were_trained_since_are_written(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", "vit-biasless")
    model = load(tmp_path / "theirs")
    with torch.no_grad():
        model.blocks[1].attentions[0].attention.qkv.bias[3] = 0.5
    FORMAT.write(model, model.card, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["qkv_bias"] is True
    assert_opens(tmp_path / "ours", model)
