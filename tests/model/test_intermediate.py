"""Maps of features from any layer: what timm's `forward_intermediates` returns for the same weights."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm_peers import FAMILIES, HYBRIDS, error, hub, images, peer, randomised, resized
from tiny_networks import fresh, tiny
from torch import Tensor, nn

import vitrail
from vitrail.errors import UsageError
from vitrail.model.build import freeze
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT

KINDS = {
    "plain": None,
    "not square": None,
    "no positions": None,
    "distilled": None,
    "registers with positions": None,
    "registers": (48, 24),
    "registers alone": None,
    "average, pooled norm": None,
    "average beside a class token": None,
    "DINOv2 with registers": (24, 40),
    "attention pooling": (48, 24),
    "parallel": None,
    "BEiT": (24, 40),
    "BEiT, class token": None,
    "R26": None,
    "root alone": (32, 64),
}
"""Kind -> size of the images in pixels, if it is not the configured one."""


def both(kind: str, folder: Path) -> tuple[ViT, nn.Module, Tensor]:
    """A network of ours, timm's, and images."""
    theirs, size = peer(kind), KINDS[kind]
    ours = vitrail.load(hub(theirs, folder))
    assert isinstance(ours, ViT)
    batch = images(ours, size).double()
    if size is not None:
        theirs = resized(theirs, size)
    return ours.double(), theirs.double(), batch


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.full_size] if k == "R26" else []) for k in KINDS])
def test_timms_intermediates(tmp_path: Path, kind: str) -> None:
    ours, theirs, batch = both(kind, tmp_path)
    for norm, reshape in itertools.product((False, True), repeat=2):
        expected = theirs.forward_intermediates(
            batch,
            None,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            return_prefix_tokens=True,
            intermediates_only=True,
        )
        found = ours.intermediate(batch, layers=None, norm=norm, reshape=reshape, prefix=True)
        assert len(found) == len(expected) == ours.config.depth
        for mine, their in zip(found, expected, strict=True):
            grid, front = their if ours.config.prefix else (their, torch.zeros(2, 0, ours.config.width))
            assert error(mine[0], grid) < 1e-8  # timm resizes BEiT's tables in float32
            assert mine[1].shape == front.shape and torch.allclose(mine[1], front.double(), atol=1e-8)
        for mine, alone in zip(found, ours.intermediate(batch, None, norm=norm, reshape=reshape), strict=True):
            assert torch.equal(mine[0], alone)


@pytest.mark.parametrize("layers", [1, 2, 12, [0], [-1], [-1, 0], [3, 3, -9], (11, 5), range(0, 12, 4)])
def test_which_layers(tmp_path: Path, layers: Any) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, embed_dim=32, num_heads=2)
    ours = vitrail.load(hub(randomised(theirs), tmp_path))
    batch = images(ours)
    for reshape in (False, True):
        found = ours.intermediate(batch, layers, reshape=reshape)
        expected = theirs.get_intermediate_layers(
            batch, layers if isinstance(layers, int) else list(layers), reshape=reshape
        )
        assert len(found) == len(expected)
        assert all(error(*pair) < 1e-5 for pair in zip(found, expected, strict=True))
    (last,) = ours.intermediate(batch)
    assert error(last, theirs.get_intermediate_layers(batch, 1, reshape=True)[0]) < 1e-5


@pytest.mark.full_size
def test_stages_of_a_resnet(tmp_path: Path) -> None:
    theirs = randomised(timm.create_model("resnetv2_50x1_bit", num_classes=5))
    ours, theirs = vitrail.load(hub(theirs, tmp_path)).double(), theirs.double()
    batch = images(ours, (33, 48)).double()
    for layers, norm in ((None, True), (1, False), (3, True), ([0, -1], False)):
        expected = theirs.forward_intermediates(batch, layers, norm=norm, intermediates_only=True)
        found = ours.intermediate(batch, layers, norm=norm)
        assert len(found) == len(expected)
        assert all(error(*pair) < 1e-9 for pair in zip(found, expected, strict=True)), (layers, norm)
        rows = ours.intermediate(batch, layers, norm=norm, reshape=False, prefix=True)
        for map_, (tokens, front) in zip(found, rows, strict=True):
            assert torch.equal(tokens, map_.flatten(2).mT) and front.shape == (2, 0, map_.shape[1])


