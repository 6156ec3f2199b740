"""`vitrail.load`, with a format of our own invention where a test is not about a library's."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from safetensors.torch import save_file
from tiny_networks import fresh, tiny
from torch import Tensor, nn

import vitrail
from vitrail.data import npz
from vitrail.data.settings import Preprocess
from vitrail.errors import UsageError, WeightsError
from vitrail.model.build import build
from vitrail.model.resize import resize_positions
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.weights import download as hub
from vitrail.weights import load as load_module
from vitrail.weights import store
from vitrail.weights.archive import Archive
from vitrail.weights.assemble import expected, fill, skeleton
from vitrail.weights.card import Card
from vitrail.weights.formats import NAMES, ForeignModel, format_named, recognise
from vitrail.weights.load import load, read_card
from vitrail.weights.mapping import Conversion, Rule, apply_table, joined, reshaped, turned
from vitrail.weights.store import save_model

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ["cat", "dog", "owl"]


def row(ours: str, theirs: str | Rule) -> Conversion:
    """The conversion of a table of one row."""
    (entry,) = apply_table([ours], {ours: theirs})
    return entry


@dataclass
class Toy:
    """A format whose names are ours behind "toy/", and whose config is given."""

    config: ViTConfig | ResNetConfig
    special: list[Conversion] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    zeros: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    name: str = "toy"
    right: bool = True

    def __post_init__(self) -> None:
        self.ours = list(build(self.config).state_dict())

    def recognises(self, archive: Archive) -> bool:
        return self.right

    def find(self, archive: Archive) -> ForeignModel:
        if self.error:
            raise self.error
        special = {entry.ours for entry in self.special} | self.zeros.keys()
        rest = [row(name, f"toy/{name}") for name in self.ours if name not in special]
        card = Card(
            self.config,
            CLASSES if self.config.classes else [],
            Preprocess(self.config.image_size, crop=0.9),
            source="toy",
            reference={"logits": [1]},
        )
        return ForeignModel(card, [*self.special, *rest], self.unused, self.zeros, ["2 heads assumed"])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Toy]:
    """Make the loader take every foreign file for a toy's."""

    def register(config: ViTConfig | ResNetConfig, **values: Any) -> Toy:
        made = Toy(config, **values)
        monkeypatch.setattr(load_module, "recognise", lambda archive: made)
        return made

    return register


def toy_file(path: Path, model: nn.Module, **changes: Tensor | None) -> Path:
    """The model's tensors as a toy's; `changes` replaces some, or leaves them out."""
    tensors: dict[str, Any] = {f"toy/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors.update(changes)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


# ---- what is loaded


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
@pytest.mark.parametrize(
    "config",
    [
        tiny(positions="sincos"),
        tiny(pool="map", pre_logits=8, registers=2),
        tiny(pool="gap", class_token=True, positions="relative_bias", final_norm="pooled"),
        tiny(distilled=True, mlp="swiglu"),
        tiny(stem="hmlp"),
        ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32)),
    ],
)
def test_a_foreign_model_computes_what_its_tensors_say(
    tmp_path: Path, toy: Callable[..., Toy], config: ViTConfig | ResNetConfig, suffix: str
) -> None:
    toy(config)
    model = fresh(config)
    tensors = {f"toy/{name}": tensor for name, tensor in model.state_dict().items()}
    if suffix == ".pth":
        torch.save({"model": tensors, "epoch": 3}, tmp_path / "w.pth")
    elif suffix == ".npz":
        np.savez(tmp_path / "w.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file(tensors, tmp_path / "w.safetensors")
    loaded = load(tmp_path / f"w{suffix}")
    images = torch.randint(0, 256, (2, 3, *config.image_size), dtype=torch.uint8)  # needs the pixel statistics
    with torch.inference_mode():
        assert torch.equal(loaded(images), model(images))
    assert not loaded.training and all(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.card.source == "toy" and loaded.card.config == config == loaded.config
    report = loaded.load_report
    assert report.loaded == list(model.state_dict()) and report.format == "toy"
    assert not (report.reset or report.resampled or report.unused or report.missing)
    assert report.assumptions[-1] == "2 heads assumed"
    assert ("the tensors are those under 'model'; not epoch" in report.assumptions) == (suffix == ".pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_become_float32_of_the_same_value(
    tmp_path: Path, toy: Callable[..., Toy], dtype: torch.dtype
) -> None:
    toy(tiny())
    model = fresh(tiny()).to(dtype)
    loaded = load(toy_file(tmp_path / "w", model))
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].float()), name


