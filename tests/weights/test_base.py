"""A model of which only the tuned part is stored: found again wherever it or its base has gone, and never mixed up."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.optim.tune import tune
from vitrail.training.run import Run, Tune
from vitrail.weights import download as hub
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.weights.store import load_model, read_card, save_model

TINY = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=3)
HEADS_OF_64 = replace(TINY, width=64, heads=1)
"""What a bare file of most libraries is read as."""


def fresh(config: ViTConfig | ResNetConfig = TINY, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tuned(base: Path | str, folder: Path, part: Tune = "attention", **changes: Any) -> nn.Module:
    """Tune a part of `base` by random steps, store it in `folder`, and return the model as it was in memory."""
    model = load(base, classes=2, **changes)
    found, _ = tune(model, Run(weights=str(base), tune=part))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
    save_model(folder, model, Card(model.config, ["cat", "dog"]), found.base)
    return model


def same(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A whole model in a folder of its own."""
    return save(fresh(), tmp_path / "runs" / "base").path


@pytest.fixture
def part(base: Path) -> Path:
    """The folder of a part that was tuned from `base`."""
    return base.parent / "part" / "model" / "best"


@pytest.mark.parametrize("which", ["attention", "ffn", "head"])
def test_only_what_was_tuned_is_stored_and_all_of_it_comes_back(base: Path, part: Path, which: Tune) -> None:
    model = tuned(base, part, which)
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    stored, whole = load_file(part / "model.safetensors"), load_file(base / "model.safetensors")
    assert stored.keys() == learned
    found = load(part)
    same(found, model)
    for name, value in found.state_dict().items():  # told apart without our own reader
        assert torch.equal(value, stored[name] if name in stored else whole[name]), name
    assert f"{len(whole.keys() - learned - {'head.weight'})} tensors from {base}" in str(found.load_report)
    assert read_card(part).class_names == ["cat", "dog"] == found.card.class_names


def test_the_run_above_it_and_a_new_head_and_size_work_as_for_whole_models(base: Path, part: Path) -> None:
    model = tuned(base, part)
    same(load(part.parent.parent), model)
    other = load(part, classes=5, image_size=24)
    assert other.config.classes == 5 and not other.head.weight.any()
    assert list(other.load_report.resampled) == ["positions.embedding"]
    assert torch.equal(other.blocks[1].mlps[0].mlp.fc1.weight, load(base).blocks[1].mlps[0].mlp.fc1.weight)


@pytest.mark.parametrize("positions", ["1d", "2d", "relative_bias"])
def test_what_a_new_resolution_changed_is_stored_too(tmp_path: Path, positions: Any) -> None:
    config = replace(TINY, positions=positions)
    base = save(fresh(config), tmp_path / "base").path
    model = tuned(base, tmp_path / "part", "ffn", image_size=24)
    tables = {name for name in model.state_dict() if name.startswith("positions.") and name != "positions.front"}
    assert tables and tables <= load_file(tmp_path / "part" / "model.safetensors").keys()
    same(load(tmp_path / "part"), model)


@pytest.mark.parametrize(
    ("config", "format", "name"),
    [
        (HEADS_OF_64.changed(gelu="tanh"), "google", "base.npz"),
        (HEADS_OF_64, "timm", "base.safetensors"),
        (TINY, "hf", "base"),
        (replace(HEADS_OF_64, layer_scale=0.1, cls_position=False), "deit", "base.pth"),
        (ResNetConfig(units=(1, 1, 1, 1), width=32, classes=3, image_size=(32, 32)), "bit", "base.npz"),
    ],
)
def test_any_weights_can_be_the_base(tmp_path: Path, config: Any, format: str, name: str) -> None:
    save(fresh(config), tmp_path / name, format)
    model = tuned(tmp_path / name, tmp_path / "part", "head" if format == "bit" else "attention")
    assert len(load_file(tmp_path / "part" / "model.safetensors")) < len(model.state_dict()) / 2
    same(load(tmp_path / "part"), model)


def test_a_part_of_a_part(base: Path, part: Path) -> None:
    tuned(base, part, "attention")
    model = tuned(part.parent.parent, part.parent / "again", "ffn")
    same(load(part.parent / "again"), model)
    shutil.rmtree(base)
    with pytest.raises(
        WeightsError, match=r"again.*base model .*part cannot be loaded(.|\n)*best.*base model .*base cannot be loaded"
    ):
        load(part.parent / "again")


# moving


def test_the_run_may_move_while_its_base_stays(base: Path, part: Path, tmp_path: Path) -> None:
    model = tuned(base, part)
    (tmp_path / "far" / "away").mkdir(parents=True)
    shutil.move(part, tmp_path / "far" / "away")
    same(load(tmp_path / "far" / "away" / "best"), model)


