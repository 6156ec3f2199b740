"""A frozen copy computes what the model computes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from vitrail.model.build import build, freeze
from vitrail.model.fast.frozen import FrozenBlock, Packed, Plain
from vitrail.model.fast.layers import on_onednn
from vitrail.model.stdconv import StdConv2d
from vitrail.model.variants import ResNetConfig, ViTConfig

TINY = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if on_onednn(torch.zeros(1), dtype)]
"""The types in which oneDNN multiplies packed matrices on this processor."""


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(pool="gap"),
        dict(pool="map", positions="sincos"),
        dict(registers=2, layer_scale=0.3),
        dict(positions="relative"),
        dict(positions="relative_bias"),
        dict(positions="relative_bias", pool="gap", class_token=True, final_norm="pooled"),
        dict(distilled=True),
        dict(pool="cls+gap", mlp="swiglu", layer_scale=0.3),
        dict(final_norm="pooled"),
        dict(place="every", gelu="tanh"),
        dict(gelu="quick"),
        dict(block="parallel", branches=2),
        dict(block="parallel", branches=3, layer_scale=0.3, positions="relative"),
        dict(block="parallel", branches=2, mlp="swiglu", positions="relative_bias", pool="gap"),
        dict(block="axial", pool="gap"),
        dict(stem="hmlp"),
        dict(stem="resnet", stem_units=(1,)),
        dict(pre_logits=16),
        dict(segmentation="linear"),
        dict(segmentation="layers", registers=1),
    ],
)
def test_the_same_logits_and_features(options: dict) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**(TINY | options)))
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    images = torch.randint(0, 256, (3, 3, 32, 40), dtype=torch.uint8)
    with torch.no_grad():
        expected, features = model(images), model.features(images)
        exact, found = freeze(model)(images), freeze(model).features(images)
        portable = freeze(model, portable=True).features(images)
        rounded = freeze(model, torch.bfloat16)(images)
    for ours in (found, portable):
        assert ((ours - features).norm() / features.norm()).item() < 1e-5
    assert ((exact - expected).norm() / expected.norm()).item() < 1e-5
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - expected).norm() / expected.norm()).item() < 0.05
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", PACKED)
def test_a_frozen_network_is_pickled_and_copied(dtype: torch.dtype) -> None:
    frozen = freeze(build(ViTConfig.of(**TINY)), dtype)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    for other in (pickle.loads(pickle.dumps(frozen)), copy.deepcopy(frozen)):
        assert any(isinstance(module, Packed) for module in other.modules())
        with torch.no_grad():
            assert torch.equal(other.features(images), frozen.features(images))


@pytest.mark.parametrize("form", ["bit", "hybrid", "timm"])
def test_kernels_of_a_resnet_are_standardised_once(form: str) -> None:
    torch.manual_seed(0)
    model = build(ResNetConfig(units=(1, 1), width=8, classes=3, std_conv=form)).eval()  # type: ignore[arg-type]
    torch.nn.init.normal_(model.head.weight)
    images = torch.randint(0, 256, (2, 3, 24, 40), dtype=torch.uint8)
    frozen = freeze(model)
    with torch.no_grad():
        torch.testing.assert_close(frozen(images), model(images))
    kernels = [module for module in frozen.modules() if isinstance(module, StdConv2d)]
    assert len(kernels) == 9 and all(kernel.standardised() is kernel.weight for kernel in kernels)
    assert all(module.form == form for module in model.modules() if isinstance(module, StdConv2d))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", PACKED)
def test_a_portable_copy_has_torchs_own_layers(portable: bool, dtype: torch.dtype) -> None:
    frozen = freeze(build(ViTConfig.of(**TINY)), dtype, portable=portable)
    assert any(isinstance(module, Packed) for module in frozen.modules()) != portable
    assert all(isinstance(block, FrozenBlock) for block in frozen.blocks)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("dtype", PACKED)
def test_blocks_are_packed_and_joined_where_that_pays(branches: int, dtype: torch.dtype) -> None:
    block = "parallel" if branches > 1 else "sequential"
    frozen = freeze(build(ViTConfig.of(**TINY, block=block, branches=branches)), dtype)
    assert all(isinstance(block, FrozenBlock) for block in frozen.blocks)
    joined = branches > 1 and dtype == torch.bfloat16
    assert {len(block.attentions) for block in frozen.blocks} == {1 if joined else branches}
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.parametrize("num_queries", [None, 1])
def test_a_frozen_block_of_other_devices_computes_the_same(num_queries: int | None) -> None:
    model = build(ViTConfig.of(**TINY, block="parallel", branches=3, layer_scale=0.3)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    x, places = torch.randn(2, 17, 32), torch.arange(16)
    with torch.no_grad():
        expected = model.blocks[1](x, places, (4, 4), num_queries)
        for together in (False, True):
            block = FrozenBlock(
                model.blocks[1], model.positions, torch.float32, Plain, last=num_queries is not None, together=together
            )
            torch.testing.assert_close(block(x, places, (4, 4), num_queries), expected, rtol=1e-4, atol=1e-5)
