"""timm's own networks, read and written: what they compute, at their own size and at others, is what ours compute."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from timm.layers import RmsNorm
from timm.models.vision_transformer import ParallelThingsBlock
from timm_peers import (
    FAMILIES,
    HYBRIDS,
    PLAIN,
    TINY,
    assert_equal,
    assert_equal_in_double,
    assert_same_tensors,
    bit,
    error,
    hub,
    images,
    peer,
    randomised,
    rebuilt,
    resized,
)

from vitrail.data.settings import Preprocess
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.timm.format import FORMAT

OURS = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(32, 32), classes=5)
SQUARE = ("plain", "registers with positions", "attention pooling", "AIMv2", "BEiT", "BEiT, absolute")
"""Kinds that are compared at a square size, too: each has another table of positions."""
WIDE = dict(embed_dim=128)  # two heads of 64, the number that a bare file is taken to have


def sizes(model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """A square and another size in pixels, neither the model's own; one side grows where the other shrinks."""
    (rows, columns), patch = model.config.grid, model.config.patch
    side = max(rows, columns) + 2
    return (side * patch, side * patch), ((rows + 1) * patch, max(columns - 1, 1) * patch)


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.full_size) for kind in HYBRIDS)])
def test_a_folder_computes_what_timm_computes_at_any_size_and_goes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    theirs = peer(kind)
    folder = hub(theirs, tmp_path / "a")
    ours = load(folder)
    assert isinstance(ours, ViT) and ours.card.source == "timm" and ours.config.origin.resize_mode == "timm"
    norm = next(part for part in theirs.blocks.modules() if isinstance(part, torch.nn.LayerNorm | RmsNorm))
    assert ours.config.origin.norm_eps == norm.eps
    same = assert_equal_in_double if ours.config.stem_units else assert_equal
    same(ours, theirs, images(ours))
    FORMAT.write(ours, ours.card, tmp_path / "b")
    assert_same_tensors(tmp_path / "b" / "model.safetensors", theirs)
    assert error(rebuilt(tmp_path / "b")(images(ours)), theirs(images(ours))) < 1e-6
    again = load(tmp_path / "b")
    assert again.config == ours.config and again.card.preprocess == ours.card.preprocess
    if kind in FAMILIES:
        assert_resampled(kind, folder, ours, theirs)


def test_other_sizes_of_a_hybrid_are_resampled_as_timm_does(tmp_path: Path) -> None:
    theirs = peer("root alone")
    folder = hub(theirs, tmp_path)
    assert_resampled("root alone", folder, load(folder), theirs)


def assert_resampled(kind: str, folder: Path, ours: Any, theirs: torch.nn.Module) -> None:
    """At other sizes, a folder computes what timm does."""
    for size in sizes(ours)[kind not in SQUARE :]:
        other, batch = resized(theirs, size), images(ours, size)
        assert_equal(load(folder, image_size=size), other, batch)  # resampled once, at loading
        assert_equal(ours, other, batch)  # and as the model runs


@pytest.mark.parametrize("kind", ["plain", "registers", "registers with positions", "distilled", "DeiT-III"])
def test_any_size_equals_timms_dynamic_one(kind: str, tmp_path: Path) -> None:
    theirs = peer(kind, dynamic_img_size=True)
    ours = load(hub(theirs, tmp_path))
    for size in sizes(ours):
        assert_equal(ours, theirs, images(ours, size))


@pytest.mark.full_size
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 4), patch=st.sampled_from([3, 4, 8]), heads=st.integers(1, 3),
    depth=st.integers(1, 3), registers=st.integers(0, 3), embed=st.booleans(), beit=st.booleans(),
)  # fmt: skip
def test_any_shape(
    rows: int, columns: int, patch: int, heads: int, depth: int, registers: int, embed: bool, beit: bool
) -> None:
    shape: dict[str, Any] = dict(img_size=(rows * patch, columns * patch), patch_size=patch, depth=depth)
    shape |= dict(embed_dim=12 * heads, num_heads=heads)
    kind = "BEiT" if beit else "plain"
    theirs = peer(kind, **shape, **({} if beit else dict(reg_tokens=registers, no_embed_class=not embed)))
    with tempfile.TemporaryDirectory() as folder:
        ours = load(hub(theirs, Path(folder) / "a"))
        assert_equal(ours, theirs, images(ours))
        FORMAT.write(ours, ours.card, Path(folder) / "b")
        assert_same_tensors(Path(folder) / "b" / "model.safetensors", theirs)


