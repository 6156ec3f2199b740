"""timm's networks with rotary positions: DINOv3, EVA-02, RoPE-ViT and PE, read, trained and written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm_peers import (
    TINY,
    assert_equal,
    assert_same_tensors,
    error,
    hub,
    images,
    randomised,
    rebuilt,
    resized,
)
from torch import nn

from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import Rotary, ViTConfig
from vitrail.weights.archive import Archive, open_archive
from vitrail.weights.card import Card
from vitrail.weights.formats import foreign_tensors, state_of
from vitrail.weights.load import DINOV3, DINOV3_LICENCE, load
from vitrail.weights.save import save
from vitrail.weights.timm.file import read_timm_file
from vitrail.weights.timm.format import FORMAT, naming_of
from vitrail.weights.timm.names import Naming, conversions
from vitrail.weights.timm.vit import infer

FAMILIES: dict[str, dict[str, Any]] = {
    "vit_small_patch16_dinov3": {},
    "vit_base_patch16_dinov3_qkvb": dict(global_pool="token", img_size=(24, 40)),
    "vit_huge_plus_patch16_dinov3": {},
    "vit_7b_patch16_dinov3": dict(num_classes=0),
    "eva02_tiny_patch14_224": dict(qk_norm=True),
    "eva02_base_patch14_448": dict(img_size=48),
    "eva02_large_patch14_clip_336": {},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_base_patch16_rope_ape_224": {},
    "vit_large_patch16_rope_mixed_ape_224": dict(qk_norm=True),
    "vit_betwixt_patch16_rope_reg4_gap_256": dict(init_values=0.1),
    "vit_pe_core_base_patch16_224": dict(attn_pool_num_heads=4),
    "vit_pe_core_gigantic_patch14_448": dict(attn_pool_num_heads=4, mlp_ratio=3),
    "vit_pe_lang_large_patch14_448": {},
    "vit_pe_spatial_tiny_patch16_512": dict(num_classes=0),
}
"""Architecture -> arguments beyond `TINY`."""


def peer(architecture: str, **changes: Any) -> nn.Module:
    return randomised(timm.create_model(architecture, **(TINY | FAMILIES[architecture] | changes)))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_folder_computes_what_timm_computes_and_goes_back_as_it_was(architecture: str, tmp_path: Path) -> None:
    theirs = peer(architecture)
    ours = load(hub(theirs, tmp_path / "a"))
    norm = next(part for part in theirs.blocks.modules() if isinstance(part, nn.LayerNorm))
    assert ours.config.origin.norm_eps == norm.eps and ours.config.origin.rotary is not None
    assert_equal(ours, theirs, images(ours))
    FORMAT.write(ours, ours.card, tmp_path / "b")
    assert_same_tensors(tmp_path / "b" / "model.safetensors", theirs)
    again = rebuilt(tmp_path / "b")
    assert again.pretrained_cfg["architecture"] == architecture
    assert error(again(images(ours)), theirs(images(ours))) < 1e-6
    assert load(tmp_path / "b").config == ours.config
    rows, columns = ours.config.grid
    for size in ((8 * rows + 16, 8 * rows + 16), (8 * rows + 8, 8 * columns - 8)):
        assert_equal(ours, resized(theirs, size), images(ours, size))


@pytest.mark.parametrize(("architecture", "how"), zip(FAMILIES, itertools.cycle(("fused", "explicit"))))
def test_gradients_are_timms(architecture: str, how: Any, tmp_path: Path) -> None:
    """The gradient of each parameter, converted to timm's names; half of them on each way of computing attention."""
    theirs = peer(architecture)
    path = hub(theirs, tmp_path / "a")
    ours = load(path)
    _, naming = infer(read_timm_file(open_archive(path)))
    batch = images(ours)
    theirs(batch).square().sum().backward()
    with attention_path(how):
        ours(batch).square().sum().backward()
    names = {entry.ours for entry in conversions(ours.config, naming)}
    found = {name: p.grad for name, p in ours.named_parameters() if name in names and p.grad is not None}
    entries = [entry for entry in conversions(ours.config, naming) if entry.ours in found]
    gradients = foreign_tensors(found, entries, "timm")
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None, name
        assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-6, name