def test_tensors_are_turned_joined_and_reshaped_into_the_models(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    qkv = "blocks.0.attentions.0.attention.qkv.weight"
    toy(
        tiny(),
        special=[
            row(qkv, joined("q", "k", "v")),
            row("head.weight", turned("classifier")),
            row("positions.embedding", reshaped("table", (17, 16))),
        ],
    )
    model = fresh(tiny())
    tensors = {f"toy/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= zip("qkv", (part.clone() for part in tensors.pop(f"toy/{qkv}").chunk(3)), strict=True)
    tensors["classifier"] = tensors.pop("toy/head.weight").T.contiguous()
    tensors["table"] = tensors.pop("toy/positions.embedding")[0]
    save_file(tensors, tmp_path / "w")
    for name, tensor in load(tmp_path / "w").state_dict().items():
        assert tensor.is_contiguous() and torch.equal(tensor, model.state_dict()[name]), name


def test_an_array_of_all_layers_is_read_once(
    tmp_path: Path, toy: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def layer(name: str, index: int) -> Conversion:
        return row(f"blocks.{index}.{name}", Rule((name,), lambda stack: stack[index], lambda tensor: (tensor,)))

    names = ["mlps.0.mlp.fc1.weight", "mlps.0.norm.bias"]
    toy(tiny(), special=[layer(name, index) for index in (0, 1) for name in names])
    model = fresh(tiny())
    arrays = {f"toy/{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    for name in names:
        arrays[name] = np.stack([arrays.pop(f"toy/blocks.{index}.{name}") for index in (0, 1)])
    np.savez(tmp_path / "w.npz", **arrays)
    read: list[str] = []
    original = npz.Npz.read
    monkeypatch.setattr(npz.Npz, "read", lambda self, name: read.append(name) or original(self, name))
    loaded = load(tmp_path / "w.npz")
    assert sorted(read) == sorted(arrays)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4, name


def test_what_a_format_defines_as_zero_is_zero_and_told(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    toy(tiny(), zeros={"head.bias": "its classifier has no bias"}, unused={"mask_token": "pre-training only"})
    loaded = load(toy_file(tmp_path / "w", fresh(tiny()), **{"toy/head.bias": None, "mask_token": torch.ones(3)}))
    assert not loaded.head.bias.any()
    report = loaded.load_report
    assert report.missing == {"head.bias": "its classifier has no bias"} and "head.bias" not in report.loaded
    assert report.unused == {"mask_token": "pre-training only"}
    for said in ("its classifier has no bias", "mask_token (pre-training only)", "assumed: 2 heads", "(toy)"):
        assert said in str(report)


def test_loading_leaves_the_random_state_alone(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    toy(tiny())
    file = toy_file(tmp_path / "w", fresh(tiny()))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(file, classes=4, image_size=24)
    assert torch.equal(torch.rand(3), expected)


# ---- a new head, another size


@pytest.mark.parametrize("classes", [0, 3, 5])
@pytest.mark.parametrize("changes", [{"distilled": True}, {"pre_logits": 8}, {"classes": 0}], ids=str)
def test_a_new_head_is_zero_and_the_old_one_is_told(
    tmp_path: Path, toy: Callable[..., Toy], changes: dict[str, Any], classes: int
) -> None:
    config = tiny(**changes)
    toy(config)
    model = fresh(config)
    loaded = load(toy_file(tmp_path / "w", model), classes=classes)
    old, new = model.state_dict(), loaded.state_dict()
    heads = {name for name in new if name.startswith("head")}
    for name in new:
        assert not new[name].any() if name in heads else torch.equal(new[name], old[name]), name
    assert len(heads) == (2 + 2 * config.origin.distilled if classes else 0)
    report = loaded.load_report
    assert set(report.reset) == heads and set(report.loaded) == new.keys() - heads
    assert report.unused == {
        f"toy/{name}": "replaced by a new head" for name in old if name.startswith(("head", "pre_logits"))
    }
    assert loaded.card.class_names == [] and loaded.card.config == loaded.config
    assert loaded.config.classes == classes and loaded.config.pre_logits is None
    images = torch.rand(1, 3, 16, 16)
    assert loaded(images).shape == (1, classes or config.pooled)


@pytest.mark.parametrize("mode", [None, "timm"])
def test_positions_are_resampled_for_another_grid_even_of_as_many_cells(
    tmp_path: Path, toy: Callable[..., Toy], mode: Any
) -> None:
    config = tiny(image_size=(8, 32))
    toy(config)
    model = fresh(config)
    loaded = load(toy_file(tmp_path / "w", model), image_size=16, resize_mode=mode)
    table = model.positions.embedding.detach().numpy()[0]
    zoomed = scipy.ndimage.zoom(table[1:].reshape(2, 8, 16), (2, 0.5, 1), order=1).reshape(16, 16)
    found = loaded.positions.embedding.detach().numpy()[0]
    np.testing.assert_array_equal(found[0], table[0])
    assert np.allclose(found[1:], zoomed, atol=1e-6) == (mode is None)
    assert loaded.config.origin.resize_mode == (mode or "official")
    assert loaded.load_report.resampled == {"positions.embedding": f"8 x 32 -> 16 x 16 px, {mode or 'official'}"}
    assert loaded.config.image_size == loaded.card.preprocess.image_size == (16, 16)
    assert loaded.card.preprocess.crop == 0.9


@pytest.mark.parametrize("mode", ["hf", "timm"])
def test_biases_resampled_at_load_equal_those_resampled_as_the_model_runs(
    tmp_path: Path, toy: Callable[..., Toy], mode: Any
) -> None:
    config = tiny(positions="relative_bias", resize_mode=mode)
    toy(config)
    model = fresh(config)
    loaded = load(toy_file(tmp_path / "w", model), image_size=(24, 20))
    images = torch.randn(2, 3, 24, 20)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(images), model(images), rtol=1e-5, atol=1e-5)
    assert loaded.load_report.resampled == {"positions.bias": f"16 x 16 -> 24 x 20 px, {mode}"}


def test_a_larger_patch_on_enlarged_patches_computes_the_row(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    toy(tiny())
    model = fresh(tiny())
    loaded = load(toy_file(tmp_path / "w", model), image_size=32, patch=8)
    assert loaded.config == replace(model.config, image_size=(32, 32), patch=8)
    assert loaded.load_report.resampled == {"stem.weight": "4 -> 8 px patches, pseudo-inverse of a bilinear resize"}
    images = torch.randn(2, 3, 16, 16)
    cut = images.unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 1, 4, 4)
    larger = nn.functional.interpolate(cut, scale_factor=2, mode="bilinear", antialias=True)
    enlarged = larger.view(2, 3, 4, 4, 8, 8).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(enlarged), model(images), rtol=1e-4, atol=1e-4)


def test_a_smaller_patch_makes_more_tokens_with_positions_in_between(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    toy(tiny())
    model = fresh(tiny())
    file = toy_file(tmp_path / "w", model)
    loaded = load(file, patch=2)
    assert loaded.config.grid == (8, 8) and loaded.stem.weight.shape == (16, 3, 2, 2)
    expected = resize_positions(model.positions.embedding, (4, 4), (8, 8), model.config.origin.resize_mode)
    assert torch.equal(loaded.positions.embedding, expected)
    assert loaded.load_report.resampled["positions.embedding"].startswith("4 x 4 patches of 4 -> 8 x 8 patches of 2 px")
    with pytest.raises(UsageError, match="not divisible by the patch, 3 px"):
        load(file, patch=3)
    for config in (tiny(stem="hmlp"), ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32))):
        toy(config)
        with pytest.raises(UsageError, match="only one linear projection"):
            load(toy_file(tmp_path / "other", fresh(config)), patch=8)


def test_a_reference_holds_only_for_the_model_as_it_was(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    toy(tiny())
    file = toy_file(tmp_path / "w", fresh(tiny()))
    assert load(file).card.reference == load(file, image_size=16).card.reference == {"logits": [1]}
    for change in ({"classes": 3}, {"image_size": 24}, {"resize_mode": "timm"}):
        assert load(file, **change).card.reference == {}, change  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (tiny(), {"classes": -1}, "-1 classes"),
        (tiny(), {"resize_mode": "official2"}, "'official2'.* Did you mean 'official'"),
        (tiny(), {"image_size": 18}, "not divisible by the patch"),
        (ResNetConfig(units=(1,), width=32, classes=3), {"resize_mode": "timm"}, "a ResNet does not have"),
    ],
)
def test_wishes_that_do_not_fit_are_usage_errors(
    tmp_path: Path, toy: Callable[..., Toy], config: ViTConfig | ResNetConfig, change: Any, message: str
) -> None:
    toy(config)
    with pytest.raises(UsageError, match=message):
        load(toy_file(tmp_path / "w", fresh(config)), **change)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"toy/norm.weight": None}, "lacks the tensor 'toy/norm.weight'"),
        ({"toy/norm.wieght": torch.ones(16), "toy/norm.weight": None}, "Did you mean 'toy/norm.wieght'"),
        ({"toy/norm.extra": torch.ones(2, 3)}, r"holds the tensor 'toy/norm.extra' of shape \(2, 3\)"),
        (
            {"toy/norm.weight": torch.ones(17)},
            r"'toy/norm.weight' of shape \(17,\) does not fit the model's 'norm.weight', which is \(16,\)",
        ),
        ({"toy/norm.weight": torch.ones(16, 1)}, r"'toy/norm.weight' of shape \(16, 1\)"),
        ({"toy/norm.weight": torch.ones(16, dtype=torch.int32)}, "'toy/norm.weight' holds torch.int32"),
        ({"toy/norm.weight": torch.ones(16, dtype=torch.complex64)}, "'toy/norm.weight' holds torch.complex64"),
        ({"toy/norm.weight": torch.full((16,), torch.nan)}, "16 of 16 values of 'toy/norm.weight' are NaN"),
        ({"toy/cls": torch.tensor([0.0] * 15 + [-torch.inf]).reshape(1, 1, 16)}, "1 of 16 values of 'toy/cls'"),
        (
            {"toy/cls": torch.tensor([torch.inf, -torch.inf] + [0.0] * 14).reshape(1, 1, 16).half()},
            "2 of 16 values of 'toy/cls'",
        ),
        ({"toy/norm.bias": torch.full((16,), 1e300, dtype=torch.float64)}, "16 of 16 values of 'toy/norm.bias'"),
    ],
)
def test_what_is_unexpected_is_refused_by_file_and_name(
    tmp_path: Path, toy: Callable[..., Toy], changes: dict[str, Any], message: str
) -> None:
    toy(tiny())
    file = toy_file(tmp_path / "w.safetensors", fresh(tiny()), **changes)
    with pytest.raises(WeightsError, match=message) as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_large_finite_values_are_values(tmp_path: Path, toy: Callable[..., Toy]) -> None:
    toy(tiny())
    file = toy_file(tmp_path / "w", fresh(tiny()), **{"toy/cls": torch.full((1, 1, 16), 3e38)})
    assert (load(file).cls == 3e38).all()