@pytest.mark.full_size
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(
    "kind", ["plain", "distilled", "registers", "DeiT-III", "DINOv2", "gated", "parallel", "BEiT", "no bias", "average"]
)
def test_a_bare_state_dict_says_enough(kind: str, suffix: str, tmp_path: Path) -> None:
    theirs = peer(kind, **WIDE)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in theirs.state_dict().items()}}, path)
    else:
        save_file(theirs.state_dict(), path)
    ours = load(path)
    assert_equal(ours, theirs, images(ours))
    assumed = " ".join(ours.load_report.assumptions)
    assert ("2 heads" in assumed) == (kind != "BEiT")  # BEiT's tables have a column for each
    assert "bare file" in assumed
    FORMAT.write(ours, ours.card, tmp_path / "b.safetensors")
    assert_same_tensors(tmp_path / "b.safetensors", theirs)
    FORMAT.write(ours, ours.card, tmp_path / "c.pth")
    assert torch.load(tmp_path / "c.pth", weights_only=True).keys() == theirs.state_dict().keys()


def test_a_bare_aimv2_has_heads_of_128_features(tmp_path: Path) -> None:
    theirs = peer("AIMv2", embed_dim=256, depth=1)
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors")
    assert ours.config.heads == 2
    assert_equal(ours, theirs, images(ours))


def test_three_branches_are_a_bare_file(tmp_path: Path) -> None:
    theirs = peer("parallel", block_fn=partial(ParallelThingsBlock, num_parallel=3), **WIDE)
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors")
    assert ours.config.branches == 3
    assert_equal(ours, theirs, images(ours))
    FORMAT.write(ours, ours.card, tmp_path / "b.safetensors")
    assert_same_tensors(tmp_path / "b.safetensors", theirs)


def test_pre_logits_of_older_versions(tmp_path: Path) -> None:
    theirs = peer("plain", **WIDE)
    theirs.head = torch.nn.Linear(24, 5)
    theirs.fc_norm = torch.nn.Sequential(torch.nn.Linear(128, 24), torch.nn.Tanh())  # what timm had in this place
    randomised(theirs)
    state = {name.replace("fc_norm.0", "pre_logits.fc"): value for name, value in theirs.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors")
    assert ours.config.pre_logits == 24
    assert_equal(ours, theirs, images(ours))
    FORMAT.write(ours, ours.card, tmp_path / "b.safetensors")
    found = load_file(tmp_path / "b.safetensors")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(("units", "width", "channels"), [((1, 2), 32, 3), ((2, 1, 1), 32, 1)])
def test_bit(units: tuple[int, ...], width: int, channels: int, tmp_path: Path) -> None:
    theirs = bit(units, width, in_chans=channels)
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors")
    assert ours.config == ResNetConfig(
        units, width, channels=channels, classes=5, std_conv="timm", mean=(0.5,) * channels, std=(0.5,) * channels
    )
    for size in ((48, 80), (37, 50)):
        assert_equal(ours, theirs, images(ours, size))
    FORMAT.write(ours, ours.card, tmp_path / "b.safetensors")
    assert_same_tensors(tmp_path / "b.safetensors", theirs)


def test_bit_of_the_official_kind_computes_the_same_in_timm(tmp_path: Path) -> None:
    ours = build(ResNetConfig((1, 2), 32, classes=5, image_size=(48, 48))).eval()
    randomised(ours)
    FORMAT.write(ours, Card(ours.config), tmp_path / "a.safetensors")
    theirs = bit()
    theirs.load_state_dict(load_file(tmp_path / "a.safetensors"))
    assert_equal(ours, theirs, images(ours))


MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "tanh": dict(gelu="tanh"),
    "sines": dict(positions="sincos"),
    "no positions": dict(positions="none"),
    "DeiT-III": dict(cls_position=False, layer_scale=1e-4),
    "a position for the class token alone": dict(registers=3),
    "positions for the registers alone": dict(registers=3, cls_position=False, register_positions=True),
    "positions for both": dict(registers=3, register_positions=True),
    "average": dict(pool="gap"),
    "average, class token": dict(pool="gap", class_token=True, final_norm="pooled"),
    "attention pooling": dict(pool="map", gelu="tanh"),
    "attention pooling, registers": dict(pool="map", registers=1),
    "no head": dict(classes=0),
    "not square": dict(image_size=(24, 40), channels=1),
    "distilled": dict(distilled=True),
    "parallel": dict(block="parallel", branches=2),
    "gated": dict(mlp="swiglu", layer_scale=0.1),
    "BEiT": dict(positions="relative_bias", pool="gap", class_token=True, final_norm="pooled", layer_scale=0.1),
    "BEiT, one table": dict(positions="relative_bias", place="shared"),
    "hybrid": dict(stem="resnet", stem_units=(3, 4, 9), patch=16, std_conv="timm", group_norm_eps=1e-5),
    "root alone": dict(stem="resnet", patch=32, image_size=(64, 64), std_conv="timm", group_norm_eps=1e-5),
    "odd": dict(width=77, heads=7, mlp_dim=155, patch=5, image_size=(25, 25)),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full_size] if kind == "hybrid" else []) for kind in MADE]
)
def test_our_models_are_the_same_networks_in_timm(kind: str, tmp_path: Path) -> None:
    ours = build(ViTConfig.of(**(OURS | MADE[kind])))
    assert isinstance(ours, ViT)
    randomised(ours)
    FORMAT.write(ours, Card(ours.config, preprocess=Preprocess(ours.config.image_size)), tmp_path)
    same = assert_equal_in_double if ours.config.stem_units else assert_equal
    same(ours, rebuilt(tmp_path), images(ours))
    same(load(tmp_path), rebuilt(tmp_path), images(ours))