def test_gradients_are_timms(tmp_path: Path) -> None:
    ours, theirs, batch = both("registers", tmp_path)
    left, right = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    sum(map_.square().sum() for map_ in ours.intermediate(left, 2, norm=True)).backward()  # type: ignore[union-attr]
    sum(map_.square().sum() for map_ in theirs.get_intermediate_layers(right, 2, norm=True)).backward()
    assert error(left.grad, right.grad) < 1e-9  # type: ignore[arg-type]
    name = "blocks.0.attentions.0.attention.qkv.weight"
    assert error(ours.get_parameter(name).grad, theirs.blocks[0].attn.qkv.weight.grad) < 1e-9  # type: ignore


@pytest.mark.parametrize(
    "config",
    [
        *(tiny(positions=kind) for kind in ("none", "1d", "2d", "sincos", "relative", "relative_bias")),
        *(tiny(positions="1d", place=place) for place in ("every", "shared")),
        *(tiny(pool=pool) for pool in ("gap", "map", "cls+gap")),
        tiny(block="axial", pool="gap"),
        tiny(block="parallel", branches=2),
        tiny(stem="hmlp"),
        ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(16, 16)),
    ],
)
def test_the_maps_lead_to_the_features(config: ViTConfig | ResNetConfig) -> None:
    """The last layer's tokens, pooled as the network pools them, are its features; a frozen copy returns the same."""
    model = fresh(config)
    assert isinstance(model, ViT | ResNet)
    frozen = freeze(copy.deepcopy(model))
    for batch in (torch.randn(2, 3, 16, 16), torch.randint(0, 256, (2, 3, 24, 8), dtype=torch.uint8)):
        ((map_, front),) = model.intermediate(batch, norm=True, prefix=True)
        tokens = torch.cat([front, map_.flatten(2).mT], 1)
        pooled = tokens.mean(1) if isinstance(model, ResNet) else model.summary(tokens)
        assert torch.allclose(pooled, model.features(batch), atol=1e-5)
        with torch.inference_mode():
            for mine, other in zip(model.intermediate(batch, None), frozen.intermediate(batch, None), strict=True):
                assert error(other, mine) < 1e-5


def test_only_the_needed_layers_run() -> None:
    model, ran = fresh(tiny(depth=4)), []
    assert isinstance(model, ViT)
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    model.intermediate(images(model), [1])
    assert ran == [0, 1]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (2, None),
        (3, r"layers is 3; valid: 1 to 2, for the last layers, or a list of numbers from -2 to 1"),
        (0, r"layers is 0; valid: 1 to 2"),
        (-1, r"layers is -1; valid"),
        ([], r"layers is \[\]; valid"),
        ([0, 2], r"there is no layer 2: .* numbered 0 to 1"),
        ([-3], r"there is no layer -3"),
        ("12", r"layers is '12'; valid"),
        ([0.5], r"there is no layer 0.5"),
    ],
)
def test_wrong_layers(layers: Any, message: str | None) -> None:
    model = fresh(tiny())
    assert isinstance(model, ViT)
    if message is None:
        assert len(model.intermediate(images(model), layers)) == layers
    else:
        with pytest.raises(UsageError, match=message):
            model.intermediate(images(model), layers)


def test_a_resnet_names_its_stages_as_valid() -> None:
    model = fresh(ResNetConfig(units=(1, 1), width=32, classes=3))
    assert isinstance(model, ResNet)
    with pytest.raises(UsageError, match=r"there is no layer 3: this model has 3, numbered 0 to 2"):
        model.intermediate(torch.zeros(1, 3, 32, 32), [3])


@pytest.mark.export
def test_compiled_and_under_autocast(tmp_path: Path) -> None:
    ours, _, batch = both("plain", tmp_path)
    ours, batch = ours.float(), batch.float()
    expected = ours.intermediate(batch, 2)
    compiled = torch.compile(lambda x: ours.intermediate(x, 2), backend="eager", fullgraph=True)
    assert all(error(*pair) < 1e-5 for pair in zip(compiled(batch), expected, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(
            error(left.float(), right) < 0.05 for left, right in zip(ours.intermediate(batch, 2), expected, strict=True)
        )


assert set(KINDS) <= FAMILIES.keys() | HYBRIDS.keys()