def test_two_steps_of_training_are_timms(tmp_path: Path) -> None:
    theirs = peer("vit_small_patch16_rope_mixed_224")
    ours = load(hub(theirs, tmp_path / "a"))
    batch = images(ours)
    for model in (ours, theirs):
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimiser.zero_grad()
            model(batch).square().mean().backward()
            optimiser.step()
        model.eval()
    assert_equal(ours, theirs, batch)
    FORMAT.write(ours, ours.card, tmp_path / "b")
    assert error(rebuilt(tmp_path / "b")(batch), theirs(batch)) < 1e-5


def test_a_bare_dinov3_is_known_by_its_tensors(tmp_path: Path) -> None:
    theirs = peer("vit_huge_plus_patch16_dinov3", embed_dim=128, global_pool="token", img_size=224, patch_size=16)
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors")
    assert (ours.config.origin.rotary, ours.config.heads, ours.config.origin.norm_eps) == (DINOV3, 2, 1e-5)
    assert_equal(ours, theirs, images(ours))
    FORMAT.write(ours, ours.card, tmp_path / "b.safetensors")
    assert_same_tensors(tmp_path / "b.safetensors", theirs)


def test_a_bare_file_that_leaves_the_rotation_open_is_refused(tmp_path: Path) -> None:
    for name in ("vit_small_patch16_rope_224", "eva02_tiny_patch14_224", "vit_betwixt_patch16_rope_reg4_gap_256"):
        save_file(peer(name).state_dict(), tmp_path / f"{name}.safetensors")
        with pytest.raises(WeightsError, match=r"config\.json"):
            load(tmp_path / f"{name}.safetensors")


def test_the_licence_of_dinov3_is_said_and_kept(tmp_path: Path) -> None:
    folder = hub(peer("vit_small_patch16_dinov3"), tmp_path / "a")
    ours = load(folder)
    assert ours.card.licence == DINOV3_LICENCE
    assert any("Meta's terms" in text for text in ours.load_report.assumptions)
    save(ours, tmp_path / "b")
    assert load(tmp_path / "b").card.licence == DINOV3_LICENCE
    other = load(hub(peer("vit_small_patch16_rope_224"), tmp_path / "c"))
    assert other.card.licence != DINOV3_LICENCE and not any("Meta" in text for text in other.load_report.assumptions)


MADE: dict[str, dict[str, Any]] = {
    "DINOv3": dict(rotary=DINOV3, positions="none", registers=2, layer_scale=0.1, norm_eps=1e-5, key_bias=False),
    "with a bias of keys": dict(rotary=DINOV3, positions="none", layer_scale=0.1),
    "EVA-02": dict(rotary=Rotary(reference=(16, 16)), mlp="swiglu", mlp_norm=True, key_bias=False, pool="gap"),
    "mixed": dict(rotary=Rotary("mixed", base=10.0), positions="none", layer_scale=0.1),
}