def test_both_may_move_together(base: Path, part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    model = tuned("base", part)  # as typed in that folder
    shutil.move(base.parent, tmp_path / "elsewhere")
    monkeypatch.chdir("/")
    same(load(tmp_path / "elsewhere" / "part"), model)


def test_of_two_places_the_one_with_the_right_weights_counts(base: Path, part: Path, tmp_path: Path) -> None:
    model = tuned(base, part)
    shutil.copytree(base.parent, tmp_path / "copy")
    save(fresh(seed=1), base, overwrite=True)  # others now
    same(load(tmp_path / "copy" / "part"), model)


def test_a_link_in_the_place_of_the_base_will_do(base: Path, part: Path, tmp_path: Path) -> None:
    model = tuned(base, part)
    shutil.move(base, tmp_path / "moved")
    base.symlink_to(tmp_path / "moved")
    same(load(part), model)


# what is wrong is told


def test_a_missing_base_is_named_with_what_to_do(base: Path, part: Path, tmp_path: Path) -> None:
    tuned(base, part)
    shutil.move(base, tmp_path / "hidden")
    with pytest.raises(WeightsError) as error:
        load(part)
    for text in (
        f"its base model {base} cannot be loaded",
        f"{base}: does not exist",
        "Put the weights",
        "a link",
        "convert",
    ):
        assert text in str(error.value)
    assert read_card(part).class_names == ["cat", "dog"]  # needs no tensors


@pytest.mark.parametrize("config", [TINY, replace(TINY, width=24), replace(TINY, depth=1)])
def test_another_base_in_its_place_is_never_taken_for_it(base: Path, part: Path, config: ViTConfig) -> None:
    tuned(base, part)
    save(fresh(config, seed=1), base, overwrite=True)
    with pytest.raises(
        WeightsError, match=r"the weights have changed since the tuning; their checksum \(sha256\) differs"
    ):
        load(part)


def test_a_damaged_base_is_told_as_what_it_is(base: Path, part: Path) -> None:
    tuned(base, part)
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(WeightsError, match="its tensors do not match their checksum"):
        load(part)


def test_a_part_in_the_place_of_its_own_base_ends(base: Path, part: Path) -> None:
    tuned(base, part)
    shutil.rmtree(base)
    shutil.copytree(part, base)
    with pytest.raises(WeightsError, match="this model itself needs the tuned part as its base"):
        load(base)


def test_it_is_read_by_load_alone(base: Path, part: Path) -> None:
    tuned(base, part)
    with pytest.raises(WeightsError, match=r"only the tuned part of a model\. vitrail\.load"):
        load_model(part)


def rewritten(folder: Path, change: Any, tensors: Any = None) -> None:
    """Save the part once more with another header, or other tensors."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        header: dict[str, str] = handle.metadata()
    state: dict[str, Tensor] = load_file(file)
    change(header)
    (tensors or (lambda state: None))(state)
    save_file(state, file, metadata=header)


def test_a_changed_reference_or_a_lost_tensor_is_damage(base: Path, part: Path) -> None:
    tuned(base, part)
    rewritten(part, lambda header: header.update(base=header["base"].replace("base", "bass")))
    with pytest.raises(WeightsError, match="the reference to its base model does not match its checksum"):
        load(part)
    tuned(base, part)
    rewritten(part, lambda header: None, lambda state: state.pop("head.bias"))
    with pytest.raises(WeightsError, match="its tensors do not match their checksum"):
        load(part)


@pytest.mark.parametrize("values", [None, [], {}, {"source": "x"}, {"path": 1}])
def test_a_reference_of_another_form_is_refused(values: Any) -> None:
    with pytest.raises(WeightsError, match="a file refers to its base model in an unknown way"):
        BaseWeights.read(values, "a file")
    right = BaseWeights("x", "/x", "0" * 64).written_in(Path("/"))
    assert BaseWeights.read(json.loads(json.dumps(right)), "a file").path == "/x"
    with pytest.raises(WeightsError):
        BaseWeights.read({**right, **(values if isinstance(values, dict) else {"hub": "no"}), "more": 1}, "a file")


# whole again


@pytest.mark.parametrize("format", ["vitrail", "hf"])
def test_converted_it_needs_no_base(base: Path, part: Path, tmp_path: Path, format: str) -> None:
    model = tuned(base, part)
    out = save(load(part), tmp_path / "out", format).path
    shutil.rmtree(base)
    images = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(load(out)(images), model(images))
    assert len(load(out).state_dict()) == len(model.state_dict())


def test_a_base_on_the_hub_is_asked_for_by_its_commit(
    base: Path, part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its folder in the cache, without the network; where that is gone, exactly the same revision again."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "cache" / "models--someone--vit" / "snapshots" / commit
    shutil.copytree(base, cache)
    asked = []

    def resolve(name: str) -> Path:
        asked.append(name)
        shutil.copytree(base, cache, dirs_exist_ok=True)
        return cache

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.chdir(tmp_path)
    model = tuned("someone/vit", part)
    assert asked == ["someone/vit"]
    same(load(part), model)
    assert asked == ["someone/vit"]
    shutil.rmtree(cache)
    same(load(part), model)
    assert asked == ["someone/vit", f"someone/vit@{commit}"]


def test_a_part_is_small(tmp_path: Path) -> None:
    """4 of 12 D^2: of weights alone a third, and the head."""
    config = replace(TINY, width=64, mlp_dim=256, depth=4)
    base = save(fresh(config), tmp_path / "base").path
    tuned(base, tmp_path / "part")
    sizes = [os.path.getsize(folder / "model.safetensors") for folder in (tmp_path / "part", base)]
    values = 4 * (4 * 64**2 + 4 * 64) + 2 * 64 + 2
    assert 4 * values < sizes[0] < 4 * values + 6000  # the header, with card and names
    assert sizes[0] / sizes[1] == pytest.approx(1 / 3, abs=0.03)