@pytest.mark.parametrize(
    ("special", "message"),
    [
        (
            [row("head.weight", joined("toy/head.weight", "toy/norm.weight"))],
            "'toy/norm.weight' of shape .* does not fit",
        ),
        ([row("norm.weight", turned("toy/norm.weight"))], "'toy/norm.weight' of shape"),
        ([row("cls", reshaped("toy/norm.weight", (16,))), row("norm.weight", "toy/norm.weight")], "holds the tensor"),
        ([row("norm.weight", "toy/norm.weight")] * 2, "2 sources for 'norm.weight'"),
        ([row("norm.wight", "toy/norm.weight")], "sources for 'norm.w"),
    ],
)
def test_a_format_that_does_not_fit_is_noticed(
    tmp_path: Path, toy: Callable[..., Toy], special: list[Conversion], message: str
) -> None:
    toy(tiny(), special=special)
    with pytest.raises(WeightsError, match=message):
        load(toy_file(tmp_path / "w", fresh(tiny())))


@pytest.mark.parametrize(
    "error", [UsageError("width 5 is not divisible by 2 heads"), KeyError("hidden_size"), ZeroDivisionError("by zero")]
)
def test_a_config_that_contradicts_itself_is_the_files_fault(
    tmp_path: Path, toy: Callable[..., Toy], error: Exception
) -> None:
    toy(tiny(), error=error)
    with pytest.raises(WeightsError, match=r"w \(toy\) does not describe a model: .*(heads|hidden_size|zero)"):
        load(toy_file(tmp_path / "w", fresh(tiny())))


