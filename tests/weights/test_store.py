from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from safetensors.torch import load_file, save_file
from tiny_networks import fresh, tiny
from torch import nn

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights import tensor_file
from vitrail.weights.assemble import Overrides
from vitrail.weights.card import Card
from vitrail.weights.store import find_model, load_model, read_card, save_model

NAMES = ["cat", "dog", "<b>"]


def saved(folder: Path, config: ViTConfig | ResNetConfig | None = None) -> nn.Module:
    config = config or tiny()
    model = fresh(config)
    save_model(folder, model, Card(config, NAMES, Preprocess(image_size=config.image_size)))
    return model


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(pool="gap", positions="2d", layer_scale=0.1),
        tiny(pool="map", positions="relative", pre_logits=8),
        tiny(positions="1d", place="every", registers=2, block="parallel", branches=2),
        tiny(stem="hmlp", positions="sincos", patch=4),
        tiny(positions="none", cls_position=False),
        ResNetConfig(units=(1, 1), width=32, classes=3, image_size=(32, 32)),
    ],
    ids=lambda config: f"{type(config).__name__}-{getattr(config, 'positions', '')}",
)
def test_a_loaded_model_computes_what_the_saved_one_did(tmp_path: Path, config: ViTConfig | ResNetConfig) -> None:
    model = saved(tmp_path / "m", config)
    images = torch.randint(0, 256, (2, 3, *config.image_size), dtype=torch.uint8)
    loaded = load_model(tmp_path / "m")
    assert not loaded.training
    with torch.inference_mode():
        assert torch.equal(loaded(images), model(images))
    assert loaded.card == Card(config, NAMES, Preprocess(image_size=config.image_size))
    assert sorted(loaded.load_report.loaded) == sorted(model.state_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda card: json.dumps({**json.loads(card), "class_names": ["dog", "cat", "<b>"]}), "differs.*'class_names'"),
        (lambda card: card[:40], "cannot be read"),
        (lambda card: json.dumps(json.loads(card)), ""),  # another layout of the same JSON
    ],
    ids=["another", "damaged", "same"],
)
def test_a_changed_copy_of_the_card_is_named(
    change: Callable[[str], str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    copy = tmp_path / "card.json"
    copy.write_text(change(copy.read_text()))
    assert load_model(tmp_path).card.class_names == NAMES
    assert len(caplog.messages) == bool(said) and re.search(said, caplog.text)


def test_run_folders_prefer_the_best_model(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "model" / "last")
    assert find_model(tmp_path / "run").parent.name == "last"
    saved(tmp_path / "run" / "model" / "best")
    assert find_model(tmp_path / "run").parent.name == "best"
    assert find_model(tmp_path / "run" / "model").parent.name == "best"
    assert find_model(tmp_path / "run" / "model" / "last").parent.name == "last"
    assert read_card(tmp_path / "run").class_names == NAMES


def test_the_card_is_also_there_to_read(tmp_path: Path) -> None:
    saved(tmp_path)
    assert json.loads((tmp_path / "card.json").read_text()) == read_card(tmp_path).to_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "model.safetensors"]


def test_any_name_a_folder_can_have_is_kept(tmp_path: Path) -> None:
    names = [os.fsdecode(b"caf\xe9"), "\u8336 \u2764", '"\\\n']
    save_model(tmp_path, fresh(tiny()), Card(tiny(), names))
    assert load_model(tmp_path).card.class_names == names
    assert json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))["class_names"] == names


@pytest.mark.parametrize("pre_logits", [None, 8])
@pytest.mark.parametrize("classes", [3, 5, 0])
def test_a_new_head_is_zero_and_everything_else_is_kept(tmp_path: Path, classes: int, pre_logits: int | None) -> None:
    model = saved(tmp_path, tiny(pre_logits=pre_logits))
    loaded = load_model(tmp_path, Overrides(classes=classes))
    assert loaded.config == tiny(classes=classes) == loaded.card.config
    assert loaded.card.class_names == []
    new, old = loaded.state_dict(), model.state_dict()
    head = {"head.weight", "head.bias"} if classes else set()
    for name in new.keys() - head:
        assert torch.equal(new[name], old[name]), name
    for name in head:
        assert not new[name].any()
    report = loaded.load_report
    assert set(report.reset) == head
    assert set(report.unused) == {name for name in old if name.startswith(("head.", "pre_logits."))}
    assert set(report.unused.values()) <= {"replaced by a new head"}
    assert set(report.loaded) == new.keys() - head


def test_positions_are_resampled_as_scipy_does(tmp_path: Path) -> None:
    model = saved(tmp_path)
    loaded = load_model(tmp_path, Overrides(image_size=(24, 40)))
    table = model.positions.embedding.detach().numpy()[0]
    grid = scipy.ndimage.zoom(table[1:].reshape(4, 4, 16), (6 / 4, 10 / 4, 1), order=1)
    expected = np.concatenate([table[:1], grid.reshape(60, 16)])
    np.testing.assert_allclose(loaded.positions.embedding.detach().numpy()[0], expected, atol=1e-6)
    assert loaded.config.image_size == (24, 40) == loaded.card.preprocess.image_size
    assert list(loaded.load_report.resampled) == ["positions.embedding"]
    assert "16 x 16 -> 24 x 40 px, official" in str(loaded.load_report)