@pytest.mark.parametrize("kind", MADE)
def test_networks_of_our_own_become_timms(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(32, 32), classes=5, resize_mode="timm")
    ours = randomised(build(ViTConfig.of(**(shape | MADE[kind]))))
    if not ours.config.origin.key_bias:
        for block in ours.blocks:
            block.attentions[0].attention.qkv.bias.data[32:64] = 0
    FORMAT.write(ours, Card(ours.config), tmp_path / "a")
    assert_equal(ours, rebuilt(tmp_path / "a"), images(ours))
    again = load(tmp_path / "a")
    assert (
        again.config.origin.rotary == ours.config.origin.rotary
        and again.config.origin.key_bias == ours.config.origin.key_bias
    )
    naming = naming_of(again.config, again.card, state_of(again))
    assert naming == Naming(gate_apart=ours.config.origin.mlp_norm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block="parallel", branches=2), "parallel"),
        (dict(positions="sincos"), "positions 'sincos' .* besides rotary"),
        (dict(norm_eps=1e-4), "epsilon 0.0001"),
        (dict(layer_scale=None, norm_eps=1e-5), "no LayerScale and the LayerNorm epsilon 1e-05"),
        (dict(rotary=Rotary("mixed", pairs="halves")), "rotate halves"),
        (dict(registers=1, positions="1d"), "others have none"),
    ],
)
def test_what_timm_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base: dict[str, Any] = dict(width=32, depth=1, heads=2, mlp_dim=64, patch=8, image_size=(32, 32), positions="none")
    model = build(ViTConfig.of(**(base | dict(rotary=Rotary(), layer_scale=0.1) | changes)))
    with pytest.raises(WeightsError, match=message):
        FORMAT.write(model, Card(model.config), tmp_path / "a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rope_type="mrope"), "rope_type is 'mrope'"),
        (dict(rope_temperature=-1.0), "base is -1.0"),
        (dict(ref_feat_shape=[0, 3]), "rows and columns"),
        (dict(num_heads=3), "num_heads is 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = hub(peer("vit_small_patch16_rope_224"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] |= arguments
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message):
        load(folder)


PUBLISHED = sorted(
    {*timm.list_models(["vit_*dinov3*", "eva02_*", "vit_*_rope_*", "vit_pe_*"], module="eva")}
    - {"eva02_enormous_patch14_clip_224"}
)


@pytest.mark.full_size
def test_every_architecture_of_timm_is_what_its_name_says() -> None:
    """S to 7B: heads, rotation, names of all tensors and number of parameters, without a config.json's arguments."""
    assert len(PUBLISHED) >= 45
    for name in PUBLISHED:
        with torch.device("meta"):
            theirs = timm.create_model(name, pretrained=False, depth=1)
        shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
        given = dict(architecture=name, global_pool=theirs.global_pool, pretrained_cfg=theirs.pretrained_cfg)
        path = Path("model.safetensors")
        config, naming = infer(read_timm_file(Archive(path, "safetensors", shapes, torch.empty, config=given)))
        assert {theirs for entry in conversions(config, naming) for theirs in entry.theirs} == shapes.keys(), name
        rope, rotary = theirs.rope, config.origin.rotary
        assert rotary is not None and config.heads == theirs.blocks[0].attn.num_heads, name
        assert (
            config.origin.norm_eps == theirs.blocks[0].norm1.eps and config.image_size == theirs.patch_embed.img_size
        ), name
        first = "column" if rope.grid_indexing == "xy" else "row"
        assert (rotary.base, rotary.first) == (rope.temperature, first), name
        assert (rotary.pairs == "halves") == getattr(rope, "rotate_half", False), name
        assert (rotary.reference, rotary.offset) == (
            getattr(rope, "ref_feat_shape", None),
            getattr(rope, "grid_offset", 0.0),
        ), name
        pool = theirs.attn_pool
        assert config.origin.pool_heads == (pool.num_heads if pool else None), name
        assert config.origin.pool_prefix == (pool is not None and theirs.cls_token is not None), name
        kinds = {"RotaryEmbeddingCat": ("axial", "index"), "RotaryEmbeddingMixed": ("mixed", "index")}
        assert (rotary.frequencies, rotary.coordinates) == kinds.get(type(rope).__name__, ("axial", "centred")), name
        with torch.device("meta"):
            ours = build(config)
        missing = sum(p.numel() for n, p in ours.named_parameters() if n.endswith("qkv.bias")) * bool(not naming.bias)
        missing += config.width * config.origin.pre_norm  # the bias of the patches
        keyless = 0 if config.origin.key_bias or not naming.bias else config.depth * config.width
        counts = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
        assert next(counts) - missing - keyless == next(counts), name