@pytest.mark.parametrize(
    "changes",
    [{"stem": "hmlp", "width": 14, "heads": 2}, {"stem": "levit", "patch": 12, "image_size": 24}],
)
def test_impossible_networks_are_refused_with_the_name_of_their_file(changes: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match=r"w\.npz does not describe a model"):
        expected(tiny(**changes), Path("w.npz"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 10**9}, "depth is 1000000000; valid: 1 to 1,000"),
        ({"width": -16}, "width is -16; valid: 1 to 65,536"),
        ({"mlp_dim": 2**62}, "mlp_dim is 4611686018427387904; valid: 1 to 1,048,576"),
        ({"depth": 600, "block": "parallel", "branches": 2}, "1,200 layers; at most 1,000"),
        ({"heads": -2}, "heads is -2"),
        ({"width": 16.0}, "width is 16.0"),
        ({"channels": 10**9}, "channels is 1000000000"),
        ({"std": (0.0, 1.0, 1.0)}, "std is 0.0"),
        ({"mean": (math.nan,)}, "mean is nan"),
        ({"image_size": 4096}, "4096 x 4096 pixels have 1,048,576 patches"),
        ({"image_size": 512, "positions": "relative"}, "at most 4,096 are possible with relative positions"),
        ({"stem": "resnet", "stem_units": (1,) * 9}, "9 stages; at most 8"),
    ],
)
def test_absurd_networks_are_refused_before_they_are_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": ()}, "units is empty"),
        ({"units": (500, 501)}, "1,001 layers; at most 1,000"),
        ({"units": (1, -1)}, "units is -1; valid: 0 to 1,000"),
        ({"width": 0}, "width is 0"),
        ({"mean": (0.5, 0.4)}, "mean has 2 values for 3 channels"),
    ],
)
def test_absurd_resnets_are_refused_before_they_are_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ResNetConfig(**changes)