@pytest.mark.parametrize("place", ["input", "every"])
@pytest.mark.parametrize("positions", ["1d", "2d", "relative"])
def test_resampling_at_load_equals_resampling_as_the_model_runs(tmp_path: Path, positions: str, place: str) -> None:
    model = saved(tmp_path, tiny(positions=positions, place=place))
    loaded = load_model(tmp_path, Overrides(image_size=24))
    images = torch.randn(2, 3, 24, 24)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(images), model(images), rtol=1e-4, atol=1e-5)


def test_the_way_of_resampling_can_be_chosen(tmp_path: Path) -> None:
    saved(tmp_path)
    tables = [
        load_model(tmp_path, Overrides(image_size=24, resize_mode=mode)).positions.embedding  # type: ignore[arg-type]
        for mode in ("official", "timm")
    ]
    assert not torch.allclose(*tables)
    assert read_card(tmp_path).resize_mode == "official"
    assert load_model(tmp_path, Overrides(resize_mode="timm")).card.resize_mode == "timm"


def _rewritten(folder: Path, change: Any) -> None:
    """Save once more what `change` makes of the tensors, with the header the file had."""
    from safetensors import safe_open

    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def _set(name: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "lacks the tensor 'norm.weight' of shape \\(16,\\)"),
        (
            _set("norm.weight", torch.ones(17)),
            "'norm.weight' in shape \\(17,\\); its card requires \\(16,\\)",
        ),
        (_set("norm.extra", torch.ones(3)), "holds the tensor 'norm.extra'"),
        (_set("norm.weight", torch.ones(16)), "damaged: its tensors do not match their checksum"),
    ],
)
def test_a_file_that_does_not_fit_its_card_is_refused_by_the_name_of_the_tensor(
    tmp_path: Path, change: Any, message: str
) -> None:
    saved(tmp_path)
    _rewritten(tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_never_replaces_a_good_one(tmp_path: Path, value: float) -> None:
    good = saved(tmp_path)
    bad = fresh(tiny())
    with torch.no_grad():
        bad.norm.weight[3] = value
    with pytest.raises(WeightsError, match=r"1 of 16 values of 'norm.weight' are NaN or infinite"):
        save_model(tmp_path, bad, Card(tiny(), NAMES))
    assert torch.equal(load_model(tmp_path).norm.weight, good.norm.weight)


def test_a_model_with_values_that_are_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import store

    bad = fresh(tiny())
    with torch.no_grad():
        bad.head.bias[0] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(store, "check_finite", lambda *_: None)  # written by something less careful
        save_model(tmp_path, bad, Card(tiny(), NAMES))
    with pytest.raises(WeightsError, match=r"1 of 3 values of 'head.bias' are NaN"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 5000, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="truncated, damaged or of another kind"):
        load_model(tmp_path)


def test_every_flipped_bit_of_a_tensor_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in np.random.default_rng(0).integers(start, len(whole), 20):
        broken = bytearray(whole)
        broken[place] ^= 1 << int(place) % 8
        file.write_bytes(broken)
        with pytest.raises(WeightsError):
            load_model(tmp_path)


def test_a_flipped_bit_of_the_card_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for part in (b"norm_eps", b"1e-06", b"erf", b"official", b"cat", b"bilinear"):
        broken = bytearray(whole)
        broken[whole.index(part)] ^= 1
        file.write_bytes(broken)
        with pytest.raises(WeightsError, match="its card does not match its checksum"):
            load_model(tmp_path)


def test_other_kinds_of_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nothing at .*/nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"holds no model. Looked for .*model/best/model.safetensors"):
        load_model(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"anything")
    with pytest.raises(WeightsError, match="not a vitrail model"):
        load_model(tmp_path / "weights.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(WeightsError, match="not written by vitrail"):
        load_model(tmp_path / "foreign.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "odd.safetensors", metadata={"card": "{}"})
    with pytest.raises(WeightsError, match=r"unusable card: .*not a vitrail model card"):
        load_model(tmp_path / "odd.safetensors")


def test_a_failed_save_leaves_the_old_model_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import store

    old = saved(tmp_path)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path, fresh(tiny()), Card(tiny(), NAMES))
    assert torch.equal(load_model(tmp_path).norm.weight, old.norm.weight)
    assert sorted(os.listdir(tmp_path)) == ["card.json", "model.safetensors"]


def test_positions_of_an_impossible_size_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(Exception, match="not divisible by the patch"):
        load_model(tmp_path, Overrides(image_size=18))


def test_others_may_read_a_model_as_any_file(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    (tmp_path / "plain").touch()
    for name in ("model.safetensors", "card.json"):
        assert (tmp_path / "model" / name).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_is_replaced_while_it_is_opened_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in progress replaces its best model: tensors and checksum come from one file, the one that was there."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = saved(tmp_path / "old"), saved(tmp_path / "new")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 1
    save_model(tmp_path / "new", new, read_card(tmp_path / "new"))
    opened = tensor_file.open_regular

    def replacing(path: Path) -> Any:
        stream = opened(path)
        os.replace(tmp_path / "new" / "model.safetensors", path)
        return stream

    monkeypatch.setattr(tensor_file, "open_regular", replacing)
    loaded = load_model(tmp_path / "old")
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in loaded.state_dict().items())