@pytest.mark.parametrize("kind", ["plain", "DeiT-III", "BEiT", "distilled", "parallel", "gated"])
def test_a_network_timm_was_asked_for_takes_our_file_strictly(kind: str, tmp_path: Path) -> None:
    architecture, arguments = FAMILIES[kind]
    theirs = timm.create_model(architecture, **(TINY | arguments)).eval()
    ours = load(hub(peer(kind), tmp_path / "a"))
    FORMAT.write(ours, ours.card, tmp_path / "b")
    theirs.load_state_dict(load_file(tmp_path / "b" / "model.safetensors"), strict=True)
    assert_equal(ours, theirs, images(ours))


def test_changed_sizes_and_heads_go_back_to_timm(tmp_path: Path) -> None:
    ours = load(hub(peer("plain"), tmp_path / "a"), classes=7, image_size=(40, 24))
    torch.nn.init.normal_(ours.head.weight)
    FORMAT.write(ours, ours.card, tmp_path / "b")
    assert_equal(ours, rebuilt(tmp_path / "b"), images(ours))


def test_trained_biases_are_written_though_the_file_had_none(tmp_path: Path) -> None:
    ours = load(hub(peer("no bias"), tmp_path / "a"))
    assert sorted(ours.load_report.missing) == [f"blocks.{i}.attentions.0.attention.qkv.bias" for i in (0, 1)]
    torch.nn.init.normal_(ours.blocks[1].attentions[0].attention.qkv.bias)
    FORMAT.write(ours, ours.card, tmp_path / "b")
    assert_equal(ours, rebuilt(tmp_path / "b"), images(ours))


def test_a_key_bias_is_dropped_exactly(tmp_path: Path) -> None:
    ours = build(ViTConfig.of(**(OURS | MADE["BEiT"])))
    randomised(ours)
    assert ours.blocks[0].attentions[0].attention.qkv.bias.detach()[32:64].abs().min() > 0
    FORMAT.write(ours, Card(ours.config), tmp_path)
    assert_equal(ours, rebuilt(tmp_path), images(ours))


def test_the_architecture_is_kept(tmp_path: Path) -> None:
    ours = load(hub(peer("DeiT-III"), tmp_path / "a"))
    FORMAT.write(ours, ours.card, tmp_path / "b")
    assert rebuilt(tmp_path / "b").pretrained_cfg["architecture"] == "deit3_small_patch16_224"
    FORMAT.write(ours, Card(ours.config), tmp_path / "c")
    assert rebuilt(tmp_path / "c").pretrained_cfg["architecture"] == PLAIN