@pytest.mark.full_size
@pytest.mark.parametrize(
    "config",
    [
        *(variant(name, classes=3, depth=1) for name in ("Ti/16", "R26+S/32", "S18x2/16", "axial-S/16")),
        *(ResNetConfig(units=(1, 1), classes=3, axial=axial) for axial in (False, True)),
        tiny(positions="relative_bias", mlp="swiglu", layer_scale=0.1),
        tiny(positions="2d", registers=2, pool="map", pre_logits=8),
        tiny(positions="sincos", pool="cls+gap", final_norm="pooled"),
        *(tiny(stem=stem, width=32) for stem in ("levit", "early", "hmlp")),
    ],
)
def test_a_network_without_memory_has_the_same_tensors_and_computed_values(config: ViTConfig | ResNetConfig) -> None:
    bare, full = skeleton(config), build(config)
    assert {name: (t.shape, t.dtype, t.requires_grad) for name, t in bare.named_parameters()} == {
        name: (t.shape, t.dtype, t.requires_grad) for name, t in full.named_parameters()
    }
    assert all(tensor.is_meta for tensor in bare.parameters())
    fill(bare, {name: tensor.clone() for name, tensor in full.state_dict().items()})
    buffers = dict(full.named_buffers())
    assert dict(bare.named_buffers()).keys() == buffers.keys()
    for name, buffer in bare.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_a_file_must_be_in_exactly_one_format(tmp_path: Path) -> None:
    save_file({"something": torch.ones(1)}, tmp_path / "w")
    with pytest.raises(WeightsError, match=r"not in a known format .*google.*'something'"):
        load(tmp_path / "w")
    archive = Archive(tmp_path / "w", "safetensors", {}, lambda name: torch.ones(1))
    first, second, third = Toy(tiny(), name="one"), Toy(tiny(), name="two"), Toy(tiny(), right=False)
    assert recognise(archive, [third, first]) is first
    with pytest.raises(WeightsError, match="could be in format one or two"):
        recognise(archive, [first, second, third])


