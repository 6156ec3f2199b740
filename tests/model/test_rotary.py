"""Rotary positions: the angles are timm's, and every way of computing attention rotates alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    apply_rot_embed_cat,
    init_random_2d_freqs,
)
from torch import nn

from vitrail.errors import UsageError
from vitrail.inspection.positions import position_tiles
from vitrail.inspection.relevance import relevance
from vitrail.inspection.rollout import rollout
from vitrail.model.build import build, freeze
from vitrail.model.compute import attention_path
from vitrail.model.fast.frozen import FrozenBlock
from vitrail.model.record import attention_maps
from vitrail.model.regroup import regroup
from vitrail.model.rotary import RotaryPositions, Rotation
from vitrail.model.variants import Rotary, ViTConfig
from vitrail.model.vit import ViT

DINOV3 = Rotary(base=100.0, coordinates="centred", pairs="halves")
TINY: dict[str, Any] = dict(
    width=32, depth=2, heads=2, mlp_dim=48, patch=8, image_size=32, classes=5, positions="none", rotary=DINOV3
)


def random(**changes: Any) -> ViT:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**(TINY | changes)))
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def rotation(settings: Rotary, grid: tuple[int, int], layer: int = 0, prefix: bool = False) -> Rotation:
    config = ViTConfig.of(**(TINY | dict(rotary=settings, pool="cls" if prefix else "gap")))
    module = RotaryPositions(config, settings)
    module.reset_parameters()
    return module(layer, torch.arange(grid[0] * grid[1]), grid)


AXIAL: list[tuple[nn.Module, Rotary]] = [
    (RotaryEmbeddingCat(16, in_pixels=False, feat_shape=(3, 4), ref_feat_shape=(16, 16)), Rotary(reference=(16, 16))),
    (
        RotaryEmbeddingCat(
            16, in_pixels=False, feat_shape=(3, 4), ref_feat_shape=(9, 7), grid_offset=1.0, grid_indexing="xy"
        ),
        Rotary(reference=(9, 7), offset=1.0, first="column"),
    ),
    (RotaryEmbeddingCat(16, in_pixels=False, feat_shape=(3, 4), temperature=100.0), Rotary(base=100.0)),
    (RotaryEmbeddingCat(16, in_pixels=False, feat_shape=(3, 4), rotate_half=True), Rotary(pairs="halves")),
    (RotaryEmbeddingDinoV3(16, temperature=100.0, feat_shape=(3, 4)), DINOV3),
    (
        RotaryEmbeddingDinoV3(16, feat_shape=(3, 4), grid_offset=0.3, rotate_half=False, grid_indexing="xy"),
        replace(DINOV3, offset=0.3, pairs="neighbours", first="column"),
    ),
]


@pytest.mark.parametrize(("theirs", "settings"), AXIAL, ids=lambda v: str(v)[:60])
def test_axial_angles_are_timms(theirs: nn.Module, settings: Rotary) -> None:
    x = torch.randn(2, 2, 12, 16)
    expected = apply_rot_embed_cat(x, theirs.get_embed(), half=settings.pairs == "halves")
    found = rotation(settings, (3, 4)).turn(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_mixed_angles_and_their_start_are_timms() -> None:
    theirs = RotaryEmbeddingMixed(32, 2, 2, feat_shape=(3, 4), grid_indexing="xy", temperature=10.0)
    settings = Rotary("mixed", base=10.0, first="column")
    module = RotaryPositions(ViTConfig.of(**(TINY | dict(rotary=settings, pool="gap"))), settings)
    assert module.frequencies is not None
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    torch.testing.assert_close(module.frequencies.transpose(0, 1), init_random_2d_freqs(16, 2, 2, temperature=10.0))
    theirs.freqs.data.copy_(module.frequencies.transpose(0, 1))
    x = torch.randn(2, 2, 12, 16)
    for layer in range(2):
        expected = apply_rot_embed_cat(x, theirs.get_embed()[layer])
        found = module(layer, torch.arange(12), (3, 4)).turn(x.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


KINDS: list[dict[str, Any]] = [
    dict(registers=2, key_bias=False, layer_scale=0.5),
    dict(rotary=Rotary(reference=(16, 16)), positions="1d", mlp="swiglu", key_bias=False),
    dict(rotary=Rotary(), mlp="swiglu", mlp_norm=True, attention_norm=True, pool="gap", class_token=True),
    dict(rotary=Rotary("mixed", base=10.0, first="column")),
    dict(rotary=Rotary("mixed", base=10.0), block="parallel", branches=2),
    dict(block="parallel", branches=2, pool="map"),
    dict(block="axial", pool="gap"),
    dict(rotary=None, key_bias=False, attention_norm=True),
    dict(qk_norm="head", registers=2),
    dict(qk_norm="head", block="parallel", branches=2),
    dict(qk_norm="width", norm="rms", rotary=None, key_bias=False),
]


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_every_way_of_computing_gives_the_same(changes: dict[str, Any]) -> None:
    """The fused and the explicit path, all tokens of the last layer, wide branches, and frozen copies."""
    model, images = random(**changes), torch.randn(3, 3, 32, 40)
    results = {}
    for path in ("fused", "explicit"):
        with attention_path(path):  # type: ignore[arg-type]
            model.zero_grad()
            results[path] = model(images)
            results[path].square().sum().backward()
            results[f"{path} gradient"] = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
            results[f"{path}, every token"] = model.classify(
                model.summary(model.encode(model.embed(images), model.grid(images)))
            )
            results[f"{path}, frozen"] = freeze(model)(images)
            results[f"{path}, portable"] = freeze(model, portable=True)(images)
            hook = model.blocks[1].register_forward_hook(lambda *_: None)  # then no layer skips tokens
            results[f"{path}, hooked"] = model(images)
            hook.remove()
    for name, found in results.items():
        expected = results["fused gradient" if "gradient" in name else "fused"]
        assert (found - expected).norm() < 1e-5 * expected.norm(), name


def test_a_frozen_copy_folds_the_blocks_of_networks_without_inner_norms() -> None:
    assert isinstance(freeze(random(), portable=True).blocks[0], FrozenBlock)
    assert not isinstance(freeze(random(attention_norm=True), portable=True).blocks[0], FrozenBlock)


def test_some_tokens_keep_their_rotation() -> None:
    """Masked pre-training: visible patches in any order attend to each other as in a network of all patches."""
    model, images = random(depth=1, registers=1), torch.randn(2, 3, 32, 32)
    keep = torch.tensor([[0, 5, 11], [7, 2, 3]])
    tokens = model.embed(images)
    maps = attention_maps(model, images)[0].maps
    seen: list[torch.Tensor] = []
    attention = model.blocks[0].attentions[0].attention
    hook = attention.register_forward_pre_hook(lambda module, inputs: seen.append(module.maps(*inputs[:2])))
    model.encode(tokens, keep=keep)
    hook.remove()
    for image, kept in enumerate(keep):
        at = torch.cat([torch.arange(2), 2 + kept])
        part = maps[image][:, at][:, :, at]
        torch.testing.assert_close(seen[0][image], part / part.sum(-1, keepdim=True))


def test_a_bias_of_keys_that_is_not_there_never_matters_nor_learns() -> None:
    model, images = random(key_bias=False), torch.randn(2, 3, 32, 32)
    before, qkv = model(images), model.blocks[0].attentions[0].attention.qkv
    before.sum().backward()
    assert qkv.bias.grad[32:64].abs().max() == 0 < qkv.bias.grad[:32].abs().min()
    with torch.no_grad():
        qkv.bias[32:64] += 1
    assert torch.equal(model(images), before)
    hook = qkv.register_forward_hook(lambda *_: None)  # then the layer is called
    torch.testing.assert_close(model(images), before)
    hook.remove()
    other = random(key_bias=True)
    with torch.no_grad():
        unlike = other(images)
        other.blocks[0].attentions[0].attention.qkv.bias[32:64] += 1
        assert (other(images) - unlike).abs().max() > 1e-3  # with rotary positions, the softmax does not remove it


def test_maps_rollout_relevance_and_tiles() -> None:
    for changes in (dict(), dict(attention_norm=True, registers=2)):
        model, images = random(**changes), torch.randn(2, 3, 32, 32)
        maps = [found.maps for found in attention_maps(model, images)]
        hidden = model.blocks[0].attentions[0].norm(model.embed(images))
        attention = model.blocks[0].attentions[0].attention
        q, k, _ = attention.project(hidden).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        count = hidden.shape[1] - model.config.prefix
        turn = model.positions.rotation(0, torch.arange(count), model.config.grid)
        assert turn is not None
        q, k = (turn.turn(part.transpose(1, 2)).transpose(1, 2) for part in (q, k))
        torch.testing.assert_close(maps[0], (q @ k.transpose(-1, -2)).softmax(-1))
        assert torch.isfinite(rollout(model, images)).all()
        assert torch.isfinite(relevance(model, images).shares).all()
    tiles = position_tiles(random())
    assert tiles.values.shape == (4, 4, 4, 4) and "rotary" in tiles.about
    assert tiles.values[1, 2, 1, 2] == pytest.approx(1)
    assert tiles.values[1, 2, 1, 3] == pytest.approx(tiles.values[1, 3, 1, 2]) and tiles.values[0, 0, 3, 3] < 0.9


def test_values_that_do_not_fit_are_refused() -> None:
    for wrong, message in (
        (dict(reference=(0, 3)), "rows and columns"),
        (dict(coordinates="centred", reference=(3, 3)), "no scale"),
        (dict(frequencies="mixed", offset=1.0), "mixed"),
        (dict(base=0.0), "rotary.base"),
    ):
        with pytest.raises(UsageError, match=message):
            Rotary(**wrong)
    with pytest.raises(UsageError, match="multiple of 4 features"):
        ViTConfig.of(**(TINY | dict(heads=16)))
    with pytest.raises(UsageError, match="mlp 'swiglu'"):
        ViTConfig.of(**(TINY | dict(mlp_norm=True)))
    with pytest.raises(UsageError, match="mixed rotary frequencies"):
        regroup(random(rotary=Rotary("mixed")), 2)
    assert regroup(random(), 2).config.origin.rotary == DINOV3


def test_a_cached_table_is_never_that_of_a_count() -> None:
    """Counting runs on tensors without values, which must not be kept for networks that run."""
    from vitrail.costs.count import activation_bytes, macs

    config = ViTConfig.of(**(TINY | dict(image_size=(8 * 5, 8 * 7))))
    assert macs(config) == macs(config.changed(rotary=None)) and activation_bytes(config, place="cpu") > 0
    assert torch.isfinite(build(config)(torch.randn(1, 3, 40, 56))).all()
