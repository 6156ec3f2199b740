"""timm's relpos networks: tables and MLPs of relative positions become one table, which computes what timm computes."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models._input import _get_global_pool
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
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.exports.network import trace
from vitrail.model.build import build
from vitrail.model.compute import attention_path
from vitrail.model.variants import ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.card import Card
from vitrail.weights.load import describe, load
from vitrail.weights.save import save
from vitrail.weights.timm.format import FORMAT

ARCHITECTURES = timm.list_models("*relpos*", module="vision_transformer_relpos")
PLAIN = "vit_relpos_base_patch16_224"
CLS = "vit_relpos_base_patch16_cls_224"
RPN = "vit_relpos_base_patch16_rpn_224"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "table": (PLAIN, dict(rel_pos_type="bias")),
    "table, shared": ("vit_srelpos_small_patch16_224", dict(rel_pos_type="bias")),
    "table, class token": (CLS, dict(rel_pos_type="bias", qkv_bias=True)),
    "table, class token, shared": (CLS, dict(rel_pos_type="bias", shared_rel_pos=True)),
    "table, average beside a class token": ("vit_relpos_base_patch16_clsgap_224", dict(rel_pos_type="bias")),
    "table, not square": (RPN, dict(rel_pos_type="bias", img_size=(24, 40), qk_norm=True)),
    "MLP": (PLAIN, {}),
    "MLP, shared": ("vit_srelpos_small_patch16_224", dict(num_classes=0)),
    "MLP, class token": (CLS, dict(img_size=(24, 40))),
    "MLP, norms behind": (RPN, {}),
    "MLP of Swin V2": (PLAIN, dict(rel_pos_type="mlp_swin", init_values=0.0, rel_pos_dim=20)),
    "MLP of Swin V2, class token, shared": (CLS, dict(rel_pos_type="mlp_swin", shared_rel_pos=True, img_size=(24, 40))),
}
"""Kind -> architecture, and arguments beyond `TINY`."""
OURS: dict[str, Any] = dict(
    width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=(24, 40), classes=5, positions="relative_bias",
    resize_mode="timm",
)  # fmt: skip


def peer(architecture: str, **changes: Any) -> nn.Module:
    return randomised(timm.create_model(architecture, **(TINY | changes)))


def of_kind(kind: str) -> nn.Module:
    architecture, arguments = KINDS[kind]
    return peer(architecture, **arguments)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_computes_what_timm_computes(architecture: str, tmp_path: Path) -> None:
    """Back in timm, a table stands in the place of the MLP."""
    theirs = peer(architecture)
    ours = load(hub(theirs, tmp_path / "a"))
    assert ours.config.positions == "relative_bias" and ours.config.origin.norm_eps == theirs.blocks[0].norm1.eps
    assert_equal(ours, theirs, images(ours))
    save(ours, tmp_path / "b", format="timm")
    again = rebuilt(tmp_path / "b")
    assert again.pretrained_cfg["architecture"] == architecture
    assert_equal(ours, again, images(ours))
    assert load(tmp_path / "b").config == ours.config


@pytest.mark.parametrize(("kind", "how"), zip(KINDS, itertools.cycle(("fused", "explicit"))))
def test_outputs_gradients_and_other_sizes_are_timms(kind: str, how: Any, tmp_path: Path) -> None:
    """The gradients of all parameters but those of the MLPs, which become tables."""
    theirs = of_kind(kind)
    folder = hub(theirs, tmp_path / "a")
    ours = load(folder)
    batch = images(ours)
    assert_equal(ours, theirs, batch)
    expected = gradients(theirs, batch)
    with attention_path(how):
        found = gradients(ours, batch)
    assert error(found.pop("images"), expected["images"]) < 1e-5
    assert found.keys() == ours.state_dict().keys()
    ours_as_theirs = written_gradients(ours, found, tmp_path / how)
    for name, tensor in expected.items():
        if name != "images" and ".mlp.fc" not in name.partition("rel_pos")[2]:
            assert (ours_as_theirs[name] - tensor).norm() <= 1e-5 * tensor.norm() + 1e-6, name
    save(ours, tmp_path / "b", format="timm")
    if kind.startswith("table"):
        assert_same_tensors(tmp_path / "b" / "model.safetensors", theirs)
    rows, columns = ours.config.grid
    for size in ((8 * rows + 16, 8 * rows + 16), (8 * rows + 8, 8 * columns - 8)):
        at_load = load(folder, image_size=size)
        assert at_load.config.image_size == size == at_load.card.preprocess.image_size
        assert "positions.bias" in at_load.load_report.resampled
        assert_equal(at_load, resized(theirs, size), images(ours, size))  # MLPs compute the offsets of the new grid
        assert_equal(ours, resized(rebuilt(tmp_path / "b"), size), images(ours, size))  # tables are resampled


@pytest.mark.parametrize("kind", ["MLP", "MLP of Swin V2"])
def test_a_grid_of_one_row_has_the_biases_of_a_row_of_a_higher_grid(kind: str, tmp_path: Path) -> None:
    """timm divides by zero there in Swin V2's kind."""
    folder = hub(of_kind(kind), tmp_path)
    row, grid = (load(folder, image_size=(height, 40)).state_dict()["positions.bias"] for height in (8, 24))
    assert torch.equal(row[:, :9], grid[:, 2 * 9 : 3 * 9])  # of the row offsets -2 to 2, the offset 0


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The gradients of all parameters, and of the images, in float64: norms behind attention amplify rounding."""
    model, batch = copy.deepcopy(model).double(), images.double().requires_grad_()
    model(batch).square().sum().backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert batch.grad is not None
    return found | {"images": batch.grad}


def written_gradients(model: nn.Module, found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Our gradients under timm's names: they are written as if they were the model's tensors."""
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(found, strict=True)
    FORMAT.write(model, model.card, folder)
    model.load_state_dict(values)
    return load_file(folder / "model.safetensors")


