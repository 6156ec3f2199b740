"""torchvision's ViTs: their files here, ours there, the same logits and the same tokens after every block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from block_outputs import block_outputs
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer, interpolate_embeddings

from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.torchvision import FORMAT

TINY = dict(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=128, mlp_dim=48, num_classes=5)


def peer(**changes: Any) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def saved(path: Path, **changes: Any) -> VisionTransformer:
    model = peer(**changes)
    torch.save(model.state_dict(), path)
    return model


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / theirs.norm()).item()


@torch.no_grad()
def assert_equal_to(model: nn.Module, theirs: VisionTransformer, tolerance: float = 1e-5) -> None:
    blocks: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _, __, out: blocks.append(out)) for layer in theirs.encoder.layers]
    images = torch.randn(2, 3, theirs.image_size, theirs.image_size)
    assert error(model(images), theirs(images)) < tolerance
    for layer, tokens in block_outputs(model, images).items():
        assert error(tokens, blocks[layer]) < tolerance, layer
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    "changes", [{}, dict(representation_size=24), dict(image_size=40), dict(patch_size=16, image_size=48)]
)
def test_a_file_computes_what_torchvision_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = saved(tmp_path / "a.pth", **changes)
    model = load(tmp_path / "a.pth")
    assert_equal_to(model, theirs)
    assert model.config.origin.norm_eps == 1e-6
    assert model.config.origin.gelu == "erf"
    assert model.config.pre_logits == theirs.representation_size
    assert model.card.source == "torchvision"
    assert "2 heads of 64 features" in str(model.load_report)
    assert not model.load_report.unused


@pytest.mark.parametrize("size", [48, 16])
def test_positions_are_resampled_as_torchvision_does(tmp_path: Path, size: int) -> None:
    small = saved(tmp_path / "a.pth")
    theirs = peer(image_size=size)
    theirs.load_state_dict(interpolate_embeddings(size, 8, small.state_dict()))
    assert_equal_to(load(tmp_path / "a.pth", image_size=size), theirs)
    assert_equal_to(load(tmp_path / "a.pth"), theirs)  # as the model runs


def test_images_that_are_not_square_see_positions_resampled_by_the_same_kernel(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "a.pth")
    model = load(tmp_path / "a.pth")
    images = torch.randn(2, 3, 32, 56)
    front, grid = theirs.encoder.pos_embedding[:, :1], theirs.encoder.pos_embedding[:, 1:]
    grid = grid.reshape(1, 4, 4, 128).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, size=(4, 7), mode="bicubic", align_corners=True)
    theirs.encoder.pos_embedding = nn.Parameter(torch.cat([front, grid.flatten(2).transpose(1, 2)], dim=1))
    with torch.no_grad():  # torchvision's forward pass, without its check of the size
        patches = theirs.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([theirs.class_token.expand(2, -1, -1), patches], dim=1)
        assert error(model(images), theirs.heads(theirs.encoder(tokens)[:, 0])) < 1e-5


def test_files_from_before_2022_are_read_and_written_as_they_were(tmp_path: Path) -> None:
    theirs = peer()
    new = theirs.state_dict()
    old = {name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for name, t in new.items()}
    torch.save(old, tmp_path / "old.pth")
    model = load(tmp_path / "old.pth")
    assert_equal_to(model, theirs)
    FORMAT.write(model, model.card, tmp_path / "again.pth")
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    assert again.keys() == old.keys()
    peer().load_state_dict(again)  # torchvision renames them itself


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("changes", [{}, dict(representation_size=24)])
def test_a_model_of_torchvision_goes_back_as_it_came(tmp_path: Path, changes: dict[str, Any], suffix: str) -> None:
    theirs = saved(tmp_path / "a.pth", **changes)
    model = load(tmp_path / "a.pth")
    FORMAT.write(model, model.card, tmp_path / f"b{suffix}")
    again = load(tmp_path / f"b{suffix}")
    assert again.config == model.config
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    if suffix == ".pth":
        tensors = torch.load(tmp_path / "b.pth", weights_only=True)
        assert tensors.keys() == theirs.state_dict().keys()
        assert all(torch.equal(value, tensors[key]) for key, value in theirs.state_dict().items())


@pytest.mark.parametrize("pre_logits", [None, 24])
def test_a_model_of_ours_opens_in_torchvision(tmp_path: Path, pre_logits: int | None) -> None:
    config = ViTConfig(
        width=128, depth=3, heads=2, mlp_dim=48, patch=8, image_size=(32, 32), classes=5, pre_logits=pre_logits
    )
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    FORMAT.write(model, Card(config), tmp_path / "ours.pth")
    theirs = VisionTransformer(**TINY, representation_size=pre_logits).eval()
    theirs.load_state_dict(torch.load(tmp_path / "ours.pth", weights_only=True), strict=True)
    assert_equal_to(model, theirs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(stem="hmlp"), "stem 'hmlp'"),
        (dict(channels=1), "its models take 3"),
        (dict(block="parallel", branches=2), "parallel blocks"),
        (dict(positions="sincos"), "positions 'sincos'"),
        (dict(place="every"), "at place 'every'"),
        (dict(cls_position=False), "a class token without a position"),
        (dict(pool="gap"), "pool 'gap'"),
        (dict(distilled=True), "a distillation token"),
        (dict(registers=1), "registers"),
        (dict(layer_scale=0.1), "LayerScale"),
        (dict(mlp="swiglu"), "a swiglu MLP"),
        (dict(gelu="tanh"), "GELU of kind 'tanh'"),
        (dict(norm_eps=1e-12), "epsilon 1e-12"),
        (dict(image_size=(32, 48)), "not square"),
        ({}, "no place for this model: its file does not say how many heads its 32 features are split into"),
    ],
)
def test_what_torchvision_cannot_express_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    values = dict(width=32, depth=1, heads=2, mlp_dim=48, patch=8, image_size=(32, 32), classes=5)
    model = build(ViTConfig.of(**{**values, **changes}))
    with pytest.raises(WeightsError, match=reason):
        FORMAT.write(model, Card(model.config), tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_resnet_is_refused(tmp_path: Path) -> None:
    config = ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32))
    with pytest.raises(WeightsError, match="it is a ResNet"):
        FORMAT.write(build(config), Card(config), tmp_path / "out.pth")


def test_what_a_file_does_not_determine_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "narrow.pth", hidden_dim=48)
    with pytest.raises(WeightsError, match="does not say how many heads its 48 features"):
        load(tmp_path / "narrow.pth")
    stem = [ConvStemConfig(16, 3, 2), ConvStemConfig(32, 3, 2), ConvStemConfig(64, 3, 2)]
    saved(tmp_path / "stem.pth", conv_stem_configs=stem)
    with pytest.raises(WeightsError, match="convolutional stem"):
        load(tmp_path / "stem.pth")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("vit_b_16", "IMAGENET1K_V1"),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"),
        ("vit_b_32", "IMAGENET1K_V1"),
        ("vit_l_16", "IMAGENET1K_V1"),
        ("vit_l_16", "IMAGENET1K_SWAG_E2E_V1"),
        ("vit_l_32", "IMAGENET1K_V1"),
        ("vit_h_14", "IMAGENET1K_SWAG_E2E_V1"),
        ("vit_h_14", "IMAGENET1K_SWAG_LINEAR_V1"),
    ],
)
def test_published_models_get_their_heads_and_their_preprocessing(tmp_path: Path, name: str, weights: str) -> None:
    published = torchvision.models.get_model_weights(name)[weights]
    transform = published.transforms()
    (size,), (resized,) = transform.crop_size, transform.resize_size
    with torch.device("meta"):
        shapes = torchvision.models.get_model(name, image_size=size).state_dict()
    theirs = {key: tuple(value.shape) for key, value in shapes.items()}
    found = FORMAT.find(Archive(tmp_path, "torch", theirs, {}.__getitem__))
    with torch.device("meta"):
        assert found.card.config.heads == torchvision.models.get_model(name).encoder.layers[0].num_heads
    preprocess = found.card.preprocess
    assert round(size / preprocess.crop) == resized
    assert preprocess.image_size == (size, size)
    assert preprocess.interpolation == transform.interpolation.value
    assert (found.card.config.mean, found.card.config.std) == (tuple(transform.mean), tuple(transform.std))


@pytest.mark.nightly("the same comparison of small networks in this file")
@pytest.mark.full_size
def test_the_same_at_full_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.vit_b_16().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    torch.save(theirs.state_dict(), tmp_path / "vit_b_16.pth")
    model = load(tmp_path / "vit_b_16.pth")
    assert_equal_to(model, theirs)