def test_formats_are_named_as_their_modules_are() -> None:
    assert [format_named(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(UsageError, match=r"'googel'.* Did you mean 'google'"):
        format_named("googel")


# ---- where the weights are


def test_our_own_models_and_runs_come_from_the_store(tmp_path: Path) -> None:
    model = fresh(tiny())
    save_model(tmp_path / "run" / "model" / "best", model, Card(tiny(), CLASSES, licence="MIT"))
    for place in ("run", "run/model", "run/model/best", "run/model/best/model.safetensors"):
        loaded = vitrail.load(str(tmp_path / place))
        assert loaded.card.licence == "MIT" and loaded.load_report.format == "vitrail"
        assert torch.equal(loaded.norm.weight, model.norm.weight)
    file = tmp_path / "run" / "model" / "best" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(WeightsError, match=r"best/model\.safetensors cannot be read: truncated"):
        load(tmp_path / "run")


def test_a_hub_name_is_resolved_where_no_path_of_that_name_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "cache", fresh(tiny()), Card(tiny(), CLASSES))
    asked: list[str] = []
    monkeypatch.setattr(hub, "resolve", lambda name: asked.append(name) or tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    assert load("someone/vit-tiny").card.class_names == CLASSES
    assert asked == ["someone/vit-tiny"]
    save_model(tmp_path / "someone" / "vit-tiny", fresh(tiny()), Card(tiny(), list("abc")))
    assert load("someone/vit-tiny").card.class_names == list("abc")
    assert len(asked) == 1


@pytest.mark.parametrize("source", ["nowhere", "/nowhere/at/all.npz", "./no/such", Path("owner/name")])
def test_a_path_that_is_not_there_is_told(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "resolve", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(WeightsError, match="there is nothing at"):
        load(source)


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "finetune-1").mkdir()
    meant = f"Did you mean {tmp_path}/finetune-1\\? {tmp_path} holds finetune-1"
    with pytest.raises(WeightsError, match=f"nothing at {tmp_path}/finetune-2. {meant}. Give"):
        load(tmp_path / "finetune-2")


@pytest.mark.parametrize("source", ["roses-1", "run/roses-1", "roses-4"])
def test_a_run_without_its_folder_is_told_the_runs_before_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest runs come first: of forty runs, the first by name are rarely the ones that were meant."""
    for name in ["roses-1", *(f"a-{number}" for number in range(9)), ".hidden"]:
        (tmp_path / "runs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError) as raised:
        load(source)
    found = str(raised.value)
    assert f"{source} in {tmp_path}" in found or f"nothing at {source}. " in found
    assert "Did you mean runs/roses-1? runs holds roses-1, a-" in found and "and 5 more." in found
    assert found.index("runs/roses-1?") < found.lower().index("hub")


# ---- memory


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pth", ".npz"])
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path, toy: Callable[..., Toy], suffix: str) -> None:
    """A map would end the process when the file is cut, and change the model when it is overwritten."""
    toy(tiny())
    file = tmp_path / f"w{suffix}"
    tensors = {f"toy/{name}": tensor for name, tensor in fresh(tiny()).state_dict().items()}
    if not suffix:
        save_model(file, fresh(tiny()), Card(tiny(), CLASSES))
        file /= "model.safetensors"
    elif suffix == ".npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file(tensors, file) if suffix == ".safetensors" else torch.save(tensors, file)
    before = file.read_bytes()
    model = load(file)
    if sys.platform == "linux":
        assert str(file.resolve()) not in Path("/proc/self/maps").read_text()
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with file.open("r+b") as stream:  # in place: a map would show it
        stream.write(bytes(len(before)))
        stream.truncate(100)
    assert all(torch.equal(parameter, old[name]) for name, parameter in model.named_parameters())
    assert any(parameter.any() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(torch.rand(2, 3, 16, 16)).square().sum().backward()
    optimizer.step()
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, old[name])]
    assert len(changed) > len(old) / 2
    assert file.read_bytes() == bytes(100)


def test_a_part_of_a_loaded_model_is_copied_and_saved_on_its_own(tmp_path: Path) -> None:
    save_model(tmp_path, fresh(tiny(depth=8)), Card(tiny(depth=8), CLASSES))
    model = load(tmp_path)
    buffer = io.BytesIO()
    torch.save(model.head.state_dict(), buffer)
    assert buffer.tell() < 4000
    copied = copy.deepcopy(model)
    copied.head.weight.data += 1
    assert not torch.equal(copied.head.weight, model.head.weight)


def test_saving_over_the_file_that_a_model_was_loaded_from(tmp_path: Path) -> None:
    save_model(tmp_path, fresh(tiny()), Card(tiny(), CLASSES))
    model = load(tmp_path)
    with torch.no_grad():
        model.norm.weight += 1
    save_model(tmp_path, model, replace(model.card, licence="MIT"))
    again = load(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


PEAK = """
import json, sys
from pathlib import Path
from vitrail.weights.load import load, read_card

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

load(sys.argv[1])  # imports, thread pools
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
model = load(sys.argv[2])
print(json.dumps((status("VmHWM") - before) / Path(sys.argv[2]).stat().st_size))
load(sys.argv[1], classes=3, image_size=64)
# what torch imports for the first random number on the meta device: seconds, and 150 MB
assert "sympy" not in sys.modules, "initialised without an effect"
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("origin", ["vitrail", "timm"])
def test_the_peak_of_memory_is_below_a_third_more_than_the_file(tmp_path: Path, origin: str) -> None:
    import timm

    def write(folder: Path, width: int, depth: int) -> Path:
        folder.mkdir()
        if origin == "vitrail":
            config = tiny(width=width, depth=depth, heads=width // 64, mlp_dim=4 * width)
            save_model(folder, build(config), Card(config))
        else:
            keywords = dict(embed_dim=width, depth=depth, num_heads=width // 64, img_size=32)
            model = timm.create_model("vit_base_patch16_224", **keywords)
            save_file(model.state_dict(), folder / "model.safetensors")
        return folder / "model.safetensors"

    small, large = write(tmp_path / "small", 64, 1), write(tmp_path / "large", 768, 4)
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 1.3


@pytest.mark.processes
def test_building_without_memory_imports_nothing_and_keeps_constants() -> None:
    code = """
import sys, torch
from vitrail.model.variants import variant
from vitrail.weights.assemble import skeleton
before = set(sys.modules)
for name in ("Ti/16", "R+Ti/16", "R50x1", "axial-B/32"):
    network = skeleton(variant(name))
    assert all(parameter.is_meta for parameter in network.parameters()), name
    assert "torch._refs" not in set(sys.modules) - before, name  # what a random number on the meta device would import
    stored = network.state_dict().keys()
    assert not any(buffer.is_meta for key, buffer in network.named_buffers() if key not in stored), name
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_card_is_read_once_as_long_as_its_file_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=16, patch=8, image_size=(16, 16), classes=2)
    save_model(tmp_path, build(config), Card(config, ["cat", "dog"]))
    read: list[Path] = []
    true = store.read_card
    monkeypatch.setattr(store, "read_card", lambda path: read.append(path) or true(path))
    first = read_card(tmp_path)
    first.provenance["mine"] = 1  # a card of one's own: the next caller gets another
    assert read_card(tmp_path) == Card(config, ["cat", "dog"]) and len(read) == 1
    save_model(tmp_path, build(config), Card(config, ["dog", "cat"]))
    assert read_card(tmp_path).class_names == ["dog", "cat"] and len(read) == 2