@pytest.mark.full_size
def test_what_the_hub_says_is_enough() -> None:
    """At full size, with the config.json that timm publishes: sizes, heads, pooling, and the names of all tensors."""
    assert len(ARCHITECTURES) >= 14
    for name in ARCHITECTURES:
        with torch.device("meta"):
            theirs = timm.create_model(name, depth=2)
        shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
        pretrained = {key: value for key, value in theirs.pretrained_cfg.items() if key != "architecture"}
        given = dict(architecture=name, pretrained_cfg=pretrained, global_pool=_get_global_pool(theirs))
        origin, found = describe(Archive(Path("hub"), "safetensors", shapes, torch.empty, config=given))
        config = found.card.config
        assert origin is FORMAT and isinstance(config, ViTConfig) and not found.unused
        block = theirs.blocks[0]
        assert (config.heads, config.origin.norm_eps) == (block.attn.num_heads, block.norm1.eps), name
        assert config.image_size == theirs.patch_embed.img_size and config.prefix == theirs.num_prefix_tokens, name
        assert config.pool == {"token": "cls", "avg": "gap"}[theirs.global_pool], name
        assert config.place == ("every" if theirs.shared_rel_pos is None else "shared"), name
        assert config.origin.norm_after == (type(block).__name__ == "ResPostRelPosBlock"), name


def test_without_a_size_the_name_tells_it(tmp_path: Path) -> None:
    for name, side in (("vit_relpos_base_patch16_plus_240", 240), ("test_vit_relpos", 224)):
        with torch.device("meta"):
            theirs = timm.create_model(name, depth=1)
        shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
        archive = Archive(Path("hub"), "safetensors", shapes, torch.empty, config=dict(architecture=name))
        found = describe(archive)[1]
        assert found.card.config.image_size == (side, side)
        assert any(f"images of {side} x {side} pixels" in note for note in found.assumptions)


MADE: dict[str, dict[str, Any]] = {
    "average": dict(pool="gap"),
    "average, pooled norm, LayerScale": dict(pool="gap", final_norm="pooled", layer_scale=0.1),
    "norms behind": dict(norm_after=True, place="shared"),
    "normalised queries and keys": dict(qk_norm="head", pool="gap", class_token=True),
}


@pytest.mark.parametrize("kind", MADE)
def test_networks_of_our_own_that_are_no_beit_become_relpos_networks(kind: str, tmp_path: Path) -> None:
    ours = randomised(build(ViTConfig.of(**(OURS | MADE[kind]))))
    FORMAT.write(ours, Card(ours.config), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architecture"].startswith("vit_relpos_")
    assert_equal(ours, rebuilt(tmp_path), images(ours))
    assert_equal(load(tmp_path), rebuilt(tmp_path), images(ours))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pool="map"), "BEiT and of timm's relpos networks, but neither has all of its other parts"),
        (dict(pool="gap", gelu="tanh"), "neither has all"),
        (dict(pool="gap", image_size=(8, 40)), "a grid of 1 x 5 for those of a square grid"),
        (dict(norm_after=True, layer_scale=0.1), "LayerScale and norms behind"),
    ],
)
def test_what_timm_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build(ViTConfig.of(**(OURS | changes)))
    with pytest.raises(WeightsError, match=message):
        FORMAT.write(model, Card(model.config), tmp_path / "a")


def test_a_file_without_config_is_refused_in_both_directions(tmp_path: Path) -> None:
    for kind in ("table", "MLP, norms behind"):
        theirs = of_kind(kind)
        save_file(theirs.state_dict(), tmp_path / "a.safetensors")
        with pytest.raises(WeightsError, match=r"relpos networks, which differ in the size.*Add a config\.json"):
            load(tmp_path / "a.safetensors")
        ours = load(hub(theirs, tmp_path / kind))
        with pytest.raises(WeightsError, match="Save to a folder"):
            FORMAT.write(ours, ours.card, tmp_path / "b.safetensors")


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state, config = peer(PLAIN, rel_pos_type="bias").state_dict(), tmp_path / "config.json"
    config.write_text(json.dumps(dict(architecture=PLAIN)))
    for name, tensor, message in (
        ("blocks.0.attn.rel_pos.relative_position_bias_table", torch.zeros(50, 2), "has 50 rows, which fit no square"),
        ("pos_embed", torch.zeros(1, 16, 32), "two kinds of positions"),
    ):
        save_file(state | {name: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            load(tmp_path)


@pytest.mark.full_size
def test_it_is_saved_and_exported_like_any_other(tmp_path: Path) -> None:
    ours = load(hub(of_kind("MLP, class token"), tmp_path / "a"))
    pixels = torch.randint(0, 256, (2, 3, *ours.config.image_size), dtype=torch.uint8)
    save(ours, tmp_path / "b")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "b")(pixels), ours(pixels))
        program = trace(ours, ours.config.image_size, "logits", torch.float32).module()
        assert error(program(pixels), ours(pixels)) < 1e-5
